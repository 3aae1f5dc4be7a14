"""Packed hint files: as version 1, with the lowest bits of some sites replaced by syndromes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import HintFormatError
from trace_serve.hints import container, schema
from trace_serve.hints.decode import from_arrays
from trace_serve.hints.encode import metadata_of, tensors_of
from trace_serve.hints.rows import HintFile, Site, check_array
from trace_serve.hints.syndrome import code
from trace_serve.hints.syndrome.more import FORMAT as MORE_FORMAT
from trace_serve.hints.syndrome.more import MoreFile

FORMAT = "trace-hints-syndrome"
SITES = ("experts_in", "k", "v")
"""Sites whose values a trainer has all at once, layer by layer."""
WORDS = 6
_KEY = "syndrome"


@dataclass(frozen=True, eq=False)
class CodedSite:
    """What a packed file has of a site's bits, for T rows, L layers and N blocks a layer.

    Attributes:
        present: bool [T].
        width: hint words of 16 bits a row.
        syndrome: uint64 [L, N, k], the first k words.
        check: uint32 [L, N], CRC-32 of each block.
    """

    present: NDArray[np.bool_]
    width: int
    syndrome: NDArray[np.uint64]
    check: NDArray[np.uint32]

    def bytes_per_token(self, site: Site) -> float:
        """Bytes a row that the packed file has of this site, its scales included."""
        rest = site.bytes_per_token - 2 * self.width * len(site.layers)
        return rest + (self.syndrome.nbytes + self.check.nbytes) / max(1, self.present.size)


@dataclass
class Decoding:
    """What became of the blocks of a file that were decoded so far.

    Attributes:
        blocks: attempted.
        more: decoded with further words of the syndrome.
        raw: fetched whole.
        failed: neither; their values are rounded to nearest under the rollout's scales.
        false: decoded to other bits, found by their check.
        fetched_bytes: of the second file.
    """

    blocks: int = 0
    more: int = 0
    raw: int = 0
    failed: int = 0
    false: int = 0
    fetched_bytes: int = 0


@dataclass(frozen=True, eq=False)
class PackedHints(HintFile):
    """A hint file whose coded sites have no bits yet: their rows are marked missing, and what is known is in `coded`.

    Attributes:
        coded: by site.
        more: the second file; None leaves blocks that cannot be decoded without hints.
        decoding: counters, updated as a trainer decodes.
    """

    coded: Mapping[str, CodedSite] = field(default_factory=dict)
    more: MoreFile | None = None
    decoding: Decoding = field(default_factory=Decoding)


def pack(
    hints: HintFile, *, scale: str = "lsb", words: int = WORDS, sites: Sequence[str] = SITES
) -> tuple[bytes, bytes]:
    """The packed file and its second file.

    Args:
        hints: with the bits of every site.
        scale: as `wire.to_bytes`.
        words: of each syndrome that the packed file holds, 4 to 16, of 64 bits for 2,048 values each.
        sites: that are coded; others stay as they are.

    Raises:
        HintFormatError: none of the sites is in the file, they have whole codes, or as `wire.to_bytes`.
    """
    chosen = [site for site in hints.sites if site.name in sites]
    if any(site.codes is not None for site in chosen):
        raise HintFormatError("pack: the file has whole codes, expected lowest bits; ask for codes lsb", field="codes")
    if not chosen or isinstance(hints, PackedHints) or not code.MIN_WORDS <= words <= code.MAX_WORDS:
        raise HintFormatError(
            f"pack: got sites {', '.join(site.name for site in hints.sites) or 'none'} and {words} words, expected "
            f"bits of {', '.join(sites)} and {code.MIN_WORDS} to {code.MAX_WORDS} words",
            field="words" if chosen else "sites",
        )
    arrays, more = tensors_of(hints, scale), container.Arrays()
    bits = hashlib.sha256()
    for site in chosen:
        del arrays[f"{site.name}.bits"]
        blocks = np.stack([code.to_blocks(site.bits[:, i], site.present) for i in range(len(site.layers))])
        bits.update(blocks.tobytes())
        syndromes = np.stack([code.syndromes(layer) for layer in blocks])
        check = np.array([[code.digest(block) for block in layer] for layer in blocks], dtype="<u4")
        arrays[f"{site.name}.syndrome"] = _bytes(syndromes[..., :words])
        arrays[f"{site.name}.check"] = _bytes(check.reshape(*blocks.shape[:2], 1))
        more[f"{site.name}.words"] = _bytes(syndromes[..., words:])
        more[f"{site.name}.raw"] = _bytes(blocks)
    described = {"words": words, "sites": [site.name for site in chosen], "bits_sha256": bits.hexdigest()}
    metadata = {**metadata_of(hints, scale), "format": FORMAT, _KEY: container.canonical(described)}
    tied = {"format": MORE_FORMAT, "bits_sha256": bits.hexdigest()}
    return container.encode(arrays, metadata), container.encode(more, tied)


def from_packed(
    arrays: container.Arrays, metadata: dict[str, str], *, more: Path | None = None, **expected: Any
) -> PackedHints:
    """Reads what `container.decode` gives of a packed file; `arrays` is emptied.

    Args:
        more: the second file, where there is one.
        expected: as `wire.from_bytes`.

    Raises:
        HintFormatError: as `wire.from_bytes`, and tensors that do not fit the code.
    """
    words, names, bits_sha256 = _described(metadata.pop(_KEY, ""))
    entries = container.parse(metadata.get("sites", ""), "sites")
    raw: dict[str, tuple[NDArray[np.uint64], NDArray[np.uint32]]] = {}
    for name in names:
        rows, layers, width = _shape(metadata, entries, name)
        blocks = code.count(rows * width)
        syndrome, check = (_take(arrays, f"{name}.{part}") for part in ("syndrome", "check"))
        check_array(f"{name}.syndrome", syndrome, np.uint8, (layers, blocks, 8 * words))
        check_array(f"{name}.check", check, np.uint8, (layers, blocks, 4))
        raw[name] = (np.ascontiguousarray(syndrome).view("<u8"), np.ascontiguousarray(check).view("<u4")[..., 0])
        # Takes no memory: the bits are not known.
        arrays[f"{name}.bits"] = np.broadcast_to(np.zeros((), dtype=np.uint16), (rows, layers, width))
    plain = from_arrays(arrays, {**metadata, "format": schema.FORMAT}, **expected)
    coded = {name: CodedSite(plain.site(name).present, plain.site(name).bits.shape[2], *raw[name]) for name in names}
    fields = {each: getattr(plain, each) for each in HintFile.__dataclass_fields__}
    fields["sites"] = tuple(_unknown(site) if site.name in coded else site for site in plain.sites)
    return PackedHints(**fields, coded=coded, more=None if more is None else MoreFile(more, bits_sha256))


def unpack(hints: PackedHints) -> HintFile:
    """The hints as they were before `pack`, all bits taken from the second file.

    Raises:
        HintFormatError: there is no second file, or a block that is not what its check says.
    """
    if hints.more is None:
        raise HintFormatError("unpack: the second file is missing; its bits are only there", field="more")
    sites = []
    for site in hints.sites:
        coded = hints.coded.get(site.name)
        if coded is None:
            sites.append(site)
            continue
        bits = np.zeros(site.bits.shape, dtype=np.uint16)
        for layer in range(len(site.layers)):
            blocks = hints.more.raw(site.name, layer, range(coded.check.shape[1]))
            require_intact(site.name, blocks, coded.check[layer])
            bits[:, layer] = code.from_blocks(blocks, hints.rows, coded.width)
        sites.append(replace(site, bits=bits, present=coded.present))
    fields = {each: getattr(hints, each) for each in HintFile.__dataclass_fields__}
    return HintFile(**{**fields, "sites": tuple(sites)})


def require_intact(site: str, blocks: code.Words, check: NDArray[np.uint32]) -> None:
    """Raises HintFormatError unless every block [N, 32] has its check [N]."""
    for block, expected in zip(blocks, check, strict=True):
        if code.digest(block) != expected:
            raise HintFormatError(f"{site}.raw: a block has a wrong check; the second file is damaged", field=site)


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def _unknown(site: Site) -> Site:
    return replace(site, present=np.zeros_like(site.present))


def _described(text: str) -> tuple[int, list[str], str]:
    found = container.parse(text, _KEY)
    try:
        words, names, digest = found["words"], found["sites"], found["bits_sha256"]
        ok = set(found) == {"words", "sites", "bits_sha256"} and type(words) is int and isinstance(digest, str)
        ok = ok and code.MIN_WORDS <= words <= code.MAX_WORDS and set(names) <= set(SITES)
    except (KeyError, TypeError) as exc:
        raise HintFormatError(f"hint file {_KEY}: incomplete description", field=_KEY) from exc
    if not ok:
        raise HintFormatError(f"hint file {_KEY}: words or sites cannot be used", field=_KEY)
    return words, list(names), digest


def _shape(metadata: dict[str, str], entries: Any, name: str) -> tuple[int, int, int]:
    """Rows, layers and hint words a row, as the metadata says; the rest of it is checked by the reader of version 1."""
    rows = container.parse(metadata.get("rows", ""), "rows")
    try:
        layers, width = len(entries[name]["layers"]), entries[name]["values"] // 16
    except (KeyError, TypeError) as exc:
        raise HintFormatError(f"hint file sites {name}: incomplete description", field="sites") from exc
    if not all(type(each) is int and least <= each < 1 << 31 for each, least in ((rows, 0), (layers, 1), (width, 1))):
        raise HintFormatError(f"hint file sites {name}: rows or values cannot be used", field="sites")
    return rows, layers, width


def _take(arrays: container.Arrays, name: str) -> NDArray[Any]:
    if name not in arrays:
        raise HintFormatError(f"hint file {name}: the tensor is missing", field=name)
    return arrays.pop(name)
