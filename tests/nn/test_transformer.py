"""TransformerLayer beside torch's layers and plain compositions, in high precision."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from quaver.nn import RotaryPositionEmbedding
from quaver.nn.attention import AttentionOptions, InferenceParams
from quaver.nn.transformer import LayerOptions, TransformerLayer
from tests.nn.attention.oracle import gradients, packed, padding, totals

HIDDEN, FFN, HEADS = 24, 40, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def torchs(ours: TransformerLayer, norm_first: bool = True) -> nn.Module:
    """torch's layer, whose parameters ours is given."""
    decoder = ours.layer_type == "decoder"
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    twin = kind(HIDDEN, HEADS, FFN, 0.0, tanh_gelu, batch_first=True, norm_first=norm_first)
    for name, parameter in twin.named_parameters():
        if "norm" in name or "bias" in name:  # so that each one matters
            nn.init.normal_(parameter, 0.5, 0.3)
    assert ours.load_state_dict(twin.state_dict(), strict=True) == ([], [])
    return twin


def layer(**options) -> TransformerLayer:
    made = TransformerLayer(HIDDEN, FFN, HEADS, **(STILL | options))
    for name, parameter in made.named_parameters():
        if "norm" in name:  # so that gains and offsets matter
            nn.init.normal_(parameter, 0.5, 0.3)
    return made


def check(got: torch.Tensor, expected: torch.Tensor, pairs) -> None:
    torch.testing.assert_close(got, expected, **CLOSE)
    mine = gradients(got, *(left for left, _ in pairs))
    theirs = gradients(expected, *(right for _, right in pairs))
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding"])
def test_an_encoder_layer_computes_what_torchs_does(mask_type: str) -> None:
    ours = layer(self_attn_mask_type=mask_type)
    twin = torchs(ours)
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1) if mask_type == "causal" else None
    mask = padding([5, 3]) if mask_type == "padding" else None
    expected = twin(x, hidden, src_key_padding_mask=None if mask is None else mask[:, 0, 0])
    got = ours(x, mask)
    if mask is not None:  # what torch's computes for padding is another matter
        got, expected = packed(got, [5, 3]), packed(expected, [5, 3])
    pairs = [(x, x), (ours.layernorm_mlp.fc1_weight, twin.linear1.weight)]
    pairs.append((ours.self_attention.layernorm_qkv.layer_norm_weight, twin.norm1.weight))
    check(got, expected, pairs)


def test_a_decoder_layer_computes_what_torchs_does() -> None:
    ours = layer(layer_type="decoder")
    twin = torchs(ours)
    x, memory = (torch.randn(2, n, HIDDEN, requires_grad=True) for n in (5, 7))
    expected = twin(x, memory, torch.ones(5, 5, dtype=torch.bool).triu(1))
    got = ours(x, encoder_output=memory)
    pairs = [(x, x), (memory, memory)]
    pairs.append((ours.inter_attention.proj.weight, twin.multihead_attn.out_proj.weight))
    check(got, expected, pairs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_torchs_layer_that_norms_afterwards(layer_type: str, fused: bool) -> None:
    behind = LayerOptions(output_layernorm=True, apply_residual_connection_post_layernorm=True)
    attention = AttentionOptions(fuse_qkv_params=fused)
    ours = layer(layer_type=layer_type, options=behind, attention=attention)
    stack = nn.ModuleList([ours])  # names with a prefix
    twin = torchs(ours, norm_first=False)
    x, memory = (torch.randn(2, n, HIDDEN, requires_grad=True) for n in (5, 7))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if layer_type == "decoder":
        expected, got = twin(x, memory, hidden), ours(x, encoder_output=memory)
    else:
        expected, got = twin(x, hidden), ours(x)
    check(got, expected, [(x, x), (ours.layernorm.weight, list(twin.parameters())[-2])])
    again = layer(layer_type=layer_type, options=behind, attention=attention)
    wrapped = nn.ModuleList([again])
    wrapped.load_state_dict({f"0.{name}": value for name, value in twin.state_dict().items()})
    assert all(
        torch.equal(value, stack.state_dict()[n]) for n, value in wrapped.state_dict().items()
    )


def test_torchs_norms_must_be_as_many() -> None:
    state = nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN).state_dict()
    with pytest.raises(RuntimeError, match=r"inter_attention\.layernorm_query\.weight"):
        layer(layer_type="decoder").load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"norm3\.weight"):
        layer().load_state_dict(state | {"norm3.weight": state["norm2.weight"]})


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_formats_agree(layer_type: str) -> None:
    lengths, keys = [5, 3], [4, 6]
    x, memory = torch.randn(2, 5, HIDDEN), torch.randn(2, 6, HIDDEN)
    options = {"layer_type": layer_type, "self_attn_mask_type": "padding_causal"}
    if layer_type == "decoder":
        options["options"] = LayerOptions(enc_dec_attn_mask_type="padding")
    modules = {form: layer(attn_input_format=form, **options) for form in ("bshd", "sbhd", "thd")}
    for module in modules.values():
        module.load_state_dict(modules["bshd"].state_dict())
    decoder = layer_type == "decoder"
    cu = {
        "cu_seqlens_q": totals(lengths),
        "cu_seqlens_kv": totals(keys if decoder else lengths),
        "rotary_pos_emb": RotaryPositionEmbedding(6)(5),
    }

    def given(change) -> dict:
        return {"encoder_output": change(memory, keys)} if decoder else {}

    expected = modules["bshd"](x, **given(lambda t, n: t), **cu)
    second = modules["sbhd"](x.transpose(0, 1), **given(lambda t, n: t.transpose(0, 1)), **cu)
    torch.testing.assert_close(second.transpose(0, 1), expected, **CLOSE)
    third = modules["thd"](packed(x, lengths), **given(packed), **cu)
    torch.testing.assert_close(third, packed(expected, lengths), **CLOSE)
    longest = {"max_seqlen_q": 5, "max_seqlen_kv": 6}
    assert torch.equal(modules["thd"](packed(x, lengths), **given(packed), **cu, **longest), third)


def parts_of(ours: TransformerLayer, x: torch.Tensor):
    """Attention and MLP of an encoder as functions of any input, and their normed input."""
    own, mlp = ours.self_attention, ours.layernorm_mlp
    post = ours.options.apply_residual_connection_post_layernorm

    def norm(module: nn.Module, t: torch.Tensor) -> torch.Tensor:
        weight, bias = module.layer_norm_weight, module.layer_norm_bias
        return functional.layer_norm(t, (HIDDEN,), weight, bias)

    def attend(t: torch.Tensor) -> torch.Tensor:
        found = own(t)
        return found[0] if own.return_layernorm_output else found

    def feed(t: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(norm(mlp, t), mlp.fc1_weight, mlp.fc1_bias)
        return functional.linear(tanh_gelu(hidden), mlp.fc2_weight, mlp.fc2_bias)

    first = norm(own.layernorm_qkv, x) if post and own.input_layernorm else x
    return attend, feed, first, (lambda t: norm(mlp, t)) if post else (lambda t: t)


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("output", [False, True])
def test_where_the_norms_stand(post: bool, output: bool) -> None:
    ours = layer(
        options=LayerOptions(apply_residual_connection_post_layernorm=post, output_layernorm=output)
    )
    x = torch.randn(2, 5, HIDDEN)
    attend, feed, residual, second = parts_of(ours, x)
    y = residual + attend(x)
    y = second(y) + feed(y)
    if output:
        y = functional.layer_norm(y, (HIDDEN,), ours.layernorm.weight, ours.layernorm.bias)
        assert "layernorm.weight" in ours.state_dict()
        assert ours.self_attention.layernorm is None
    torch.testing.assert_close(ours(x), y, **CLOSE)


def test_attention_and_mlp_in_parallel() -> None:
    ours = layer(options=LayerOptions(parallel_attention_mlp=True))
    x = torch.randn(2, 5, HIDDEN)
    attend, feed, _, _ = parts_of(ours, x)
    torch.testing.assert_close(ours(x), x + attend(x) + feed(x), **CLOSE)


@pytest.mark.parametrize("form", ["bshd", "sbhd"])
def test_drop_path_leaves_parts_out_for_whole_sequences(form: str) -> None:
    ours = layer(attn_input_format=form, options=LayerOptions(drop_path_rate=0.5))
    batch = 0 if form == "bshd" else 1
    x = torch.randn(*((64, 3) if batch == 0 else (3, 64)), HIDDEN)
    part = ours.self_attention(x)
    ours.layernorm_mlp.fc2_weight.data.zero_()
    ours.layernorm_mlp.fc2_bias.data.zero_()
    y = ours.train()(x).transpose(0, batch)
    x, part = x.transpose(0, batch), part.transpose(0, batch)
    alone = (y == x).flatten(1).all(1)
    assert 15 < alone.sum() < 49
    torch.testing.assert_close(y[~alone], (x + 2 * part)[~alone], **CLOSE)
    eval_y = ours.eval()(x.transpose(0, batch)).transpose(0, batch)
    torch.testing.assert_close(eval_y, x + part, **CLOSE)


def test_dropout_is_on_what_is_added_and_in_training_only() -> None:
    ours = layer(hidden_dropout=0.5)
    x = torch.randn(2, 5, HIDDEN)
    ours.layernorm_mlp.fc2_weight.data.zero_()
    ours.layernorm_mlp.fc2_bias.data.zero_()
    part = ours.self_attention(x)
    y = ours.train()(x)
    kept = y != x
    assert 0.35 < kept.float().mean() < 0.65
    torch.testing.assert_close(y[kept], (x + 2 * part)[kept], **CLOSE)
    torch.testing.assert_close(ours.eval()(x), x + part, **CLOSE)


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_a_llama_like_layer_generates_as_it_computes(activation: str) -> None:
    model = nn.ModuleList(
        layer(
            num_gqa_groups=2,
            normalization="RMSNorm",
            activation=activation,
            bias=False,
            attention=AttentionOptions(fuse_qkv_params=i == 0),
        )
        for i in range(2)
    )
    freqs, x, params = RotaryPositionEmbedding(6)(8), torch.randn(2, 8, HIDDEN), None
    outputs = []
    with torch.no_grad():
        for sizes in ([8], [3, 1, 1, 2, 1]):
            params = InferenceParams(2, 8) if len(sizes) > 1 else None
            parts = []
            for part in x.split(sizes, 1):
                y = part
                for each in model:
                    y = each(y, rotary_pos_emb=freqs, inference_params=params)
                parts.append(y)
            outputs.append(torch.cat(parts, 1))
    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)


def test_meta_and_reset() -> None:
    ours = TransformerLayer(HIDDEN, FFN, HEADS, layer_type="decoder", device="meta")
    assert {p.device.type for p in ours.parameters()} == {"meta"}
    real = TransformerLayer(HIDDEN, FFN, HEADS, layer_type="decoder")
    ours.to_empty(device="cpu").load_state_dict(real.state_dict())
    x = torch.randn(2, 5, HIDDEN)
    given = {"encoder_output": x}
    assert torch.equal(ours.eval()(x, **given), real.eval()(x, **given))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layer(layer_type="both"), 'must be "encoder" or "decoder"'),
        (lambda: layer(hidden_dropout=1.0), "hidden_dropout must be from 0 to below 1"),
        (lambda: LayerOptions(drop_path_rate=-0.1), "drop_path_rate must be from 0"),
        (
            lambda: LayerOptions(
                parallel_attention_mlp=True, apply_residual_connection_post_layernorm=True
            ),
            "adds to the layer's own input",
        ),
        (
            lambda: layer(layer_type="decoder", options=LayerOptions(parallel_attention_mlp=True)),
            'needs layer_type="encoder"',
        ),
        (
            lambda: layer(attn_input_format="thd", options=LayerOptions(drop_path_rate=0.1)),
            "must be 0 in the format thd",
        ),
        (
            lambda: layer(options=LayerOptions(enc_dec_attn_mask_type="padding")),
            'needs layer_type="decoder"',
        ),
    ],
)
def test_options(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_calls() -> None:
    x = torch.randn(2, 5, HIDDEN)
    with pytest.raises(ValueError, match='need layer_type="decoder", not "encoder"'):
        layer()(x, encoder_output=x)
    with pytest.raises(ValueError, match="this is cross; it was not given"):
        layer(layer_type="decoder")(x)
    with pytest.raises(ValueError, match="normalization must be"):
        layer(normalization="L1")


def test_a_call_may_name_another_mask() -> None:
    layer = TransformerLayer(HIDDEN, FFN, HEADS, **STILL)
    x = torch.randn(2, 5, HIDDEN)
    other = TransformerLayer(HIDDEN, FFN, HEADS, self_attn_mask_type="no_mask", **STILL)
    other.load_state_dict(layer.state_dict())
    y = layer(x, self_attn_mask_type="no_mask")
    assert torch.equal(y, other(x))
    assert not torch.equal(y, layer(x))
    assert layer.self_attention.core_attention.attn_mask_type == "causal"
