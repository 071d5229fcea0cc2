"""Options of attention together: what one of them does must not undo another."""

import pytest
import torch

from quaver.nn import DotProductAttention
from tests.nn.attention.oracle import (
    allowed,
    attention,
    gradients,
    operands,
    packed,
    padding,
    totals,
)

BACKENDS = pytest.mark.parametrize("backend", ["reference", "sdpa"])
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
QUERIES, KEYS = [5, 2, 4], [3, 6, 2]
PADDED = ["padding", "padding_causal", "padding_causal_bottom_right"]


def check(got: torch.Tensor, expected: torch.Tensor, inputs) -> None:
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    pairs = zip(gradients(got, *inputs), gradients(expected, *inputs), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left.double(), right.double(), **CLOSE)


def alibi(mask_type: str, slopes: torch.Tensor) -> torch.Tensor:
    """-slope times the distance from each query's own key, counted in its own sequence."""
    found = torch.zeros(len(QUERIES), len(slopes), max(QUERIES), max(KEYS))
    for b, (nq, nk) in enumerate(zip(QUERIES, KEYS, strict=True)):
        own = 0 if mask_type == "padding_causal" else nk - nq
        for i in range(max(QUERIES)):
            for j in range(max(KEYS)):
                found[b, :, i, j] = -slopes * abs(j - i - own)
    return found


@BACKENDS
@pytest.mark.parametrize("form", ["bshd", "thd"])
@pytest.mark.parametrize("mask_type", PADDED)
def test_alibi_counts_within_each_sequence(mask_type: str, form: str, backend: str) -> None:
    q, k, v = operands(QUERIES, KEYS)
    options = {"attn_mask_type": mask_type, "qkv_format": form, "backend": backend}
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, **options)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    allow = allowed(mask_type, (-1, -1), QUERIES, KEYS)
    expected = attention(q, k, v, allow, bias=alibi(mask_type, slopes))
    inputs = (q, k, v)
    if form == "thd":
        inputs = tuple(packed(x, n) for x, n in ((q, QUERIES), (k, KEYS), (v, KEYS)))
        expected = packed(expected, QUERIES)
    got = module(
        *inputs,
        cu_seqlens_q=totals(QUERIES),
        cu_seqlens_kv=totals(KEYS),
        core_attention_bias_type="alibi",
    )
    check(got, expected, (q, k, v))


@pytest.mark.parametrize("window", [(-1, -1), (1, 0)])
@pytest.mark.parametrize("mask_type", PADDED)
def test_sinks_with_padding_and_a_window(mask_type: str, window) -> None:
    q, k, v = operands(QUERIES, KEYS)
    module = DotProductAttention(
        4,
        (8, 6),
        num_gqa_groups=2,
        attn_mask_type=mask_type,
        window_size=window,
        softmax_type="learnable",
    )
    torch.nn.init.normal_(module.softmax_offset)
    sink = module.softmax_offset.detach().flatten()
    allow = allowed(mask_type, window, QUERIES, KEYS)
    expected = attention(q, k, v, allow, sink=sink)
    got = module(q, k, v, (padding(QUERIES), padding(KEYS)))
    check(got, expected, (q, k, v))


@BACKENDS
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_heads_from_one_to_all(groups: int, backend: str) -> None:
    q, k, v = operands([5, 5], [6, 6], groups=groups)
    module = DotProductAttention(
        4,
        (8, 6),
        num_gqa_groups=groups,
        attn_mask_type="causal_bottom_right",
        window_size=(3, 0),
        backend=backend,
    )
    expected = attention(q, k, v, allowed("causal_bottom_right", (3, 0), [5, 5], [6, 6]))
    check(module(q, k, v), expected, (q, k, v))


@BACKENDS
def test_an_arbitrary_mask_with_a_window_and_a_bias(backend: str) -> None:
    q, k, v = operands([5, 5], [6, 6])
    mask = torch.rand(2, 4, 5, 6) < 0.3
    bias = torch.randn(1, 4, 5, 6)
    module = DotProductAttention(
        4,
        (8, 6),
        num_gqa_groups=2,
        attn_mask_type="arbitrary",
        window_size=(2, 1),
        backend=backend,
    )
    got = module(
        q, k, v, mask, core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    near = allowed("no_mask", (2, 1), [5, 5], [6, 6])
    expected = attention(q, k, v, ~mask & near, bias=bias.double())
    check(got, expected, (q, k, v))


@BACKENDS
@pytest.mark.parametrize("form", ["bshd", "thd"])
def test_gradients_go_through_the_weights_that_dropout_left(form: str, backend: str) -> None:
    lengths, heads = [6, 4], 2
    q, k, v = operands(lengths, lengths, heads=heads, groups=heads, channels=(8, 6))
    module = DotProductAttention(
        heads,
        (8, 6),
        attention_dropout=0.5,
        attn_mask_type="padding_causal",
        qkv_format=form,
        backend=backend,
    )
    cu = totals(lengths)
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)  # so that the same weights are dropped
        if form == "thd":
            inputs = tuple(packed(x, lengths) for x in inputs)
        return module(*inputs, **options)

    dropped = run(q, k, v)
    module.eval()
    assert not torch.equal(run(q, k, v), dropped)
    module.train()
    inputs = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    torch.autograd.gradcheck(run, inputs, fast_mode=True)
