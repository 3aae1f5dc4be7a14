"""A hint file read, written and merged in parts is the same as the whole."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hint_factory import RECIPE_ID, make_file, make_site, same
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from trace_serve.errors import HintFormatError
from trace_serve.hints import cli, container, merge, wire
from trace_serve.hints.reader import HintReader
from trace_serve.hints.writer import HintWriter

WHOLE = make_file(37)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "whole.safetensors"
    wire.write(path, WHOLE, scale="byte")
    return path


def cut(hints: wire.HintFile, start: int, stop: int) -> wire.HintFile:
    """The rows by hand."""
    part = slice(start, stop)
    sites = tuple(
        dataclasses.replace(
            site,
            bits=site.bits[part],
            codes=None if site.codes is None else site.codes[part],
            scales=None if site.scales is None else site.scales[part],
            present=site.present[part],
            global_log2=None if site.global_log2 is None else site.global_log2[part],
            global_scale=None if site.global_scale is None else site.global_scale[part],
        )
        for site in hints.sites
    )
    spans = tuple(
        (max(begin, start) - start, min(end, stop) - start, version)
        for begin, end, version in hints.weight_versions
        if max(begin, start) < min(end, stop)
    )
    return dataclasses.replace(
        hints,
        token_ids=hints.token_ids[part],
        sites=sites,
        weight_versions=spans,
        first_token=hints.first_token + start,
        logprobs=None if hints.logprobs is None else hints.logprobs[part],
        routed_experts=None if hints.routed_experts is None else hints.routed_experts[part],
        routed_present=None if hints.routed_present is None else hints.routed_present[part],
        next_token_id=hints.next_token_id if stop == hints.rows else int(hints.token_ids[stop]),
    )


@pytest.mark.parametrize("scale", ["lsb", "byte", "none"])
@pytest.mark.parametrize(("start", "stop"), [(0, 37), (0, 1), (5, 21), (16, 24), (36, 37)])
def test_a_part_equals_the_rows_of_the_whole(tmp_path: Path, scale: str, start: int, stop: int) -> None:
    wire.write(tmp_path / "x", WHOLE, scale=scale)
    whole = wire.read(tmp_path / "x")
    with HintReader(tmp_path / "x", expect_recipe_id=RECIPE_ID, expect_token_ids=whole.token_ids) as reader:
        assert same(reader.rows(start, stop), cut(whole, start, stop))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=8), st.sampled_from(["lsb", "byte", "none"]))
def test_parts_of_any_size_write_the_bytes_of_the_whole(sizes: list[int], scale: str) -> None:
    import tempfile

    whole = make_file(sum(sizes))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x"
        begin = 0
        with HintWriter(path, whole.rows, scale=scale) as writer:
            for size in sizes:
                writer.append(cut(whole, begin, begin + size))
                begin += size
        assert path.read_bytes() == wire.to_bytes(whole, scale=scale)
        assert [each.name for each in Path(directory).iterdir()] == ["x"]


def test_what_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(HintFormatError, match="rows: got 3, expected 37"), HintWriter(tmp_path / "x", 37) as writer:
        writer.append(cut(WHOLE, 0, 3))
    with pytest.raises(HintFormatError, match="rows"), HintWriter(tmp_path / "x", 2) as writer:
        writer.append(cut(WHOLE, 0, 3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["first_token", "recipe_id", "sites", "rows"])
def test_a_part_that_does_not_follow_is_refused(tmp_path: Path, field: str) -> None:
    second = cut(WHOLE, 3, 6)
    wrong = {
        "first_token": cut(WHOLE, 4, 6),
        "recipe_id": dataclasses.replace(second, recipe_id="sha256:" + "00" * 32),
        "sites": dataclasses.replace(second, sites=second.sites[:2]),
        "rows": cut(WHOLE, 3, 37),
    }[field]
    writer = HintWriter(tmp_path / "x", 10)
    writer.append(cut(WHOLE, 0, 3))
    with pytest.raises(HintFormatError) as caught:
        writer.append(wrong)
    assert caught.value.field == field
    writer.discard()


@pytest.mark.parametrize("ids", [None, np.zeros((37, 2), dtype=np.int32), np.zeros(37, dtype=np.float32)])
def test_a_file_without_usable_token_ids_is_refused_when_it_is_opened(path: Path, ids: np.ndarray | None) -> None:
    arrays, metadata = container.decode(path.read_bytes())
    del arrays["token_ids"]
    if ids is not None:
        arrays["token_ids"] = ids
    path.write_bytes(container.encode(arrays, metadata))
    with pytest.raises(HintFormatError, match="token_ids"):
        HintReader(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_versions", '[[0, 99, "7"]]'),
        ("weight_versions", '[[0, 37, "7"], [3, 37, "8"]]'),
        ("weight_versions", '[[5, 37, "7"]]'),
        ("next_token_id", "0.5"),
    ],
)
def test_metadata_that_no_part_shows_is_checked_when_the_file_is_opened(path: Path, key: str, value: str) -> None:
    arrays, metadata = container.decode(path.read_bytes())
    path.write_bytes(container.encode(arrays, {**metadata, key: value}))
    with pytest.raises(HintFormatError, match=key):
        HintReader(path)


def test_a_damaged_file_is_refused_when_it_is_opened(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(HintFormatError, match="checksum"):
        HintReader(path)
    path.write_bytes(b"")
    with pytest.raises(HintFormatError):
        HintReader(path)


def test_other_tokens_and_recipes_are_refused(path: Path) -> None:
    with pytest.raises(HintFormatError, match="recipe_id"):
        HintReader(path, expect_recipe_id="sha256:" + "00" * 32)
    with pytest.raises(HintFormatError, match="tokens differ"):
        HintReader(path, expect_token_ids=[1, 2, 3])
    with pytest.raises(HintFormatError, match="rows: got 3 to 99"):
        HintReader(path).rows(3, 99)


def test_a_long_trajectory_is_read_and_written_in_bounded_memory(tmp_path: Path) -> None:
    """80 MB of hints; the process may grow by far less."""
    rows, layers = 20_000, tuple(range(8))
    site = make_site("experts_in", rows, layers, 256, 0, present=np.ones(rows, dtype=bool))
    whole = wire.HintFile(
        token_ids=np.arange(rows, dtype=np.int32),
        sites=(site,),
        recipe_id=RECIPE_ID,
        model_digest="",
        weight_versions=((0, rows, "1"),),
    )
    wire.write(tmp_path / "long", whole)
    program = """
import sys
from trace_serve.hints.reader import HintReader
from trace_serve.hints.writer import HintWriter
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
before = resident()
with HintReader(sys.argv[1]) as reader, HintWriter(sys.argv[2], reader.total) as writer:
    for part in reader.parts(512):
        writer.append(part)
print(resident() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "long"), str(tmp_path / "copy")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "long").read_bytes()
    assert (tmp_path / "long").stat().st_size > 80 << 20
    assert int(done.stdout) < 40_000, "kB of anonymous memory"


def siblings(shared: int, count: int = 3) -> dict[str, wire.HintFile]:
    """Trajectories with the same first rows, and different ones behind."""
    head = make_file(60)
    found = {}
    for index in range(count):
        tail = make_file(60 + index)
        sites = tuple(
            dataclasses.replace(
                a,
                bits=np.concatenate([a.bits[:shared], b.bits[shared:]]),
                codes=None if a.codes is None else np.concatenate([a.codes[:shared], b.codes[shared:]]),
                scales=np.concatenate([a.scales[:shared], b.scales[shared:]]),
                present=np.concatenate([a.present[:shared], ~a.present[shared:], b.present[60:]])[: tail.rows],
                global_log2=None
                if a.global_log2 is None
                else np.concatenate([a.global_log2[:shared], b.global_log2[shared:]]),
                global_scale=None
                if a.global_scale is None
                else np.concatenate([a.global_scale[:shared], b.global_scale[shared:]]),
            )
            for a, b in zip(head.sites, tail.sites, strict=True)
        )
        found[f"t{index}"] = dataclasses.replace(
            tail,
            sites=sites,
            token_ids=np.concatenate([head.token_ids[:shared], tail.token_ids[shared:] ^ (index + 1)]),
            logprobs=None,
            routed_experts=np.concatenate([head.routed_experts[:shared], tail.routed_experts[shared:]]),
            routed_present=np.concatenate([head.routed_present[:shared], tail.routed_present[shared:]]),
            weight_versions=((0, tail.rows, "7"),),
        )
    return found


def test_shared_prefixes_are_stored_once_and_come_back_byte_for_byte(tmp_path: Path) -> None:
    files = {}
    for name, hints in siblings(40).items():
        files[name] = tmp_path / f"{name}.safetensors"
        wire.write(files[name], hints)
    done = merge.merge(files, tmp_path / "merged")
    assert (done.trajectories, done.parts) == (3, 4)
    assert merge.names(tmp_path / "merged") == ["t0", "t1", "t2"]
    for name, path in files.items():
        merge.trajectory(tmp_path / "merged", name, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_one_row_that_differs_ends_the_shared_prefix(tmp_path: Path) -> None:
    hints = siblings(40, 2)
    site = hints["t1"].sites[1]
    bits = site.bits.copy()
    row = int(np.flatnonzero(site.present[:40])[20])
    bits[row, 0, 0] ^= 1
    changed = (hints["t1"].sites[0], dataclasses.replace(site, bits=bits), *hints["t1"].sites[2:])
    hints["t1"] = dataclasses.replace(hints["t1"], sites=changed)
    files = {name: tmp_path / name for name in hints}
    for name, each in hints.items():
        wire.write(files[name], each)
    merge.merge(files, tmp_path / "merged")
    index = json.loads((tmp_path / "merged" / "index.json").read_text())["trajectories"]
    shared = index["t0"][0]
    assert index["t1"][0] == shared
    assert wire.read(tmp_path / "merged" / "parts" / f"{shared}.safetensors").rows == row


def test_a_damaged_or_missing_part_is_named(tmp_path: Path) -> None:
    wire.write(tmp_path / "a", WHOLE)
    merge.merge({"a": tmp_path / "a"}, tmp_path / "merged")
    part = next((tmp_path / "merged" / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(HintFormatError, match=part.name):
        list(merge.parts_of(tmp_path / "merged", "a"))
    part.unlink()
    with pytest.raises(HintFormatError, match="cannot be read"):
        list(merge.parts_of(tmp_path / "merged", "a"))
    with pytest.raises(HintFormatError, match="not in"):
        list(merge.parts_of(tmp_path / "merged", "b"))


def test_the_command_line_merges_and_splits(tmp_path: Path) -> None:
    files = []
    for name, hints in siblings(40).items():
        files.append(tmp_path / f"{name}.safetensors")
        wire.write(files[-1], hints)
    run = CliRunner()
    done = run.invoke(cli.app, ["merge", *map(str, files), "--out", str(tmp_path / "merged")])
    assert done.exit_code == 0, done.output
    assert "3 trajectories in 4 parts" in done.output
    done = run.invoke(cli.app, ["split", str(tmp_path / "merged"), "t1", "--out", str(tmp_path / "t1")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "t1").read_bytes() == files[1].read_bytes()
    again = run.invoke(cli.app, ["merge", str(files[0]), "--out", str(tmp_path / "merged")])
    assert isinstance(again.exception, HintFormatError)


def test_compressed_files_are_read_and_refused_when_they_are_damaged(tmp_path: Path) -> None:
    plain, packed = tmp_path / "x.safetensors", tmp_path / "x.safetensors.zst"
    wire.write(plain, WHOLE)
    wire.write(packed, WHOLE)
    assert same(wire.read(packed), WHOLE)
    data = packed.read_bytes()
    for damaged in (data[:-4], data[:20], b"", bytes([*data[:30], data[30] ^ 0xFF, *data[31:]])):
        packed.write_bytes(damaged)
        with pytest.raises(HintFormatError):
            wire.read(packed)
    import zstandard

    packed.write_bytes(zstandard.ZstdCompressor().compress(b"\0" * (64 << 20)))
    with pytest.raises(HintFormatError, match="more than"):
        wire.read(packed, max_bytes=1 << 20)
