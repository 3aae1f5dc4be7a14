"""The torch stand-ins for SGLang's CPU operators against Hugging Face's implementation of the same mathematics."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import sigmoid
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

from trace_serve.engine.cpu_fallback import causal_conv1d, gated_attention, gated_delta_rule, gated_rows

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 16, 24, 4
CHANNELS = 12
BF16_STEP = 2.0**-8


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Sequences:
    """Random inputs of the gated delta rule, several sequences one after the other."""

    def __init__(self, lengths: list[int], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> None:
        total = sum(lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        self.q, self.k = normal(1, total, KEY_HEADS, KEY_DIM), normal(1, total, KEY_HEADS, KEY_DIM)
        self.v = normal(1, total, VALUE_HEADS, VALUE_DIM)
        self.a, self.b = normal(total, VALUE_HEADS), normal(total, VALUE_HEADS)
        self.a_log, self.dt_bias = normal(VALUE_HEADS), normal(VALUE_HEADS)
        self.g, self.beta = gated_delta_rule.fused_gdn_gating_cpu(self.a_log, self.a, self.b, self.dt_bias)

    def prefill(self, start: int, end: int, states: torch.Tensor, slots: list[int], bounds: list[int]) -> torch.Tensor:
        cut = slice(start, end)
        out, _, _ = gated_delta_rule.chunk_gated_delta_rule_cpu(
            self.q[:, cut],
            self.k[:, cut],
            self.v[:, cut],
            self.g[:, cut],
            self.beta[:, cut],
            initial_state=states,
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=torch.tensor(slots, dtype=torch.int32),
        )
        return out

    def decode(self, token: int, states: torch.Tensor, slot: int) -> torch.Tensor:
        cut = slice(token, token + 1)
        return gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            q=self.q[:, cut],
            k=self.k[:, cut],
            v=self.v[:, cut],
            a=self.a[cut],
            b=self.b[cut],
            initial_state_source=states,
            initial_state_indices=torch.tensor([slot], dtype=torch.int32),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
        )

    def theirs(self, start: int, end: int, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [1, T, Hv, Dv] and last state [1, Hv, Dk, Dv] by Hugging Face's chunked form."""
        repeat = VALUE_HEADS // KEY_HEADS
        cut = slice(start, end)
        out, last = hf.torch_chunk_gated_delta_rule(
            self.q[:, cut].repeat_interleave(repeat, dim=2),
            self.k[:, cut].repeat_interleave(repeat, dim=2),
            self.v[:, cut],
            g=self.g[:, cut],
            beta=self.beta[:, cut],
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out, last


def pool(slots: int = 5) -> torch.Tensor:
    return torch.zeros(slots, VALUE_HEADS, VALUE_DIM, KEY_DIM)


def test_prefill_of_several_sequences_is_the_chunked_gated_delta_rule_of_each(generator: torch.Generator) -> None:
    lengths = [70, 1, 130]
    sequences, states = Sequences(lengths, generator), pool()
    slots = [3, 1, 4]
    out = sequences.prefill(0, sum(lengths), states, slots, sequences.bounds.tolist())
    bounds = sequences.bounds.tolist()
    for i, slot in enumerate(slots):
        expected, last = sequences.theirs(bounds[i], bounds[i + 1], None)
        torch.testing.assert_close(out[:, bounds[i] : bounds[i + 1]], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[slot], last[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)
    assert not states[[0, 2]].any(), "slots of other requests must not change"


def test_prefill_continues_from_the_state_of_its_slot(generator: torch.Generator) -> None:
    sequences, states = Sequences([90], generator), pool()
    _, state = sequences.theirs(0, 40, None)
    states[2] = state[0].transpose(-1, -2)
    out = sequences.prefill(40, 90, states, [2], [0, 50])
    expected, last = sequences.theirs(40, 90, state)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[2], last[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_and_single_steps_give_the_bits_of_one_prefill(generator: torch.Generator, dtype: torch.dtype) -> None:
    sequences, whole, pieces = Sequences([50], generator, dtype), pool(), pool()
    expected = sequences.prefill(0, 50, whole, [1], [0, 50])
    parts = [sequences.prefill(0, 17, pieces, [1], [0, 17]), sequences.prefill(17, 40, pieces, [1], [0, 23])]
    parts += [sequences.decode(token, pieces, 1) for token in range(40, 50)]
    assert torch.equal(torch.cat(parts, dim=1), expected)
    assert torch.equal(pieces, whole)


def test_a_decode_step_is_the_recurrent_gated_delta_rule(generator: torch.Generator) -> None:
    sequences, states = Sequences([1], generator), pool()
    states[4] = torch.randn(VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=generator)
    repeat = VALUE_HEADS // KEY_HEADS
    expected, last = hf.torch_recurrent_gated_delta_rule(
        sequences.q.repeat_interleave(repeat, dim=2),
        sequences.k.repeat_interleave(repeat, dim=2),
        sequences.v,
        g=sequences.g,
        beta=sequences.beta,
        initial_state=states[4].transpose(-1, -2).unsqueeze(0).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out = sequences.decode(0, states, 4)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[4], last[0].transpose(-1, -2), rtol=1e-5, atol=1e-6)


def test_gates_are_those_of_the_model(generator: torch.Generator) -> None:
    a, b = (torch.randn(9, VALUE_HEADS, generator=generator).bfloat16() for _ in range(2))
    a_log, dt_bias = torch.randn(VALUE_HEADS, generator=generator), torch.randn(VALUE_HEADS, generator=generator)
    g, beta = gated_delta_rule.fused_gdn_gating_cpu(a_log, a, b, dt_bias)
    torch.testing.assert_close(beta[0], b.sigmoid().float())
    torch.testing.assert_close(g[0], -a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias))
    huge, _ = gated_delta_rule.fused_gdn_gating_cpu(
        torch.zeros(1), torch.full((1, 1), 500.0), b[:1, :1], torch.zeros(1)
    )
    assert huge.item() == -500.0


def test_padding_rows_give_zeros_and_change_no_state(generator: torch.Generator) -> None:
    sequences, states = Sequences([3], generator), pool()
    before = states.clone()
    assert not sequences.prefill(0, 3, states, [-1], [0, 3]).any()
    assert not sequences.decode(0, states, -1).any()
    assert torch.equal(states, before)
    conv_states = torch.randn(4, CHANNELS, WIDTH - 1, generator=generator)
    kept = conv_states.clone()
    weight = torch.randn(CHANNELS, WIDTH, generator=generator)
    index = torch.tensor([-1])
    out = causal_conv1d.causal_conv1d_update_cpu(
        torch.ones(1, CHANNELS), conv_states, weight, None, "silu", conv_state_indices=index
    )
    assert not out.any()
    assert torch.equal(conv_states, kept)


def test_several_tokens_a_sequence_are_refused_in_decode(generator: torch.Generator) -> None:
    sequences, states = Sequences([2], generator), pool()
    with pytest.raises(NotImplementedError, match="2 tokens of 1 sequences"):
        gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
            sequences.a_log,
            sequences.dt_bias,
            sequences.q,
            sequences.k,
            sequences.v,
            sequences.a,
            sequences.b,
            states,
            torch.tensor([0]),
            torch.tensor([0, 2]),
            True,
            1.0,
            20.0,
        )


def _prefill_conv(
    x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, slots: list[int], bounds: list[int], *, new: list[bool]
) -> torch.Tensor:
    return causal_conv1d.causal_conv1d_fn_cpu(
        x.transpose(0, 1),
        weight,
        None,
        activation="silu",
        conv_states=states,
        has_initial_state=torch.tensor([not fresh for fresh in new]),
        cache_indices=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=torch.tensor(bounds, dtype=torch.int32),
        seq_lens_cpu=[end - start for start, end in pairwise(bounds)],
    ).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_of_each_sequence_is_the_models(generator: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(12, CHANNELS, generator=generator).to(dtype)
    weight = torch.randn(CHANNELS, WIDTH, generator=generator).to(dtype)
    # What a finished request left in a slot must not reach the next one.
    states = torch.full((4, CHANNELS, WIDTH - 1), 99.0).to(dtype)
    out = _prefill_conv(x, weight, states, [2, 0], [0, 2, 12], new=[True, True])
    for start, end, slot in ((0, 2, 2), (2, 12, 0)):
        window = x[start:end].T.unsqueeze(0)
        expected = hf.causal_conv1d_fn(window, weight, None, activation="silu")[0].T
        torch.testing.assert_close(out[start:end], expected, rtol=0, atol=0 if dtype == torch.float32 else BF16_STEP)
        padded = torch.cat([torch.zeros(CHANNELS, WIDTH - 1).to(dtype), x[start:end].T], dim=1)
        assert torch.equal(states[slot], padded[:, -(WIDTH - 1) :])
    assert (states[[1, 3]] == 99).all()


def test_a_convolution_step_is_the_models(generator: torch.Generator) -> None:
    weight = torch.randn(CHANNELS, WIDTH, generator=generator)
    states = torch.randn(4, CHANNELS, WIDTH - 1, generator=generator)
    x = torch.randn(2, CHANNELS, generator=generator)
    theirs = states[[3, 1]].clone()
    expected = hf.causal_conv1d_update(x.unsqueeze(-1), theirs, weight, None, "silu")[..., 0]
    out = causal_conv1d.causal_conv1d_update_cpu(
        x, states, weight, None, "silu", conv_state_indices=torch.tensor([3, 1], dtype=torch.int32)
    )
    torch.testing.assert_close(out, expected)
    assert torch.equal(states[[3, 1]], theirs)


def test_pieces_and_steps_give_the_bits_of_one_convolution(generator: torch.Generator) -> None:
    x = torch.randn(11, CHANNELS, generator=generator).bfloat16()
    weight = torch.randn(CHANNELS, WIDTH, generator=generator).bfloat16()
    whole, pieces = (torch.zeros(2, CHANNELS, WIDTH - 1).bfloat16() for _ in range(2))
    expected = _prefill_conv(x, weight, whole, [1], [0, 11], new=[True])
    parts = [_prefill_conv(x[:2], weight, pieces, [1], [0, 2], new=[True])]
    parts.append(_prefill_conv(x[2:8], weight, pieces, [1], [0, 6], new=[False]))
    for row in x[8:]:
        index = torch.tensor([1])
        parts.append(causal_conv1d.causal_conv1d_update_cpu(row.unsqueeze(0), pieces, weight, None, "silu", index))
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(pieces, whole)


def test_query_and_key_norms_and_the_gate_are_the_models(generator: torch.Generator) -> None:
    heads, dim, tokens = 3, 8, 5
    q_norm, k_norm = hf.Qwen3_5MoeRMSNorm(dim), hf.Qwen3_5MoeRMSNorm(dim)
    for norm in (q_norm, k_norm):
        norm.weight.data = torch.randn(dim, generator=generator).bfloat16()
    packed = torch.randn(tokens, heads * 2 * dim + dim, generator=generator).bfloat16()
    q_gate, k = torch.split(packed, [heads * 2 * dim, dim], dim=-1)
    q, gate = torch.chunk(q_gate.reshape(tokens, heads, 2 * dim), 2, dim=-1)
    out = gated_attention.fused_qk_gemma_rmsnorm_with_gate_cpu(
        q_gate, k, q_norm.weight.data, k_norm.weight.data, q_norm.eps, dim, heads
    )
    assert torch.equal(out[0].view(tokens, heads, dim), q_norm(q))
    assert torch.equal(out[1], k_norm(k))
    assert torch.equal(out[2].view(tokens, heads, dim), gate)
    plain = gated_attention.fused_qk_gemma_rmsnorm_cpu(
        q.reshape(tokens, -1), k, q_norm.weight.data, k_norm.weight.data, q_norm.eps, dim
    )
    assert torch.equal(plain[0], out[0])
    assert torch.equal(plain[1], out[1])


def test_the_output_gate_multiplies_in_place(generator: torch.Generator) -> None:
    x, gate = (torch.randn(6, 10, generator=generator) for _ in range(2))
    expected = x * sigmoid(gate)
    gated_attention.fused_sigmoid_mul_cpu(x, gate.view(6, 2, 5))
    torch.testing.assert_close(x, expected)


def test_the_projections_are_split_as_the_checkpoint_stores_them(generator: torch.Generator) -> None:
    tokens, values, keys = 3, VALUE_HEADS * VALUE_DIM, KEY_HEADS * KEY_DIM
    q, k = (torch.randn(tokens, keys, generator=generator) for _ in range(2))
    v, z = (torch.randn(tokens, values, generator=generator) for _ in range(2))
    b, a = (torch.randn(tokens, VALUE_HEADS, generator=generator) for _ in range(2))
    out = gated_attention.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat([q, k, v, z], dim=-1), torch.cat([b, a], dim=-1), KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
    )
    expected = (torch.cat([q, k, v], dim=-1), z.view(tokens, VALUE_HEADS, VALUE_DIM), b, a)
    for ours, theirs in zip(out, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_norm_is_the_models(generator: torch.Generator, dtype: torch.dtype) -> None:
    norm = hf.Qwen3_5MoeRMSNormGated(VALUE_DIM, eps=1e-6)
    norm.weight.data = torch.randn(VALUE_DIM, generator=generator).to(dtype)
    x, gate = (torch.randn(7, VALUE_DIM, generator=generator).to(dtype) for _ in range(2))
    ours = gated_rows.rms_norm_gated(x, norm.weight.data, gate, 1e-6, "swish")
    torch.testing.assert_close(ours, norm(x, gate).detach())
    with pytest.raises(NotImplementedError, match="'gelu'"):
        gated_rows.rms_norm_gated(x, norm.weight.data, gate, 1e-6, "gelu")


def test_the_shared_expert_is_scaled_by_its_gate(generator: torch.Generator) -> None:
    x, rows, out = (torch.randn(4, 16, generator=generator) for _ in range(3))
    weight = torch.randn(16, generator=generator)
    expected = sigmoid(x @ weight)[:, None] * rows
    added = out + expected
    gated_rows.scale_by_sigmoid_gate(x, weight, rows, out, add=True)
    torch.testing.assert_close(out, added)
    gated_rows.scale_by_sigmoid_gate(x, weight, rows, out, add=False)
    torch.testing.assert_close(out, expected)


def test_installed_operators_run_by_the_names_that_sglang_uses() -> None:
    code = (
        "import torch\n"
        "from trace_serve.engine import cpu_fallback; cpu_fallback.install(); cpu_fallback.install()\n"
        "from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu\n"
        "x, gate = torch.ones(2, 4), torch.zeros(2, 4)\n"
        "torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(x, gate)\n"
        "assert torch.equal(x, torch.full((2, 4), 0.5)), x\n"
        "g, beta = torch.ops.sgl_kernel.fused_gdn_gating_cpu(gate[0], gate, gate, gate[0])\n"
        "assert g.shape == beta.shape == (1, 2, 4)\n"
        "try: torch.ops.sgl_kernel.fused_rmsnorm_gated_cpu\n"
        "except AttributeError: print('absent')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "absent", run.stderr
