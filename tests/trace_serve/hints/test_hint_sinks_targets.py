"""What a request may name as the place of its hints."""

from __future__ import annotations

from pathlib import Path

import pytest
from hint_sink_tools import make_job, make_queue
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_serve.errors import ConfigError
from trace_serve.hints.sinks import AllowedTargets, parse_target

HOSTILE_URLS = [
    "",
    "FILE",
    "inline ",
    "/etc/passwd",
    "../x",
    "s3:/bucket",
    "s3://bucket/../other",
    "s3://bucket/./a",
    "s3://bucket//a",
    "s3://bucket/%2e%2e/other",
    "s3://bucket/..\\other",
    "s3://user:secret@bucket/a",
    "s3://bucket/a?versionId=1",
    "s3://bucket/a#b",
    "s3://bucket/*",
    "s3://bucket/a\n",
    "s3://bucket/a\x00",
    "S3://bucket/a",
    "simplecache::s3://bucket/a",
    "s3://bucket/a::file:///etc",
    "zip://a.zip::s3://bucket/x",
    "file://etc/passwd",
    "file:///a/../etc",
    "s3://b\u2025cket/a",
    "s3://" + "a" * 1025,
    None,
    7,
    True,
    ["file"],
    {"url": "file"},
]


@pytest.mark.parametrize("text", HOSTILE_URLS, ids=repr)
def test_what_is_not_a_plain_target_is_refused_naming_the_field(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^trace_hints\.sink: got ") as caught:
        parse_target(text)
    assert caught.value.field == "trace_hints.sink"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["inline", "file", "shm"])
def test_words_are_targets(word: str) -> None:
    assert str(parse_target(word)) == word


def test_a_url_loses_its_trailing_slash() -> None:
    assert parse_target("s3://bucket/run/").url == "s3://bucket/run"
    assert parse_target("memory://").url == "memory://"


@pytest.mark.parametrize(
    ("prefix", "url", "allowed"),
    [
        ("memory://runs", "memory://runs", True),
        ("memory://runs", "memory://runs/a/b", True),
        ("memory://runs/", "memory://runs/a", True),
        ("memory://runs", "memory://runs2", False),
        ("memory://runs", "memory://", False),
        ("memory://runs/a", "memory://runs", False),
        ("memory://", "memory://anything/below", True),
        ("memory://runs", "s3://runs", False),
        ("file:///data/hints", "file:///data/hints/x", True),
        ("file:///data/hints", "file:///data", False),
        ("file:///data/hints", "local:///data/hints", False),
    ],
)
def test_a_url_has_to_lie_below_a_prefix_at_a_part_of_its_path(prefix: str, url: str, allowed: bool) -> None:
    targets = AllowedTargets(url_prefixes=(prefix,))
    if allowed:
        assert targets.parse(url).url == url.rstrip("/") or url.endswith("//")
        return
    with pytest.raises(ConfigError, match="not below a URL that the operator allowed") as caught:
        targets.parse(url)
    assert caught.value.field == "trace_hints.sink"
    assert prefix not in str(caught.value).replace(url, "")


@settings(deadline=None)
@given(st.text(alphabet="abs3:/._-%@?#\\~*", max_size=30))
def test_no_text_gets_out_of_the_allowed_prefix(text: str) -> None:
    targets = AllowedTargets(url_prefixes=("file:///allowed/here",))
    try:
        target = targets.parse(text)
    except ConfigError:
        return
    if target.kind == "url":
        assert Path(target.url.removeprefix("file://")).resolve().is_relative_to("/allowed/here")
    else:
        assert target.kind == "inline"


def test_words_need_what_the_operator_started() -> None:
    nothing = AllowedTargets()
    for word in ("file", "shm"):
        with pytest.raises(ConfigError, match="needs an engine that was started with"):
            nothing.parse(word)
    assert nothing.parse("inline").kind == "inline"


@pytest.mark.parametrize("prefix", ["runs", "file", "https://user@host/x", "s3://a/../b"])
def test_a_malformed_prefix_stops_the_start(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"^hint_url_prefixes: ") as caught:
        AllowedTargets(url_prefixes=(prefix,))
    assert caught.value.field == "hint_url_prefixes"


def test_a_prefix_without_a_file_system_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="no file system for nosuchscheme"):
        AllowedTargets(url_prefixes=("nosuchscheme://bucket",))


HOSTILE_NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "../a",
    "a.b",
    "a\\b",
    "a\x00",
    "a\n",
    "a b",
    "ä",
    "*",
    "a" * 129,
    "~",
    "-\u2010",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=repr)
def test_a_name_that_is_not_a_stem_is_refused_and_writes_nothing(tmp_path: Path, name: str) -> None:
    queue = make_queue(tmp_path / "hints")
    with pytest.raises(ConfigError, match=r"^rid: ") as caught:
        queue.submit(make_job(name, "file"))
    assert caught.value.field == "rid"
    assert queue.stats().queued == 0
    assert list(tmp_path.rglob("*")) == []


def test_inline_hints_have_no_sink(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="travel in the answer"):
        make_queue(tmp_path).submit(make_job("r", "inline"))
