"""What a request may name as the place of its hints, and what the operator allows.

A client's text never becomes a path or an address by itself: it has to be a word, or lie below a URL prefix that the
operator gave at start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trace_serve.errors import ConfigError

FIELD = "trace_hints.sink"
SUFFIX = ".safetensors"
LOCAL_SCHEMES = ("file", "local")

_MAX_URL = 1024
# No user, query, fragment, percent escape, backslash or glob: each of them means something to some file system.
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([A-Za-z0-9._=+,:/-]*)")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True)
class Target:
    """Attributes:
    kind: `inline` (in the answer), `file` (the hint directory), `shm` (shared memory) or `url`.
    url: the directory of a `url` target, without a trailing slash; empty for the others.
    """

    kind: Literal["inline", "file", "shm", "url"]
    url: str = ""

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def remote(self) -> bool:
        """Whether writing may wait for something other than this machine."""
        return self.kind == "url" and self.scheme not in LOCAL_SCHEMES

    def __str__(self) -> str:
        return self.url or self.kind


_WORDS = {"inline": Target("inline"), "file": Target("file"), "shm": Target("shm")}


def parse_target(text: object) -> Target:
    """Reads what a request gave; whether it is allowed is `AllowedTargets.check`.

    Raises:
        ConfigError: neither one of the words nor a plain URL of a directory; `field` is `trace_hints.sink`.
    """
    if isinstance(text, str) and text in _WORDS:
        return _WORDS[text]
    expected = "expected inline, file, shm, or the URL of a directory such as s3://bucket/prefix"
    if not isinstance(text, str):
        raise ConfigError(f"{FIELD}: got {type(text).__name__}, {expected}", field=FIELD)
    shown = repr(text if len(text) <= 120 else text[:117] + "...")
    match = _URL.fullmatch(text)
    if match is None or len(text) > _MAX_URL:
        raise ConfigError(f"{FIELD}: got {shown}, {expected} (letters, digits and ._=+,:/- only)", field=FIELD)
    scheme, rest = match.groups()
    path = rest.rstrip("/")
    # The first part may be empty: file:///dir. `::` chains file systems in fsspec.
    parts = path.split("/")
    if "::" in rest or any(part in (".", "..") for part in parts) or any(not part for part in parts[1:]):
        raise ConfigError(f"{FIELD}: got {shown}, expected a URL without '.', '..', '::' and empty parts", field=FIELD)
    if scheme in LOCAL_SCHEMES and not path.startswith("/"):
        raise ConfigError(f"{FIELD}: got {shown}, expected an absolute path, as in {scheme}:///dir", field=FIELD)
    return Target("url", f"{scheme}://{path}")


def check_name(name: str) -> str:
    """Raises:
    ConfigError: the name could not be the stem of one file in one directory; `field` is `rid`.
    """
    if not _NAME.fullmatch(name):
        shown = repr(name if len(name) <= 140 else name[:137] + "...")
        raise ConfigError(f"rid: got {shown}, expected 1 to 128 letters, digits, '-' or '_'", field="rid")
    return name


@dataclass(frozen=True)
class AllowedTargets:
    """What the operator allows; made once at start.

    Attributes:
        hint_dir: the directory of `file`; None refuses it.
        url_prefixes: URLs below which a request may name a directory; a prefix ends at a part of the path, so
            `s3://bucket/run` allows neither `s3://bucket/run2` nor `s3://bucket`.
        shm: whether `shm` is allowed.

    Raises:
        ConfigError: a prefix is malformed, or its file system is not installed; `field` is `hint_url_prefixes`.
    """

    hint_dir: Path | None = None
    url_prefixes: tuple[str, ...] = ()
    shm: bool = False

    def __post_init__(self) -> None:
        if self.hint_dir is not None:
            object.__setattr__(self, "hint_dir", Path(self.hint_dir).resolve())
        object.__setattr__(self, "url_prefixes", tuple(_checked_prefix(prefix) for prefix in self.url_prefixes))

    def parse(self, text: object) -> Target:
        """`parse_target` and `check`."""
        target = parse_target(text)
        self.check(target)
        return target

    def check(self, target: Target) -> None:
        """Raises:
        ConfigError: the operator did not allow this target; `field` is `trace_hints.sink`.
        """
        if target.kind == "file" and self.hint_dir is None:
            raise ConfigError(f"{FIELD}: 'file' needs an engine that was started with a hint directory", field=FIELD)
        if target.kind == "shm" and not self.shm:
            raise ConfigError(f"{FIELD}: 'shm' needs an engine that was started with shared memory", field=FIELD)
        if target.kind == "url" and not any(_below(target.url, prefix) for prefix in self.url_prefixes):
            # The prefixes are not listed: the answer goes to a client, and they may name internal hosts.
            raise ConfigError(
                f"{FIELD}: {target.url} is not below a URL that the operator allowed; ask for one, or use 'file'",
                field=FIELD,
            )

    def directory(self, target: Target) -> Path:
        """The local directory of a target that is not remote."""
        if target.kind == "file" and self.hint_dir is not None:
            return self.hint_dir
        return Path(target.url.partition("://")[2])

    def fences(self, target: Target) -> tuple[Path, ...]:
        """Directories of the operator, one of which has to hold `directory(target)` once links are resolved."""
        if target.kind == "file" and self.hint_dir is not None:
            return (self.hint_dir,)
        allowed = (parse_target(prefix) for prefix in self.url_prefixes)
        return tuple(
            Path(prefix.url.partition("://")[2])
            for prefix in allowed
            if not prefix.remote and _below(target.url, prefix.url)
        )


def _below(url: str, prefix: str) -> bool:
    return url == prefix or url.startswith(prefix if prefix.endswith("/") else prefix + "/")


def _checked_prefix(prefix: str) -> str:
    field = "hint_url_prefixes"
    try:
        target = parse_target(prefix)
    except ConfigError as exc:
        raise ConfigError(str(exc).replace(FIELD, field, 1), field=field) from exc
    if target.kind != "url":
        raise ConfigError(f"{field}: got {prefix!r}, expected a URL such as s3://bucket/prefix", field=field)
    if target.remote:
        import fsspec

        try:
            fsspec.get_filesystem_class(target.scheme)
        except (ImportError, ValueError) as exc:
            raise ConfigError(f"{field}: {prefix}: no file system for {target.scheme}: {exc}", field=field) from exc
    return target.url
