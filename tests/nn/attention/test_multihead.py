"""MultiheadAttention beside torch's, beside plain compositions, and in generation."""

import copy

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.functional import apply_rotary_pos_emb
from quaver.nn import RotaryPositionEmbedding
from quaver.nn.attention import (
    AttentionOptions,
    InferenceParams,
    MultiheadAttention,
    QKNorm,
)
from tests.nn.attention.oracle import allowed, attention, gradients, packed, padding, totals

CLOSE = {"rtol": 1e-5, "atol": 3e-6}
HIDDEN, HEADS = 24, 4


def torchs(ours: MultiheadAttention) -> nn.MultiheadAttention:
    """torch's module, whose parameters ours is given."""
    twin = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
    nn.init.normal_(twin.in_proj_bias)
    nn.init.normal_(twin.out_proj.bias)
    assert ours.load_state_dict(twin.state_dict(), strict=True) == ([], [])
    return twin


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("kind", "mask_type"),
    [(kind, mask) for kind in ("self", "cross") for mask in ("no_mask", "padding")]
    + [("self", "causal"), ("self", "padding_causal")],
)
def test_it_computes_what_torchs_does(mask_type: str, kind: str, fused: bool) -> None:
    ours = MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_type=kind,
        attn_mask_type=mask_type,
        options=AttentionOptions(fuse_qkv_params=fused),
    )
    twin = torchs(ours)
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    memory = torch.randn(2, 7, HIDDEN, requires_grad=True) if kind == "cross" else x
    inputs = (x, memory) if kind == "cross" else (x,)
    given = {"encoder_output": memory} if kind == "cross" else {}
    keys = padding([memory.shape[1], 3])
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1) if "causal" in mask_type else None
    options = {"need_weights": False, "attn_mask": hidden}
    if "padding" in mask_type:
        options["key_padding_mask"] = keys[:, 0, 0]
        # torch's takes notice of the keys' padding only
        given["attention_mask"] = (padding([5, 5]), keys)
    expected = twin(x, memory, memory, **options)[0]
    got = ours(x, **given)
    torch.testing.assert_close(got, expected, **CLOSE)
    mine = (*inputs, ours.proj.weight)
    theirs = (*inputs, twin.out_proj.weight)
    pairs = zip(gradients(got, *mine), gradients(expected, *theirs), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left, right, **CLOSE)


def normed(module: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    """What torch's functions make of a norm module's parameters."""
    if module is None:
        return x
    if not isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return nn.functional.normalize(x, dim=-1)
    gain = module.weight + (1 if module.zero_centered_gamma else 0)
    if isinstance(module, nn.RMSNorm):
        return nn.functional.rms_norm(x, x.shape[-1:], gain, module.eps)
    return nn.functional.layer_norm(x, x.shape[-1:], gain, module.bias, module.eps)


def as_norm(module: nn.Module) -> nn.Module:
    """The norm of a LayerNormLinear as a norm module."""
    kind = qv.nn.LayerNorm if module.normalization == "LayerNorm" else qv.nn.RMSNorm
    made = kind(HIDDEN, eps=module.eps, zero_centered_gamma=module.zero_centered_gamma)
    made.weight = module.layer_norm_weight
    if module.layer_norm_bias is not None:
        made.bias = module.layer_norm_bias
    return made


def composed(ours: MultiheadAttention, x: torch.Tensor, rope) -> torch.Tensor:
    """The same from plain functions, for fused causal self attention in bshd."""
    options = ours.options
    widths = [ours.widths[name] for name in ("query", "key", "value")]
    normed_qkv = getattr(ours, "layernorm_qkv", None)
    y = x if normed_qkv is None else normed(as_norm(normed_qkv), x)
    qkv = normed_qkv or ours.qkv
    parts = nn.functional.linear(y, qkv.weight, qkv.bias).split(widths, -1)
    q, k, v = (part.unflatten(-1, (-1, ours.channels)) for part in parts)

    def ready(t: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        first = options.qk_norm is not None and options.qk_norm.before_rope
        t = normed(norm, t) if first else t
        if rope is not None:
            t = apply_rotary_pos_emb(t, rope, interleaved=options.rotary_interleaved)
        return t if first else normed(norm, t)

    q, k = ready(q, ours.q_norm), ready(k, ours.k_norm)
    n = [x.shape[1]] * x.shape[0]
    allow = allowed("causal", options.window_size or (-1, -1), n, n)
    out = attention(q, k, v, allow, scale=options.softmax_scale)
    return nn.functional.linear(out.float(), ours.proj.weight, ours.proj.bias)


CASES = {
    "gqa": ({"num_gqa_groups": 2}, {}),
    "channels": ({}, {"kv_channels": 10}),
    "window": ({}, {"window_size": (2, 0), "softmax_scale": 0.2}),
    "no_bias": ({"bias": False}, {}),
    "norm": ({"input_layernorm": True}, {}),
    "rms": (
        {"input_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True},
        {},
    ),
    "qk_rms": ({"num_gqa_groups": 2}, {"qk_norm": QKNorm()}),
    "qk_layer": ({}, {"qk_norm": QKNorm("LayerNorm", before_rope=True)}),
    "qk_l2": ({}, {"qk_norm": QKNorm("L2Normalization"), "rotary_interleaved": True}),
}


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_a_plain_composition(case: str, rope: bool) -> None:
    keywords, options = CASES[case]
    ours = MultiheadAttention(HIDDEN, HEADS, options=AttentionOptions(**options), **keywords)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    interleaved = ours.options.rotary_interleaved
    freqs = None
    if rope:
        freqs = RotaryPositionEmbedding(ours.channels, interleaved=interleaved)(5)
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    got, expected = ours(x, rotary_pos_emb=freqs), composed(ours, x, freqs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)
    parameters = (x, *ours.parameters())
    pairs = zip(gradients(got, *parameters), gradients(expected, *parameters), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_formats_agree(kind: str) -> None:
    lengths, keys = [5, 3], [5, 3] if kind == "self" else [4, 6]
    x, memory = torch.randn(2, 5, HIDDEN), torch.randn(2, max(keys), HIDDEN)
    modules = {
        form: MultiheadAttention(
            HIDDEN,
            HEADS,
            attention_type=kind,
            attn_mask_type="padding_causal",
            qkv_format=form,
        )
        for form in ("bshd", "sbhd", "thd")
    }
    for module in modules.values():
        module.load_state_dict(modules["bshd"].state_dict())
    rope = RotaryPositionEmbedding(6)(6)
    cu = {"cu_seqlens_q": totals(lengths), "cu_seqlens_kv": totals(keys), "rotary_pos_emb": rope}

    def given(change) -> dict:
        return {"encoder_output": change(memory, keys)} if kind == "cross" else {}

    expected = modules["bshd"](x, **given(lambda t, n: t), **cu)
    second = modules["sbhd"](x.transpose(0, 1), **given(lambda t, n: t.transpose(0, 1)), **cu)
    torch.testing.assert_close(second.transpose(0, 1), expected, **CLOSE)
    third = modules["thd"](packed(x, lengths), **given(packed), **cu)
    torch.testing.assert_close(third, packed(expected, lengths), **CLOSE)


def test_its_state_dict() -> None:
    names = ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    ours = MultiheadAttention(HIDDEN, HEADS)
    assert [n for n in ours.state_dict() if "extra" not in n] == names
    assert [n for n, _ in ours.named_parameters()] == names
    separate = MultiheadAttention(HIDDEN, HEADS, options=AttentionOptions(fuse_qkv_params=False))
    children = [name for name, _ in separate.named_children()]
    assert children == ["core_attention", "query", "key", "value", "proj"]


def test_a_state_dict_of_torchs_that_does_not_fit_is_refused() -> None:
    state = nn.MultiheadAttention(HIDDEN, HEADS).state_dict()
    names = list(state)
    with pytest.raises(RuntimeError, match="in_proj_weight"):
        MultiheadAttention(HIDDEN, HEADS, num_gqa_groups=2).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected.*out_proj\.weight"):
        MultiheadAttention(HIDDEN, HEADS).load_state_dict(
            {**state, "proj.weight": state["out_proj.weight"]}
        )
    with pytest.raises(RuntimeError, match="bias_k"):
        MultiheadAttention(HIDDEN, HEADS).load_state_dict(
            nn.MultiheadAttention(HIDDEN, HEADS, add_bias_kv=True).state_dict()
        )
    assert list(state) == names


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_normed_input_is_normed_once_and_returned(kind: str, fused: bool) -> None:
    ours = MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_type=kind,
        attn_mask_type="no_mask",
        input_layernorm=True,
        return_layernorm_output=True,
        options=AttentionOptions(fuse_qkv_params=fused),
    )
    plain = MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_type=kind,
        attn_mask_type="no_mask",
        options=AttentionOptions(fuse_qkv_params=fused),
    )
    state = ours.state_dict()
    plain.load_state_dict(
        {k.replace("layernorm_", ""): v for k, v in state.items() if "norm.w" not in k},
        strict=False,
    )
    x = 3 * torch.randn(2, 5, HIDDEN) + 1
    given = {"encoder_output": torch.randn(2, 7, HIDDEN)} if kind == "cross" else {}
    got, y = ours(x, **given)
    torch.testing.assert_close(y, nn.functional.layer_norm(x, (HIDDEN,)), **CLOSE)
    torch.testing.assert_close(got, plain(y, **given), **CLOSE)


# ---- generation


@pytest.mark.parametrize("form", ["bshd", "sbhd"])
@pytest.mark.parametrize("case", ["gqa", "window", "qk_rms"])
def test_generation_with_kept_keys_equals_the_whole_forward(case: str, form: str) -> None:
    keywords, options = CASES[case]
    ours = MultiheadAttention(
        HIDDEN, HEADS, options=AttentionOptions(**options), qkv_format=form, **keywords
    )
    freqs = RotaryPositionEmbedding(ours.channels)(9)
    dim = 1 if form == "bshd" else 0
    x = torch.randn(*((2, 9) if form == "bshd" else (9, 2)), HIDDEN)
    with torch.no_grad():
        whole = ours(x, rotary_pos_emb=freqs)
        params = InferenceParams(3, 10)
        for _ in range(2):
            params.reset()
            parts = [
                ours(part, rotary_pos_emb=freqs, inference_params=params)
                for part in x.split([4, 1, 3, 1], dim)
            ]
            assert params.sequence_length == 9
            torch.testing.assert_close(torch.cat(parts, dim), whole, **CLOSE)
        with pytest.raises(qv.QuaverError, match=r"3 sequences of 10 tokens, but 2 of 18"):
            ours(x, rotary_pos_emb=RotaryPositionEmbedding(6)(20), inference_params=params)


def test_kept_keys_can_be_reordered_and_masked() -> None:
    ours = MultiheadAttention(HIDDEN, HEADS)
    x, new = torch.randn(2, 4, HIDDEN), torch.randn(2, 1, HIDDEN)
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    mask[0, ..., :2] = True
    order = torch.tensor([1, 0])
    with torch.inference_mode():
        params = InferenceParams(2, 5)
        ours(x, inference_params=params)
    with torch.no_grad():
        params.reorder(order)
        got = ours(new, mask, inference_params=params, attn_mask_type="arbitrary")
        whole = torch.cat((x[order], new), 1)
        full = torch.ones(5, 5, dtype=torch.bool).triu(1) | mask
        expected = ours(whole, full, attn_mask_type="arbitrary")
    torch.testing.assert_close(got, expected[:, -1:], **CLOSE)


def test_a_model_over_two_devices_keeps_keys_where_they_are_used(devices) -> None:
    layers = [MultiheadAttention(HIDDEN, HEADS) for _ in range(2)]
    split = [copy.deepcopy(m).to(d) for m, d in zip(layers, devices, strict=True)]
    whole = [copy.deepcopy(m).to(devices[0]) for m in layers]
    x = torch.randn(2, 6, HIDDEN)
    outputs = []
    with torch.no_grad():
        for model in (split, whole):
            params = InferenceParams(2, 6)
            for part in x.split([4, 1, 1], 1):
                y = part
                for layer in model:
                    y = layer(y.to(layer.proj.weight.device), inference_params=params)
            places = [cache.key.device for cache in params._caches.values()]
            assert places == [layer.proj.weight.device for layer in model]
            outputs.append(y.cpu())
    assert torch.equal(*outputs)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_type": "both"}, 'must be "self" or "cross"'),
        ({"num_attention_heads": 5}, "hidden_size must be a multiple of the 5 heads"),
        ({"normalization": "RMSNorm"}, "belong to input_layernorm=True"),
        ({"normalization": "L1", "input_layernorm": True}, '"LayerNorm" or "RMSNorm", not'),
        ({"num_gqa_groups": 3}, "divide the 4 heads"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, not 0"),
    ],
)
def test_options(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(HIDDEN, **({"num_attention_heads": HEADS} | options))


def test_calls() -> None:
    x = torch.randn(2, 5, HIDDEN)
    ours = MultiheadAttention(HIDDEN, HEADS)
    cross = MultiheadAttention(HIDDEN, HEADS, attention_type="cross")
    params = InferenceParams(2, 5)
    for module, given, message in (
        (ours, {"encoder_output": x}, "this is self; it was given"),
        (cross, {}, "this is cross; it was not given"),
        (cross, {"encoder_output": x, "inference_params": params}, "go with self attention"),
        (ours, {"inference_params": params, "attn_mask_type": "padding"}, "have one length"),
        (ours, {"rotary_pos_emb": RotaryPositionEmbedding(6)(4)}, "cover the 5 positions"),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            module(x, **given)
    with pytest.raises(ValueError, match=r"3 dimensions in the format bshd, not shape \(5, "):
        ours(x[0])
    with pytest.raises(qv.QuaverError, match="no gradient"):
        ours(x, inference_params=params)
    with pytest.raises(ValueError, match="one of LayerNorm, RMSNorm, L2Normalization, not 'L1'"):
        QKNorm("L1")
    with pytest.raises(ValueError, match="at least 1, not 0 and 4"):
        InferenceParams(0, 4)
