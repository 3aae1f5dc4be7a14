"""Hint files compressed with Zstandard, for storage that many requests with long shared prompts fill.

Lowest bits of codes do not compress; what does is repetition, which `hints merge` finds better.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_serve.errors import ConfigError, HintFormatError

SUFFIX = ".zst"
MAX_BYTES = 16 << 30
LEVEL = 3
_STEP = 1 << 13


def is_compressed(path: Path | str) -> bool:
    return Path(path).suffix == SUFFIX


def compress(data: bytes) -> bytes:
    """One Zstandard frame with its checksum.

    Raises:
        ConfigError: zstandard is not installed.
    """
    packed: bytes = _zstandard().ZstdCompressor(level=LEVEL, write_checksum=True).compress(data)
    return packed


def decompress(data: bytes, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The contents of one frame; memory grows with what it really holds, not with what it claims to.

    Raises:
        HintFormatError: damaged, or larger than `max_bytes` says it may be.
        ConfigError: zstandard is not installed.
    """
    zstandard, end = _zstandard(), 0
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise HintFormatError(
                f"hint file: a compressed file of {size} bytes, more than {max_bytes} or unknown", field="zst"
            )
        content, frame = bytearray(), zstandard.ZstdDecompressor().decompressobj()
        for start in range(0, len(data), _STEP):
            if frame.eof or len(content) > size:
                break
            content += frame.decompress(data[start : start + _STEP])
            end = start + _STEP
    except zstandard.ZstdError as exc:
        raise HintFormatError(f"hint file: cannot be decompressed ({exc}); the file is damaged", field="zst") from exc
    if len(content) != size or not frame.eof or frame.unused_data or end < len(data):
        raise HintFormatError(
            f"hint file: got other than one whole frame of the {size} bytes that it claims; the file is damaged",
            field="zst",
        )
    return bytes(content)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as exc:
        raise ConfigError(
            "zstandard: not installed, expected it for .zst files; run `pip install 'trace-serve[zstd]'`", field="zst"
        ) from exc
    return zstandard
