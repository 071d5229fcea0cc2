"""What DotProductAttention refuses, and which backend it says it takes."""

import pytest
import torch

import quaver as qv
from quaver.nn import DotProductAttention
from quaver.recipe import DelayedScaling, Float8CurrentScaling

FP8 = Float8CurrentScaling(fp8_dpa=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gqa_groups": 3}, "divide the 4 heads, but is 3"),
        ({"attention_dropout": 1.0}, "from 0 to below 1, not 1.0"),
        ({"attn_mask_type": "left"}, "attn_mask_type must be one of .* not left"),
        ({"window_size": (3, 1)}, r"end at the query under causal, as in \(3, 0\)"),
        ({"window_size": (-2, 0)}, "two counts, or -1 for all"),
        ({"qkv_format": "bhsd"}, "one of bshd, sbhd, thd, not 'bhsd'"),
        ({"softmax_type": "sink"}, "one of vanilla, off-by-one, learnable, not 'sink'"),
        ({"backend": "flash"}, "one of auto, reference, sdpa, not 'flash'"),
        ({"recipe": DelayedScaling()}, "fp8_dpa=True, without which it would do nothing"),
        ({"recipe": "fp8"}, "recipe must be a recipe"),
    ],
)
def test_options(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DotProductAttention(4, 8, **options)


@pytest.mark.parametrize(
    ("module", "kwargs", "message"),
    [
        ({}, {"attention_mask": torch.zeros(1, 1, 5, 5, dtype=torch.bool)}, "takes no attention_m"),
        ({}, {"cu_seqlens_q": torch.tensor([0, 5, 10])}, "takes no cu_seqlens"),
        ({}, {"max_seqlen_q": 5}, 'belong to "thd"'),
        ({}, {"core_attention_bias": torch.zeros(1)}, "goes with core_attention_bias_type"),
        ({}, {"core_attention_bias_type": "post_scale_bias"}, "goes with core_attention_bias_type"),
        ({}, {"core_attention_bias_type": "t5"}, "one of no_bias, .* not 't5'"),
        ({}, {"alibi_slopes": torch.ones(4)}, "goes with the bias type alibi"),
        (
            {},
            {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3)},
            r"must be \[4\]",
        ),
        ({"attn_mask_type": "padding"}, {}, "needs attention_mask, True for padding"),
        (
            {"attn_mask_type": "padding"},
            {"attention_mask": torch.zeros(2, 1, 1, 4, dtype=torch.bool)},
            "2 sequences of 5 queries",
        ),
        (
            {"attn_mask_type": "padding"},
            {"attention_mask": torch.zeros(2, 1, 1, 5)},
            "must be bool, True for padding, not torch.float32",
        ),
        ({"attn_mask_type": "arbitrary"}, {}, "needs attention_mask, a bool tensor"),
    ],
)
def test_calls(module, kwargs, message: str) -> None:
    attention = DotProductAttention(4, 8, **module)
    x = torch.randn(2, 5, 4, 8)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, **kwargs)


def test_shapes_and_dtypes() -> None:
    attention = DotProductAttention(4, 8, num_gqa_groups=2)
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    with pytest.raises(ValueError, match=r"key must be bshd with 2 heads of 8 features, not"):
        attention(q, q, q)
    with pytest.raises(ValueError, match="key and value of one length"):
        attention(q, k, k[:, :4])
    with pytest.raises(TypeError, match=r"value is torch\.bfloat16 beside torch\.float32"):
        attention(q, k, k.bfloat16())
    packed = DotProductAttention(4, 8, qkv_format="thd")
    with pytest.raises(ValueError, match="needs cu_seqlens_q and cu_seqlens_kv"):
        packed(q[0], q[0], q[0])


@pytest.mark.parametrize(
    ("options", "asked", "expected"),
    [
        ({}, {}, "sdpa"),
        ({"backend": "reference"}, {}, "reference"),
        ({"softmax_type": "off-by-one"}, {}, "reference (scaled_dot_product_attention has no att"),
        ({"recipe": FP8}, {}, "reference (FP8 operands are emulated"),
        ({"recipe": FP8}, {"quantized": False}, "sdpa"),
        ({}, {"quantized": True}, "reference (FP8"),
        ({}, {"bias": True}, "sdpa"),
        (
            {},
            {"bias": True, "dtype": torch.bfloat16},
            "reference (scaled_dot_product_attention wou",
        ),
        ({}, {"bias": True, "bias_grad": True}, "reference (not every kernel"),
    ],
)
def test_the_rules_of_auto(options, asked, expected: str) -> None:
    found = str(DotProductAttention(4, 8, **options).backend_for(**asked))
    assert found == expected or ("(" in expected and found.startswith(expected))


def test_an_explicit_backend_never_falls_back() -> None:
    for options in ({"softmax_type": "learnable"}, {"recipe": FP8}):
        with pytest.raises(qv.QuaverError, match='backend="sdpa" does not serve this attention: '):
            DotProductAttention(4, 8, backend="sdpa", **options)
    attention = DotProductAttention(4, 8, backend="sdpa")
    x = torch.randn(2, 5, 4, 8)
    with pytest.raises(qv.QuaverError, match="FP8 operands"), qv.autocast(recipe=FP8):
        attention(x, x, x)
    x = x.bfloat16()
    with pytest.raises(qv.QuaverError, match="round the bias"):
        attention(x, x, x, core_attention_bias_type="alibi")
    attention(x, x, x)  # and what failed left nothing behind
