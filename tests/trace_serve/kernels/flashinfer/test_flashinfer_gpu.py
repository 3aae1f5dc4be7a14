"""The calls themselves on sm_100 or sm_103, where they have not run yet."""

import pytest
import torch
from expert_layer import expected, layer
from flashinfer_library import load

from trace_serve.kernels import kernels_for
from trace_serve.kernels.flashinfer import (
    append_kv,
    decode_attention,
    experts_for,
    paged_buffers,
    prepare_weights,
    reason,
    require_exact_math,
    workspace,
)
from trace_serve.kernels.triton import attention
from trace_serve.nvfp4 import Quantized
from trace_serve.recipe import PRESETS, Recipe


def _why_not() -> str:
    if not torch.cuda.is_available():
        return "no NVIDIA GPU: FlashInfer's kernels did not run"
    capability = torch.cuda.get_device_capability()
    return "" if capability in ((10, 0), (10, 3)) else f"needs sm_100 or sm_103, this card is sm_{capability}"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "runs")]


@pytest.fixture(scope="module", autouse=True)
def exact_math():
    patch = pytest.MonkeyPatch()
    for name in ("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH"):
        patch.setenv(name, "1")
    load("flashinfer")
    require_exact_math()
    yield
    patch.undo()


def on_cpu(q: Quantized) -> Quantized:
    return Quantized(q.codes.cpu(), q.scales.cpu(), q.global_scale.cpu())


def test_the_card_is_usable():
    assert reason("cuda") == ""


@pytest.mark.parametrize("name", ["portable", "gb200"])
@pytest.mark.parametrize(("hidden", "intermediate", "tokens"), [(256, 256, 33), (2880, 352, 5), (256, 128, 0)])
def test_staged_experts_equal_each_pair_alone(name, hidden, intermediate, tokens):
    a = layer(PRESETS[name], experts=8, hidden=hidden, intermediate=intermediate, tokens=tokens, device="cuda")
    run = experts_for(prepare_weights(a.w13, a.w2), a.kernels)
    out, mid = run(a.x, a.topk_ids, a.topk_weights, hints=True)
    again, mid_again = run(a.x, a.topk_ids, a.topk_weights, hints=True)
    assert torch.equal(out, again)
    assert torch.equal(mid.quantized.codes, mid_again.quantized.codes)
    if tokens == 0:
        assert out.shape == (0, hidden)
        return
    b = layer(PRESETS[name], experts=8, hidden=hidden, intermediate=intermediate, tokens=tokens)
    want, want_mid = expected(b)
    # The library's SiLU and sums differ in the last bits of BF16, which moves few codes.
    same = (on_cpu(mid.quantized).codes == want_mid.codes).float().mean()
    assert same > 0.97
    assert ((out.cpu().float() - want).norm() / want.norm()) < 0.03


def test_the_single_call_agrees_with_the_stages_under_gb200():
    a = layer(PRESETS["gb200"], experts=8, hidden=256, intermediate=256, tokens=33, device="cuda")
    weights = prepare_weights(a.w13, a.w2)
    staged, _ = experts_for(weights, a.kernels)(a.x, a.topk_ids, a.topk_weights)
    fused, _ = experts_for(weights, a.kernels, runner="cute_dsl_fused")(a.x, a.topk_ids, a.topk_weights)
    # Equal middle inputs and equal choices, so equal codes: only the order of sums may differ.
    assert ((staged.float() - fused.float()).norm() / staged.float().norm()) < 0.005


@pytest.mark.parametrize("recipe", [Recipe(), PRESETS["gb200"]], ids=["portable", "gb200"])
@pytest.mark.parametrize(("page", "head_dim"), [(16, 128), (64, 64)])
def test_decode_reads_what_was_appended_within_the_error_of_e4m3_queries_and_results(recipe, page, head_dim):
    heads, group, lengths = 2, 4, [1, 37, 128]
    pages = [-(-n // page) for n in lengths]
    buffers = paged_buffers(sum(pages) + 1, heads, page, head_dim, "cuda")
    table = torch.zeros(3, max(pages), dtype=torch.int32, device="cuda")
    slots, first = [], 1
    for request, (n, count) in enumerate(zip(lengths, pages, strict=True)):
        table[request, :count] = torch.arange(first, first + count)
        slots.append(torch.arange(first * page, first * page + n))
        first += count
    index = torch.cat(slots).cuda()
    generator = torch.Generator().manual_seed(1)
    shape = (sum(lengths), heads, head_dim)
    k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16).cuda() for _ in range(2))
    scales = {"k_global_scale": 2.0**-4, "v_global_scale": 2.0**-4}
    append_kv(kernels_for(recipe, "cuda"), k, v, index, buffers, **scales)
    q = torch.randn(3, heads * group, head_dim, generator=generator).to(torch.bfloat16).cuda()
    out = decode_attention(
        q,
        buffers,
        table,
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        workspace("cuda"),
        longest=max(lengths),
        softmax_scale=head_dim**-0.5,
        **scales,
    )
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda")
    want, magnitude = attention.decode_attention_reference(
        q, buffers, starts, index, softmax_scale=head_dim**-0.5, **scales
    )
    # E4M3 keeps 4 significant bits: 2^-4 of a result, and a little from the scores.
    assert ((out.double() - want).abs() <= 2.0**-3 * magnitude + 1e-3).float().mean() > 0.999
