"""Wire format version 1 of rounding hints: a safetensors file (docs/hints.md). No torch here."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trace_serve.errors import HintFormatError
from trace_serve.hints import container
from trace_serve.hints.compression import MAX_BYTES, compress, decompress, is_compressed
from trace_serve.hints.decode import from_arrays
from trace_serve.hints.encode import to_bytes
from trace_serve.hints.rows import HintFile, Site, require_nonzero
from trace_serve.hints.schema import SCHEMA_VERSION, site_bytes_per_token, token_ids_digest
from trace_serve.hints.syndrome import packed
from trace_serve.hints.syndrome.more import beside

__all__ = [
    "SCHEMA_VERSION",
    "HintFile",
    "Site",
    "bytes_per_token",
    "from_bytes",
    "read",
    "require_nonzero",
    "site_bytes_per_token",
    "to_bytes",
    "token_ids_digest",
    "write",
    "write_bytes",
]


def from_bytes(
    data: bytes,
    *,
    expect_recipe_id: str | None = None,
    expect_token_ids: Sequence[int] | NDArray[Any] | None = None,
    more: Path | None = None,
) -> HintFile:
    """Reads a file; arrays are read-only views of `data` where the layout allows.

    Args:
        data: the whole file.
        expect_recipe_id: refuse hints that were made under another recipe.
        expect_token_ids: refuse hints of other tokens; one id a row.
        more: second file of a packed one (`PackedHints`), where there is one.

    Raises:
        HintFormatError: unknown schema, other recipe, other tokens, wrong byte count, wrong checksum, trailing bytes,
            tensors that are missing, unknown or of the wrong shape.
    """
    arrays, metadata = container.decode(data)
    expected: dict[str, Any] = {"expect_recipe_id": expect_recipe_id, "expect_token_ids": expect_token_ids}
    if metadata.get("format") == packed.FORMAT:
        return packed.from_packed(arrays, metadata, more=more, **expected)
    return from_arrays(arrays, metadata, **expected)


def bytes_per_token(hints: HintFile) -> int:
    """Bytes of hints a token, as this file stores them; token ids, masks and routed experts excluded."""
    return sum(site.bytes_per_token for site in hints.sites)


def write_bytes(path: Path | str, payload: bytes) -> None:
    """Writes a file that appears complete or not at all.

    Raises:
        OSError: the directory is missing or full; nothing is left behind.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(payload)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path | str, hints: HintFile, *, scale: str = "lsb") -> None:
    """`to_bytes` into a file, atomically; compressed where the name ends in `.zst`.

    Raises:
        ConfigError: the name ends in `.zst` and zstandard is not installed.
    """
    data = to_bytes(hints, scale=scale)
    write_bytes(path, compress(data) if is_compressed(path) else data)


def read(
    path: Path | str,
    *,
    expect_recipe_id: str | None = None,
    expect_token_ids: Sequence[int] | NDArray[Any] | None = None,
    max_bytes: int = MAX_BYTES,
) -> HintFile:
    """`from_bytes` of a file, decompressed first where the name ends in `.zst`; a packed file with what lies beside it.

    Args:
        path: the file.
        expect_recipe_id, expect_token_ids: as in `from_bytes`.
        max_bytes: size above which a compressed file is refused.

    Raises:
        HintFormatError: the file cannot be read, or as `from_bytes`.
        ConfigError: the name ends in `.zst` and zstandard is not installed.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise HintFormatError(f"{path}: cannot be read ({exc.strerror})", field=str(path)) from exc
    if is_compressed(path):
        data = decompress(data, max_bytes=max_bytes)
    more = beside(path)
    return from_bytes(
        data,
        expect_recipe_id=expect_recipe_id,
        expect_token_ids=expect_token_ids,
        more=more if more.exists() else None,
    )
