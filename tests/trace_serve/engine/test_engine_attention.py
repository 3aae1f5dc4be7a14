"""Batched attention over the packed pool: right beside float64 and SDPA, and independent of everything but its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import engine_model
import numpy as np
import pytest
import torch
from engine_client import agreement, assert_rows_equal, body, decoded, flush, generate, together
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from trace_serve.engine import attention, attention_loops
from trace_serve.engine.gathered import GatheredKV
from trace_serve.engine.launch import EngineProcess
from trace_serve.errors import EngineError, ShapeError
from trace_serve.hints import wire
from trace_serve.kernels import get_kernels

SLOTS = 700
KERNELS = get_kernels("cpu")


@dataclass(frozen=True)
class Case:
    """Sequences in one pool, with the queries of their last tokens."""

    query: Tensor
    keys: Any
    values: Any
    plain_keys: Tensor
    plain_values: Tensor
    slots: list[list[int]]
    counts: list[int]

    def batch(self, chosen: list[int], counts: list[int] | None = None, cut: int = 0) -> attention.Batch:
        """The chosen sequences, each without its last `cut` tokens and with `counts` queries."""
        lengths = [len(self.slots[i]) - cut for i in chosen]
        table = torch.zeros(len(self.slots) + 1, max(len(s) for s in self.slots), dtype=torch.int32)
        for i, slots in enumerate(self.slots):
            table[i + 1, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        return attention.Batch.of(
            table,
            torch.tensor(chosen, dtype=torch.int64) + 1,
            torch.tensor(lengths, dtype=torch.int64),
            torch.tensor(counts or [self.counts[i] for i in chosen], dtype=torch.int64),
        )

    def queries(self, i: int) -> Tensor:
        start = sum(self.counts[:i])
        return self.query[start : start + self.counts[i]]


def make(
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 32,
    fp4: bool = True,
    lengths: Any = (1, 70, 129, 33),
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    raw = [torch.randn(SLOTS * kv_heads, dim, generator=generator).to(torch.bfloat16) for _ in range(2)]
    sides: list[Any] = []
    plain = []
    for rows, scale in zip(raw, (0.25, 1.0), strict=True):
        if fp4:
            kept = KERNELS.quantize_rows(rows, global_scale=scale)
            pool = GatheredKV(kept.codes.view(SLOTS, kv_heads, -1), kept.scales.view(SLOTS, kv_heads, -1), scale)
            sides.append(pool)
            plain.append(KERNELS.gather_dequantize(pool.codes, pool.scales, torch.arange(SLOTS), scale))
        else:
            sides.append(rows.view(SLOTS, kv_heads, dim))
            plain.append(sides[-1])
    order = torch.randperm(SLOTS, generator=generator).tolist()
    slots, start = [], 0
    for length in lengths:
        slots.append(order[start : start + length])
        start += length
    counts = [min(length, 1 + 40 * (i % 2)) for i, length in enumerate(lengths)]
    query = torch.randn(sum(counts), heads, dim, generator=generator).to(torch.bfloat16)
    return Case(query, sides[0], sides[1], plain[0], plain[1], slots, counts)


def run(case: Case, query: Tensor, batch: attention.Batch) -> Tensor:
    out = torch.full_like(query, float("nan"))
    attention.attend(query, case.keys, case.values, batch, query.shape[2] ** -0.5, out)
    return out


def gathered(case: Case, i: int) -> tuple[Tensor, Tensor]:
    """K and V of a sequence, repeated for grouped heads: [heads, tokens, D]."""
    group = case.query.shape[1] // case.plain_keys.shape[1]
    index = torch.tensor(case.slots[i])
    k, v = (side[index].movedim(0, 1).repeat_interleave(group, dim=0) for side in (case.plain_keys, case.plain_values))
    return k, v


def exact(case: Case, i: int) -> Tensor:
    k, v = (side.double() for side in gathered(case, i))
    q = case.queries(i).double().movedim(0, 1)
    length, count = k.shape[1], q.shape[1]
    scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    future = torch.arange(length) > torch.arange(length - count, length).unsqueeze(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).movedim(0, 1)


SHAPES = [
    {"heads": 6, "kv_heads": 2, "dim": 32},
    {"heads": 4, "kv_heads": 4, "dim": 16},
    {"heads": 7, "kv_heads": 1, "dim": 64},
    {"heads": 8, "kv_heads": 2, "dim": 128, "lengths": (64, 65, 200)},
    {"fp4": False},
    {"fp4": False, "heads": 4, "kv_heads": 1, "dim": 48},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_float64_rounded_to_bf16(shape: dict[str, Any]) -> None:
    case = make(**shape)
    everyone = list(range(len(case.slots)))
    got = run(case, case.query, case.batch(everyone)).double()
    expected = torch.cat([exact(case, i) for i in everyone])
    # One BF16 ulp where the sum does not cancel; the fp32 error of a sum of terms near 1 where it does.
    assert ((got - expected).abs() <= expected.abs() * 2.0**-8 + 2e-6).all()


def test_results_differ_from_sdpa_by_bf16_rounding() -> None:
    case = make(heads=9, kv_heads=3, dim=64, lengths=(150, 150))
    ours = run(case, case.query, case.batch([0, 1]))
    for i in range(2):
        k, v = gathered(case, i)
        q = case.queries(i).movedim(0, 1)
        length, count = k.shape[1], q.shape[1]
        mask = torch.arange(length) <= torch.arange(length - count, length).unsqueeze(1)
        theirs = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0].movedim(0, 1)
        start = sum(case.counts[:i])
        difference = (ours[start : start + count].float() - theirs.float()).abs()
        assert 0 < difference.max() <= 2.0**-7 * theirs.float().abs().max()


@pytest.mark.parametrize("fp4", [True, False])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_any_chunks(fp4: bool) -> None:
    case = make(fp4=fp4, lengths=(130, 70, 129, 33, 1))
    everyone = list(range(len(case.slots)))
    together = run(case, case.query, case.batch(everyone))
    start = 0
    for i in everyone:
        count = case.counts[i]
        mine, queries = together[start : start + count], case.queries(i)
        assert torch.equal(run(case, queries, case.batch([i])), mine)
        for chunk in (1, 7, 32):
            for first in range(0, count, chunk):
                size = min(chunk, count - first)
                part = case.batch([i], [size], cut=count - first - size)
                assert torch.equal(run(case, queries[first : first + size], part), mine[first : first + size])
        start += count
    backwards = everyone[::-1]
    reordered = run(case, torch.cat([case.queries(i) for i in backwards]), case.batch(backwards))
    assert torch.equal(reordered, torch.cat([together.split(case.counts)[i] for i in backwards]))


def poisoned(case: Case, slots: list[int]) -> Case:
    """The same pool with NaN in the given slots."""
    sides = []
    for side in (case.keys, case.values):
        codes, scales = side.codes.clone(), side.scales.clone()
        codes[slots], scales[slots] = 0x7F, 0x7F
        sides.append(GatheredKV(codes, scales, side.global_scale))
    return Case(case.query, *sides, case.plain_keys, case.plain_values, case.slots, case.counts)


def test_slots_of_other_sequences_and_of_later_tokens_never_leak() -> None:
    case = make()
    everyone = list(range(len(case.slots)))
    clean = run(case, case.query, case.batch(everyone))
    free = sorted(set(range(SLOTS)) - {slot for slots in case.slots for slot in slots})
    assert torch.equal(run(poisoned(case, free), case.query, case.batch(everyone)), clean)
    after = run(poisoned(case, case.slots[1][-5:]), case.query, case.batch(everyone)).split(case.counts)
    for i, (got, expected) in enumerate(zip(after, clean.split(case.counts), strict=True)):
        kept = len(got) - 5 if i == 1 else len(got)
        assert torch.equal(got[:kept], expected[:kept])
        assert got[kept:].isnan().all()


def test_padding_rows_become_zero_and_an_empty_batch_is_nothing() -> None:
    case = make()
    padded = torch.cat([case.query, torch.full((3, *case.query.shape[1:]), float("nan"), dtype=torch.bfloat16)])
    everyone = list(range(len(case.slots)))
    out = run(case, padded, case.batch(everyone))
    assert torch.equal(out[:-3], run(case, case.query, case.batch(everyone)))
    assert (out[-3:] == 0).all()
    none = attention.Batch.of(*(torch.zeros(shape, dtype=torch.int64) for shape in ((1, 4), (0,), (0,))))
    assert run(case, case.query[:0], none).shape == (0, *case.query.shape[1:])


def test_infinite_queries_give_nan_and_not_a_number_that_looks_right() -> None:
    case = make(lengths=(40,))
    query = case.query.clone()
    query[0, 0, 0] = float("inf")
    out = run(case, query, case.batch([0]))
    assert out[0, 0].isnan().all()
    assert not out[0, 1:].isnan().any()


def test_a_slot_outside_the_pool_or_more_queries_than_tokens_is_an_error() -> None:
    case = make(lengths=(4, 4))
    wrong = Case(case.query, case.keys, case.values, case.plain_keys, case.plain_values, [[0, 1, 2, SLOTS]] * 2, [1, 4])
    with pytest.raises(EngineError, match="sequence 0 of 2"):
        run(wrong, case.query, wrong.batch([0, 1]))
    with pytest.raises(EngineError, match="4 tokens for 5 queries"):
        run(case, case.query, case.batch([0], [5]))


@pytest.mark.parametrize("width", [8, 64])
def test_queries_that_do_not_fit_the_pool_are_refused(width: int) -> None:
    case = make()
    query = torch.zeros(1, 6, width, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="expected \\[N, heads, 32\\]"):
        run(case, query, case.batch([0]))


def test_exponentials_are_within_two_ulp() -> None:
    x = np.linspace(-87, 0, 200_001, dtype=np.float32)
    got = x.copy()
    attention_loops.exponentials(got, np.float32(1.0), np.float32(0.0), x.size)
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(got - expected) / np.spacing(expected.astype(np.float32))) < 2
    assert got[-1] == 1.0


def _gemm_rows_are_independent() -> bool:
    """Whether this machine's BF16 products give a row the same bits whatever the other rows are."""
    hidden, middle = engine_model.HIDDEN, engine_model.INTERMEDIATE
    qkv = (engine_model.HEADS + 2 * engine_model.KV_HEADS) * engine_model.HEAD_DIM
    for n, k in (
        (qkv, hidden),
        (hidden, hidden),
        (2 * middle, hidden),
        (hidden, middle),
        (engine_model.VOCABULARY, hidden),
    ):
        x, w = torch.randn(80, k).to(torch.bfloat16), torch.randn(n, k).to(torch.bfloat16)
        whole = linear(x, w)
        if not all(torch.equal(linear(x[i : i + m], w), whole[i : i + m]) for m in (1, 2, 3, 17, 64) for i in (0, 5)):
            return False
    return True


@pytest.fixture(scope="module")
def gemm_rows_are_independent() -> bool:
    return _gemm_rows_are_independent()


def check_rows(left: wire.HintFile, right: wire.HintFile, rows: slice, bitwise: bool) -> None:
    """Bit for bit where this machine's products allow it; elsewhere they are rows of the same tokens."""
    if bitwise:
        assert_rows_equal(left, right, rows)
    assert agreement(left, right, rows) > 0.97


@pytest.mark.engine
def test_hints_are_the_same_bits_in_chunks_behind_a_prefix_and_in_a_batch(
    fp4_engine: EngineProcess, gemm_rows_are_independent: bool
) -> None:
    prompt = engine_model.token_ids(81, 150)
    short = prompt[:45]
    flush(fp4_engine)
    alone = generate(fp4_engine, short, new=6, return_logprob=True)
    flush(fp4_engine)
    chunked = decoded(generate(fp4_engine, prompt, new=2))
    check_rows(chunked, decoded(alone), slice(0, 45), gemm_rows_are_independent)
    flush(fp4_engine)
    generate(fp4_engine, prompt[:101], new=1)
    continued = generate(fp4_engine, prompt, new=2)
    assert continued["meta_info"]["cached_tokens"] >= 100
    check_rows(decoded(continued), chunked, slice(0, 150), gemm_rows_are_independent)
    flush(fp4_engine)
    others = [body(engine_model.token_ids(90 + i, 20 + 9 * i), new=6) for i in range(6)]
    batched = together(fp4_engine, [*others[:3], body(short, new=6, return_logprob=True), *others[3:]])[3]
    if gemm_rows_are_independent:
        assert batched["output_ids"] == alone["output_ids"]
        assert batched["meta_info"]["output_token_logprobs"] == alone["meta_info"]["output_token_logprobs"]
        assert_rows_equal(decoded(batched), decoded(alone))
    assert agreement(decoded(batched), decoded(alone), slice(0, 45)) > 0.97


@pytest.mark.engine
def test_the_report_gives_memory_as_a_card_would_hold_it_and_where_the_start_went(fp4_engine: EngineProcess) -> None:
    report = fp4_engine.request("/trace/report")
    memory = report["memory"]
    layers, experts = engine_model.LAYERS, engine_model.EXPERTS
    values = layers * experts * 3 * engine_model.INTERMEDIATE * engine_model.HIDDEN
    assert memory["experts_bytes_bf16"] == 2 * values
    # Codes, block scales, and three FP32 global scales an expert.
    assert memory["experts_bytes_packed"] == values // 2 + values // 16 + 12 * layers * experts
    assert memory["weights_bytes_packed"] == memory["weights_bytes"] - 2 * values + memory["experts_bytes_packed"]
    slots = memory["kv_bytes"] / report["kv"]["bytes_per_token"]
    assert report["max_total_num_tokens"] <= slots <= report["max_total_num_tokens"] + 64
    assert memory["total_bytes_packed"] == memory["weights_bytes_packed"] + memory["kv_bytes"]
    assert memory["hints_bytes"] > 0
    startup = report["startup"]
    assert list(startup["phases_s"]) == [
        "python and the first imports",
        "plugin and the modules it hooks",
        "seams",
        "arguments",
        "scheduler",
    ]
    assert all(seconds > 0 for seconds in startup["phases_s"].values())
    assert startup["total_s"] == pytest.approx(sum(startup["phases_s"].values()))
