"""Reading a hint file in parts, so that a long trajectory never lies in memory as a whole."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import HintFormatError
from trace_serve.hints import container
from trace_serve.hints.decode import check_schema, decode_next_token, decode_versions, from_arrays, number, unpack_mask
from trace_serve.hints.encode import pack_mask
from trace_serve.hints.rows import HintFile, check_array, check_versions
from trace_serve.hints.schema import token_ids_digest

_MASK = ".present"


class HintReader:
    """A mapped hint file. Every checksum is verified when it is opened, which reads the file once and keeps nothing.

    Args:
        path: the file.
        expect_recipe_id, expect_token_ids: as in `wire.read`.

    Raises:
        HintFormatError: the file cannot be read, or is refused as by `wire.read`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        expect_recipe_id: str | None = None,
        expect_token_ids: Sequence[int] | NDArray[Any] | None = None,
    ) -> None:
        try:
            with Path(path).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise HintFormatError(f"{path}: cannot be read ({exc})", field=str(path)) from exc
        self._arrays, self._metadata = container.decode(self._map)
        check_schema(self._metadata)
        self.total = number(self._metadata, "rows")
        self.first_token = number(self._metadata, "first_token")
        if "token_ids" not in self._arrays:
            raise HintFormatError("hint file token_ids: the tensor is missing", field="token_ids")
        check_array("token_ids", self._arrays["token_ids"], np.int32, (self.total,))
        # Parts have clipped spans and their own following token, so these are looked at as a whole.
        check_versions(decode_versions(self._metadata["weight_versions"]), self.total)
        decode_next_token(self._metadata["next_token_id"])
        # No rows carry no payload, but every rule about names, shapes and metadata.
        self.rows(0, 0, expect_recipe_id=expect_recipe_id)
        ids = self._arrays["token_ids"]
        if token_ids_digest(ids) != self._metadata["token_ids_digest"]:
            raise HintFormatError("hint file token_ids: digest does not match; the file is damaged", field="token_ids")
        if expect_token_ids is not None and not np.array_equal(ids, np.asarray(expect_token_ids)):
            raise HintFormatError(
                f"hint file token_ids: its {self.total} tokens differ from the {len(expect_token_ids)} expected; pair "
                "each sequence with its own hints",
                field="token_ids",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file; parts that were read stay valid until they are dropped."""
        self._arrays.clear()

    def rows(self, start: int, stop: int, *, expect_recipe_id: str | None = None) -> HintFile:
        """Rows `start` to `stop - 1` as a hint file of their own, whose `first_token` is their position.

        Raises:
            HintFormatError: rows that the file does not have, or contents that break a rule of the format.
        """
        if not 0 <= start <= stop <= self.total:
            raise HintFormatError(f"rows: got {start} to {stop}, expected a part of 0 to {self.total}", field="rows")
        arrays = {name: self._part(name, array, start, stop) for name, array in self._arrays.items()}
        ids = arrays.get("token_ids")
        following = self._metadata["next_token_id"]
        if stop < self.total:
            following = str(int(self._arrays["token_ids"][stop]))
        metadata = {
            **self._metadata,
            "rows": str(stop - start),
            "first_token": str(self.first_token + start),
            "next_token_id": following,
            "weight_versions": container.canonical(_clipped(self._metadata["weight_versions"], start, stop)),
            "token_ids_digest": "" if ids is None else token_ids_digest(ids),
        }
        return from_arrays(arrays, metadata, expect_recipe_id=expect_recipe_id)

    def parts(self, size: int) -> Iterator[HintFile]:
        """The file in parts of `size` rows, in order."""
        for start in range(0, self.total, size):
            yield self.rows(start, min(start + size, self.total))

    def _part(self, name: str, array: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        if name.endswith(_MASK):
            return pack_mask(unpack_mask(array, self.total, name)[start:stop])
        if array.ndim == 0 or array.shape[0] != self.total:
            raise HintFormatError(
                f"hint file {name}: got shape {list(array.shape)}, expected {self.total} rows", field=name
            )
        return array[start:stop]


def _clipped(text: str, start: int, stop: int) -> list[list[Any]]:
    spans = decode_versions(text)
    if not all(type(begin) is int and type(end) is int for begin, end, _ in spans):
        raise HintFormatError("hint file weight_versions: expected whole numbers", field="weight_versions")
    clipped = ((max(begin, start) - start, min(end, stop) - start, version) for begin, end, version in spans)
    return [[begin, end, version] for begin, end, version in clipped if begin < end or (start == stop and begin == end)]
