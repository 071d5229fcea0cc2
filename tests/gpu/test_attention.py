"""Attention on a CUDA GPU: torch's kernels and the reference, beside the reference on the CPU."""

import pytest
import torch

import quaver as qv
from quaver.kernels import rope
from quaver.nn import DotProductAttention, TransformerLayer
from quaver.recipe import DelayedScaling, Float8CurrentScaling
from tests.kernels.test_operators import assert_same_bytes
from tests.kernels.test_rope import FORMS, SHAPES, rope_case
from tests.samples import DTYPES

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _only_with_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


def run(module: torch.nn.Module, inputs, options, device, dtype) -> list[torch.Tensor]:
    """Output and the inputs' gradients, float64 on the CPU."""
    tensors = [x.to(device, dtype).requires_grad_() for x in inputs]
    moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
    y = module.to(device)(*tensors, **moved)
    weights = torch.linspace(-1, 1, y.numel()).sin().view(y.shape).to(device)
    grads = torch.autograd.grad((y.float() * weights).sum(), tensors)
    return [t.detach().double().cpu() for t in (y, *grads)]


def near(got: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for left, right in zip(got, expected, strict=True):
        assert left.isfinite().all()
        assert (left - right).norm() <= bound * right.norm()


LENGTHS = torch.tensor([0, 48, 80])
CASES = {
    "causal": ({}, {}),
    "no_mask": ({"attn_mask_type": "no_mask"}, {}),
    "causal, more keys": ({}, {"keys": 80}),
    "causal, fewer keys": ({}, {"keys": 32}),
    "bottom right": ({"attn_mask_type": "causal_bottom_right"}, {"keys": 80}),
    "bottom right, fewer keys": ({"attn_mask_type": "causal_bottom_right"}, {"keys": 32}),
    "window": ({"window_size": (9, 0)}, {}),
    "padding": (
        {"attn_mask_type": "padding_causal"},
        {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS},
    ),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, {"attention_mask": None}),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}),
    "sink": ({"softmax_type": "off-by-one"}, {}),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_cpu_s_reference(case: str, dtype: torch.dtype, backend: str) -> None:
    options, given = CASES[case]
    given = dict(given)
    keys = given.pop("keys", 48)
    if "attention_mask" in given:
        given["attention_mask"] = torch.rand(2, 1, 48, 48) < 0.5
        given["attention_mask"][0, 0, 3] = True  # a query without any key
    shapes = ((2, 48, 8, 64), (2, keys, 2, 64), (2, keys, 2, 64))
    inputs = [torch.randn(shape).to(dtype).float() for shape in shapes]
    module = DotProductAttention(8, 64, num_gqa_groups=2, backend=backend, **options)
    exact = DotProductAttention(8, 64, num_gqa_groups=2, backend="reference", **options)
    expected = run(exact, inputs, given, torch.device("cpu"), torch.float32)
    bound = 5e-3 if dtype is torch.float32 else 2e-2
    near(run(module, inputs, given, CUDA, dtype), expected, bound)


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling])
def test_fp8_attention_is_near_the_cpu_s(kind) -> None:
    recipe = kind(fp8_dpa=True)
    shapes = ((2, 48, 8, 64), (2, 48, 2, 64), (2, 48, 2, 64))
    inputs = [torch.randn(shape) for shape in shapes]
    modules = [DotProductAttention(8, 64, num_gqa_groups=2) for _ in range(2)]
    for _ in range(2):
        with qv.autocast(recipe=recipe):
            got = run(modules[0], inputs, {}, CUDA, torch.float32)
            expected = run(modules[1], inputs, {}, torch.device("cpu"), torch.float32)
        # a value on the other side of a rounding step moves by one of E4M3's, or of E5M2's
        near(got[:1], expected[:1], 2e-2)
        near(got[1:], expected[1:], 1e-1)
    assert {state.device for state in modules[0].recipe_states.values()} == {CUDA}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_rotary_embedding_equals_the_cpu_s_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    for form in FORMS:
        got = rope(*(x.to(CUDA) for x in rope_case(name, dtype)), *form)
        assert_same_bytes(got.cpu(), rope(*rope_case(name, dtype), *form))


def test_a_layer_trains() -> None:
    layer = TransformerLayer(
        256,
        512,
        8,
        num_gqa_groups=2,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        device=CUDA,
        dtype=torch.bfloat16,
    )
    angles = qv.RotaryPositionEmbedding(32, device=CUDA)(64)
    x = torch.randn(2, 64, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    exact = layer(x, rotary_pos_emb=angles)
    with qv.autocast(recipe=DelayedScaling(amax_history_len=4)):
        y = layer(x, rotary_pos_emb=angles)
    y.sum().backward()
    assert (y - exact).norm() < 0.1 * exact.norm()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
