"""DotProductAttention against loops and float64: every format, mask, window, bias and sink."""

import pytest
import torch

import quaver as qv
from quaver.functional.attention.masks import MASK_TYPES, alibi_slopes
from quaver.nn import DotProductAttention
from tests.nn.attention.oracle import (
    WAYS,
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
PADDED = [name for name in MASK_TYPES if "padding" in name]
WHOLE = [name for name in MASK_TYPES if "padding" not in name and name != "arbitrary"]
WINDOWS = [(-1, -1), (2, 0), (1, 2), (0, -1)]
MASKS_AND_WINDOWS = [(m, w) for m in WHOLE for w in WINDOWS if m == "no_mask" or w[1] <= 0]


def check(got: torch.Tensor, inputs, expected: torch.Tensor, twins) -> None:
    """Outputs and gradients agree within float32 rounding."""
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    pairs = zip(gradients(got, *inputs), gradients(expected, *twins), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left.double(), right.double(), **CLOSE)


@BACKENDS
@pytest.mark.parametrize(("mask_type", "window"), MASKS_AND_WINDOWS)
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (6, 4), (1, 5)], ids=str)
def test_masks_and_windows(sizes, mask_type: str, window, backend: str) -> None:
    queries, keys = ([n, n] for n in sizes)
    q, k, v = operands(queries, keys)
    module = DotProductAttention(
        4,
        (8, 6),
        num_gqa_groups=2,
        attn_mask_type=mask_type,
        window_size=window,
        backend=backend,
    )
    assert str(module.backend_for()) == backend
    expected = attention(q, k, v, allowed(mask_type, window, queries, keys))
    check(module(q, k, v), (q, k, v), expected, (q, k, v))


@BACKENDS
@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
@pytest.mark.parametrize("mask_type", PADDED)
@pytest.mark.parametrize("given", ["mask", "totals", "thd", "sbhd"])
@pytest.mark.parametrize("cross", [False, True])
def test_padding(mask_type: str, window, given: str, cross: bool, backend: str) -> None:
    queries, keys = [5, 2, 4], [3, 6, 2] if cross else [5, 2, 4]
    q, k, v = operands(queries, keys)
    options = {"num_gqa_groups": 2, "attn_mask_type": mask_type, "window_size": window}
    options |= {"backend": backend, "qkv_format": given if given in WAYS else "bshd"}
    module = DotProductAttention(4, (8, 6), **options)
    expected = attention(q, k, v, allowed(mask_type, window, queries, keys))
    lengths = {"cu_seqlens_q": totals(queries), "cu_seqlens_kv": totals(keys)}
    if given == "thd":
        inputs = [packed(x, n) for x, n in ((q, queries), (k, keys), (v, keys))]
        got, expected = module(*inputs, **lengths), packed(expected, queries)
    elif given == "sbhd":
        inputs = [x.transpose(0, 1) for x in (q, k, v)]
        got, expected = module(*inputs, **lengths), expected.transpose(0, 1)
    elif given == "totals":
        got = module(q, k, v, **lengths)
    else:
        masks = (padding(queries), padding(keys))
        got = module(q, k, v, masks if cross else masks[0])
    check(got, (q, k, v), expected, (q, k, v))


@BACKENDS
@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 1, 5, 6), (2, 1, 5, 6)], ids=str)
def test_an_arbitrary_mask(shape, backend: str) -> None:
    q, k, v = operands([5, 5], [6, 6])
    mask = torch.rand(shape) < 0.4
    mask[0, 0, 2] = True  # a query without any key
    module = DotProductAttention(
        4, (8, 6), num_gqa_groups=2, attn_mask_type="arbitrary", backend=backend
    )
    got = module(q, k, v, mask)
    check(got, (q, k, v), attention(q, k, v, ~mask), (q, k, v))
    assert got[0, 2, :6].eq(0).all()


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
def test_sinks(kind: str, mask_type: str) -> None:
    q, k, v = operands([5, 5], [4, 4])
    module = DotProductAttention(
        4, (8, 6), num_gqa_groups=2, attn_mask_type=mask_type, softmax_type=kind
    )
    inputs = [q, k, v]
    sink = torch.zeros(4)
    if kind == "learnable":
        torch.nn.init.normal_(module.softmax_offset)
        sink = module.softmax_offset.detach().flatten().clone().requires_grad_()
        assert [name for name, _ in module.named_parameters()] == ["softmax_offset"]
    else:
        assert list(module.parameters()) == []
    allow = allowed(mask_type, (-1, -1), [5, 5], [4, 4])
    expected = attention(q, k, v, allow, sink=sink)
    got = module(q, k, v)
    check(got, inputs, expected, inputs)
    if kind == "learnable":
        mine, theirs = gradients(module(q, k, v), module.softmax_offset)[0], None
        theirs = gradients(attention(q, k, v, allow, sink=sink), sink)[0]
        torch.testing.assert_close(mine.flatten(), theirs, **CLOSE)
    assert str(module.backend_for()).startswith("reference (")


@BACKENDS
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
def test_alibi(mask_type: str, backend: str) -> None:
    q, k, v = operands([4, 4], [6, 6])
    module = DotProductAttention(
        4, (8, 6), num_gqa_groups=2, attn_mask_type=mask_type, backend=backend
    )
    own = torch.arange(4)[:, None] + (0 if mask_type == "causal" else 2)
    distance = (torch.arange(6) - own).abs()
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    allow = allowed(mask_type, (-1, -1), [4, 4], [6, 6])
    expected = attention(q, k, v, allow, bias=-slopes.view(1, 4, 1, 1) * distance)
    got = module(q, k, v, core_attention_bias_type="alibi")
    check(got, (q, k, v), expected, (q, k, v))
    mine = torch.rand(2, 4)
    expected = attention(q, k, v, allow, bias=-mine.view(2, 4, 1, 1) * distance)
    got = module(q, k, v, core_attention_bias_type="alibi", alibi_slopes=mine)
    check(got, (q, k, v), expected, (q, k, v))


def test_alibi_slopes_of_other_numbers_of_heads_are_those_of_the_paper() -> None:
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(6, torch.device("cpu")).tolist() == expected
    assert alibi_slopes(16, torch.device("cpu"))[0].item() == pytest.approx(2**-0.5)


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_bias(kind: str, trained: bool) -> None:
    q, k, v = operands([4, 4], [6, 6])
    bias = torch.randn(1, 4, 4, 6, requires_grad=trained)
    module = DotProductAttention(
        4, (8, 6), num_gqa_groups=2, attn_mask_type="no_mask", softmax_scale=0.3
    )
    expected = attention(
        q,
        k,
        v,
        torch.ones(1, 1, 4, 6, dtype=torch.bool),
        scale=0.3,
        bias=bias.double() * (0.3 if kind == "pre_scale_bias" else 1.0),
    )
    got = module(q, k, v, core_attention_bias_type=kind, core_attention_bias=bias)
    inputs = (q, k, v, bias) if trained else (q, k, v)
    check(got, inputs, expected, inputs)
    assert module.backend_for(bias=True, bias_grad=trained).name == (
        "reference" if trained else "sdpa"
    )


@BACKENDS
def test_dropout_drops_weights_and_keeps_the_mean(backend: str) -> None:
    q, k = torch.randn(1, 16, 2, 8), torch.randn(1, 16, 2, 8)
    v = torch.eye(16).view(1, 16, 1, 16).expand(1, 16, 2, 16)  # so that outputs are the weights
    module = DotProductAttention(
        2, (8, 16), attention_dropout=0.25, attn_mask_type="no_mask", backend=backend
    )
    exact = module.eval()(q, k, v)
    assert torch.equal(exact, module(q, k, v))
    torch.testing.assert_close(exact.unflatten(-1, (2, 16)).sum(-1), torch.ones(1, 16, 2))
    module.train()
    runs = torch.stack([module(q, k, v) for _ in range(200)])
    kept = runs != 0
    assert 0.73 < kept.float().mean() < 0.77
    torch.testing.assert_close(runs[kept], (exact / 0.75).expand_as(runs)[kept])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_off_by_its_own_rounding(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in operands([5, 5], [5, 5]))
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, backend=backend)
    expected = attention(q, k, v, allowed("causal", (-1, -1), [5, 5], [5, 5]))
    got = module(q, k, v)
    assert got.dtype == dtype
    bound = torch.finfo(dtype).eps * (1 if backend == "reference" else 4)
    torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)
    with torch.autocast("cpu", dtype=dtype):
        full = module(*(x.float() for x in (q, k, v)))
    assert torch.equal(full, got)


@BACKENDS
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)], ids=str)
def test_nothing_to_attend_from_or_to(sizes, backend: str) -> None:
    q, k, v = operands(*([n, n] for n in sizes))
    module = DotProductAttention(4, (8, 6), num_gqa_groups=2, backend=backend)
    y = module(q, k, v)
    assert y.shape == (2, sizes[0], 24)
    assert y.eq(0).all()
    assert all(grad.eq(0).all() for grad in gradients(y, q, k, v))


def test_a_mask_type_for_one_call() -> None:
    q, k, v = operands([5, 5], [5, 5])
    causal, plain = (
        DotProductAttention(4, (8, 6), num_gqa_groups=2, attn_mask_type=name)
        for name in ("causal", "no_mask")
    )
    assert torch.equal(causal(q, k, v, attn_mask_type="no_mask"), plain(q, k, v))
    assert not torch.equal(causal(q, k, v), plain(q, k, v))


def test_packed_tokens_of_no_sequence_give_zero() -> None:
    q, k, v = (torch.randn(7, 4, 8) for _ in range(3))
    module = DotProductAttention(4, 8, qkv_format="thd")
    cu = torch.tensor([0, 3, 5])
    y = module(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=4, max_seqlen_kv=3)
    assert y[5:].eq(0).all()
    assert torch.equal(y[:5], module(q[:5], k[:5], v[:5], cu_seqlens_q=cu, cu_seqlens_kv=cu))


def test_the_module_has_nothing_on_any_device_and_follows_its_input(devices) -> None:
    module = DotProductAttention(4, 8)
    q, k, v = (torch.randn(2, 5, 4, 8) for _ in range(3))
    outputs = [module(*(x.to(device) for x in (q, k, v))) for device in devices]
    assert [y.device for y in outputs] == devices
    assert torch.equal(outputs[0].cpu(), outputs[1].cpu())
    with pytest.raises(qv.DeviceMismatchError, match=f"query is on {devices[0]} and key is on"):
        module(q.to(devices[0]), k.to(devices[1]), v.to(devices[0]))
    assert module.recipe_states == {}
