"""What a hint file holds, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_serve.errors import EngineError, HintFormatError
from trace_serve.hints.schema import GLOBAL_BYTES, site_bytes_per_token
from trace_serve.recipe import BLOCK

SITES = ("experts_in", "k", "v", "experts_mid")
SCALE_KINDS = ("lsb", "byte", "none")
CODE_KINDS = ("lsb", "full")


@dataclass(frozen=True, eq=False)
class Site:
    """The hints of one place in the model, for T rows, L layers and B blocks of 16 values in G groups.

    A group is what one global scale belongs to: the whole row (G = 1), and for `experts_mid` the input of one routed
    expert, in the order of the router (G = top-k).

    Attributes:
        name: one of SITES: input of the experts' first product; K after rotary; V; input of the second product.
        layers: global layer indices, ascending, L of them.
        bits: uint16 [T, L, B]; bit i is the lowest bit of the code of value 16 * b + i.
        scales: uint8 [T, L, B]; the E4M3 byte of each block, or its lowest bit where `scale_kind` is `lsb`; None
            where it is `none`.
        present: bool [T]; rows where it is False hold nothing meaningful.
        global_log2: int8 [T, L, G], exponent of the per-token global scale; None where that is static or no power of
            two.
        scale_kind: `byte`, `lsb` or `none`.
        groups: G; it divides B.
        global_scale: float32 [T, L, G], per-token global scales that are no powers of two, or None.
        codes: uint8 [T, L, 8 B], the whole codes, two a byte with the even value in the low nibble, whose lowest bits
            are `bits`; None where a file has only those.
    """

    name: str
    layers: tuple[int, ...]
    bits: NDArray[np.uint16]
    scales: NDArray[np.uint8] | None
    present: NDArray[np.bool_]
    global_log2: NDArray[np.int8] | None = None
    scale_kind: str = "byte"
    groups: int = 1
    global_scale: NDArray[np.float32] | None = None
    codes: NDArray[np.uint8] | None = None

    @property
    def values(self) -> int:
        """Quantized values a row and layer."""
        return int(self.bits.shape[2]) * BLOCK

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a file with these scales stores a row, mask excluded."""
        global_bytes = GLOBAL_BYTES[self.global_kind] * self.groups
        return site_bytes_per_token(
            self.values, len(self.layers), scale=self.scale_kind, global_bytes=global_bytes, codes=self.code_kind
        )

    @property
    def code_kind(self) -> str:
        """`full` where there are whole codes, `lsb` where there are their lowest bits."""
        return "lsb" if self.codes is None else "full"

    @property
    def global_kind(self) -> str:
        """`log2` or `fp32` for per-token global scales, `static` where the recipe holds the only one."""
        return "log2" if self.global_log2 is not None else "static" if self.global_scale is None else "fp32"

    def check(self, rows: int) -> None:
        """Refuses arrays that do not fit each other.

        Raises:
            HintFormatError: naming the site and the array.
        """
        if self.name not in SITES:
            raise HintFormatError(f"site: got {self.name!r}, expected one of {', '.join(SITES)}", field="sites")
        if self.scale_kind not in SCALE_KINDS:
            raise HintFormatError(
                f"{self.name}.scale_kind: got {self.scale_kind!r}, expected one of {', '.join(SCALE_KINDS)}",
                field=f"{self.name}.scale_kind",
            )
        check_layers(self.name, self.layers)
        shape = (rows, len(self.layers), self.bits.shape[2] if self.bits.ndim == 3 else 0)
        if shape[2] == 0:
            raise HintFormatError(f"{self.name}.bits: got shape {self.bits.shape}, expected [T, L, B]", field=self.name)
        check_array(f"{self.name}.bits", self.bits, np.uint16, shape)
        self._check_groups(shape[2])
        if (self.scales is None) != (self.scale_kind == "none"):
            raise HintFormatError(
                f"{self.name}.scales: given with scale_kind {self.scale_kind!r}; only `none` goes without",
                field=f"{self.name}.scales",
            )
        if self.scales is not None:
            check_array(f"{self.name}.scales", self.scales, np.uint8, shape)
        if self.codes is not None:
            check_array(f"{self.name}.codes", self.codes, np.uint8, (*shape[:2], shape[2] * BLOCK // 2))
        check_array(f"{self.name}.present", self.present, np.bool_, (rows,))
        per_group = (*shape[:2], self.groups)
        if self.global_log2 is not None:
            check_array(f"{self.name}.global_log2", self.global_log2, np.int8, per_group)
        if self.global_scale is not None:
            check_array(f"{self.name}.global_scale", self.global_scale, np.float32, per_group)

    def _check_groups(self, blocks: int) -> None:
        if type(self.groups) is not int or self.groups < 1 or blocks % self.groups:
            raise HintFormatError(
                f"{self.name}.groups: got {self.groups!r}, expected a divisor of its {blocks} blocks",
                field=f"{self.name}.groups",
            )
        if self.global_log2 is not None and self.global_scale is not None:
            raise HintFormatError(
                f"{self.name}: global_log2 and global_scale are both given, expected one",
                field=f"{self.name}.global_scale",
            )


@dataclass(frozen=True, eq=False)
class HintFile:
    """Everything that one request returns beside its text.

    Row t belongs to the forward pass that had token `token_ids[t]` as its input, at position `first_token + t`. The
    last sampled token was never an input, so it has no row.

    Attributes:
        token_ids: int32 [T].
        sites: at most one of each name.
        recipe_id: the recipe under which the codes were made.
        model_digest: digest of the policy directory that was served.
        weight_versions: spans (start row, end row, version) that cover the rows in order.
        first_token: position of row 0 in the sequence.
        logprobs: float32 [T] or None; the log-probability that row t's forward pass gave to the token at t + 1, as
            sampled; NaN where the next token was not sampled (prompt).
        routed_experts: int [T, MoE layers, top-k] or None; expert ids in the order of the router.
        routed_present: bool [T], required with `routed_experts` when some rows are missing; None means all are present.
        next_token_id: the last sampled token, or None where nothing was sampled.
    """

    token_ids: NDArray[np.int32]
    sites: tuple[Site, ...]
    recipe_id: str
    model_digest: str
    weight_versions: tuple[tuple[int, int, str], ...]
    first_token: int = 0
    logprobs: NDArray[np.float32] | None = None
    routed_experts: NDArray[Any] | None = None
    routed_present: NDArray[np.bool_] | None = None
    next_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.dtype != np.int32:
            raise HintFormatError(
                f"token_ids: got {self.token_ids.dtype} {self.token_ids.shape}, expected int32 [T]", field="token_ids"
            )
        names = [site.name for site in self.sites]
        if len(set(names)) != len(names):
            raise HintFormatError(f"sites: got {', '.join(names)}, expected each once", field="sites")
        for site in self.sites:
            site.check(self.rows)
        if self.logprobs is not None:
            check_array("logprobs", self.logprobs, np.float32, (self.rows,))
        self._check_routed()
        check_versions(self.weight_versions, self.rows)

    @property
    def rows(self) -> int:
        return int(self.token_ids.shape[0])

    def site(self, name: str) -> Site:
        """The site of that name.

        Raises:
            HintFormatError: the file has none.
        """
        for site in self.sites:
            if site.name == name:
                return site
        have = ", ".join(site.name for site in self.sites) or "none"
        raise HintFormatError(f"site {name!r}: not in this file, it has {have}", field=name)

    def _check_routed(self) -> None:
        routed = self.routed_experts
        if routed is None:
            if self.routed_present is not None:
                raise HintFormatError("routed_present: given without routed_experts", field="routed_present")
            return
        if routed.ndim != 3 or routed.dtype.kind not in "iu" or routed.shape[0] != self.rows:
            raise HintFormatError(
                f"routed_experts: got {routed.dtype} {routed.shape}, expected integers [{self.rows}, layers, top-k]",
                field="routed_experts",
            )
        if self.routed_present is not None:
            check_array("routed_present", self.routed_present, np.bool_, (self.rows,))


def check_array(name: str, array: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    """Raises HintFormatError unless the array has exactly this dtype and shape."""
    if array.dtype != dtype or array.shape != shape:
        raise HintFormatError(
            f"{name}: got {array.dtype} {list(array.shape)}, expected {np.dtype(dtype).name} {list(shape)}", field=name
        )


def check_layers(name: str, layers: Any) -> None:
    """Raises HintFormatError unless `layers` is a non-empty ascending sequence of distinct layer indices."""
    ok = all(type(i) is int and 0 <= i < 1 << 16 for i in layers) and list(layers) == sorted(set(layers))
    if not layers or not ok:
        raise HintFormatError(
            f"{name}.layers: got {list(layers)}, expected ascending layer indices, at least one", field=f"{name}.layers"
        )


def check_versions(spans: tuple[tuple[int, int, str], ...], rows: int) -> None:
    """Raises HintFormatError unless the spans (start, end, version) cover rows 0 to `rows` in order."""
    end = 0
    for start, stop, version in spans:
        if type(start) is not int or type(stop) is not int or not isinstance(version, str):
            break
        if start != end or stop < start:
            break
        end = stop
    else:
        if end == rows:
            return
    raise HintFormatError(
        f"weight_versions: got {[list(span) for span in spans]}, expected spans [start, end, version] that cover rows "
        f"0 to {rows} in order",
        field="weight_versions",
    )


def require_nonzero(hints: HintFile) -> None:
    """Checks that an engine's hints carry something: no sites, no rows or only zero bits mean that capture is broken.

    Raises:
        EngineError: naming the first site that is empty.
    """
    if not hints.sites:
        raise EngineError("hints: the engine returned no site, expected at least one; run `trace-serve doctor`")
    for site in hints.sites:
        if not site.present.any():
            raise EngineError(f"hints: every row of {site.name} is missing; run `trace-serve doctor`")
        if not site.bits[site.present].any():
            raise EngineError(f"hints: every bit of {site.name} is zero; run `trace-serve doctor`")
