"""The second file: what blocks that cannot be decoded are looked up in, a few bytes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trace_serve.errors import HintFormatError
from trace_serve.hints.syndrome.code import COLUMNS, Words

FORMAT = "trace-hints-syndrome-more"
SUFFIX = ".more"


def beside(path: Path | str) -> Path:
    """Where the second file of a packed file is: `x.safetensors` has `x.more.safetensors`."""
    main = Path(path)
    return main.with_name(f"{main.stem}{SUFFIX}{main.suffix}")


class MoreFile:
    """Reads single blocks of a second file; opened by the first request, and mapped, so that nothing else is read.

    Checksums of its tensors are not verified, which would read all of it; every block has a check of its own.

    Args:
        path: the file.
        bits_sha256: the digest that ties it to the packed file.
    """

    def __init__(self, path: Path, bits_sha256: str) -> None:
        self._path, self._bits_sha256 = path, bits_sha256

    def words(self, site: str, layer: int, blocks: Sequence[int], start: int, stop: int) -> Words:
        """Words `start` to `stop - 1` of those that the packed file does not have: uint64 [n, stop - start].

        Args:
            layer: its place among the site's layers.

        Raises:
            HintFormatError: the file is missing, damaged or of another rollout.
        """
        return self._read(f"{site}.words", layer, blocks, slice(8 * start, 8 * stop), stop - start)

    def raw(self, site: str, layer: int, blocks: Sequence[int]) -> Words:
        """Whole blocks, uint64 [n, 32]; raises as `words`."""
        return self._read(f"{site}.raw", layer, blocks, slice(None), COLUMNS)

    def _read(self, name: str, layer: int, blocks: Sequence[int], part: slice, words: int) -> Words:
        import safetensors

        file = self._file
        try:
            tensor = file.get_slice(name)
            return np.stack([tensor[layer, block, part] for block in blocks]).view("<u8").reshape(len(blocks), words)
        except (safetensors.SafetensorError, ValueError, IndexError) as exc:
            raise HintFormatError(f"{self._path} {name}: {exc}; the file is damaged", field=name) from exc

    @cached_property
    def _file(self) -> Any:
        import safetensors

        try:
            file: Any = safetensors.safe_open(self._path, framework="numpy")
        except (OSError, safetensors.SafetensorError) as exc:
            raise HintFormatError(
                f"{self._path}: cannot be read ({exc}); keep it beside the packed file", field=str(self._path)
            ) from exc
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT or metadata.get("bits_sha256") != self._bits_sha256:
            raise HintFormatError(
                f"{self._path}: is of another rollout than the packed file; both come from one `hints pack`",
                field="bits_sha256",
            )
        return file
