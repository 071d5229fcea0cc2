"""The shim's functions, optimizer and attention: arguments as scripts pass them."""

from types import ModuleType

import pytest
import torch
from torch import nn

import quaver as qv
from tests.integration.helpers import assert_same, gradients
from tests.samples import normal

Devices = list[torch.device]


def run(te: ModuleType, module: nn.Module, call) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    module.zero_grad()
    x = normal(8, 16, name="x").requires_grad_()
    with te.fp8_autocast():
        y = call(x)
    y.sum().backward()
    return {"y": y.detach(), "dx": x.grad, **gradients(module)}


def test_checkpoint_in_its_forms(te: ModuleType) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(te.Linear(16, 16, device="cpu"), nn.Dropout(0.5))
    tracker = te.CudaRNGStatesTracker()
    forms = [
        lambda x: te.checkpoint(module, x),
        lambda x: te.checkpoint(module, x, use_reentrant=False),
        lambda x: te.checkpoint(module, x, tp_group=None, get_rng_state_tracker=lambda: tracker),
        lambda x: te.distributed.checkpoint(module, False, lambda: tracker, None, x),
    ]
    plain = nn.Sequential(te.Linear(16, 16, device="cpu"), nn.Dropout(0.5))
    plain.load_state_dict(module.state_dict())
    for form in forms:  # scales go on from one to the next, in both
        assert_same(run(te, module, form), run(te, plain, plain))
    with pytest.raises(qv.QuaverError, match="distribute_saved_activations=True"):
        te.checkpoint(module, torch.randn(2, 16), distribute_saved_activations=True)


def test_experts(te: ModuleType) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]] * 3, dtype=torch.int32)
    probs = torch.rand(6, 3)
    rows, row_map = te.moe_permute(x, mask, 9, 64, "mask")
    merged = te.moe_unpermute(rows, row_map, probs, x.shape, map_type="mask")
    torch.testing.assert_close(merged, x * (probs * mask).sum(1, keepdim=True))
    with pytest.warns(UserWarning, match="older name of merging_probs"):
        assert torch.equal(te.moe_unpermute(rows, row_map, probs=probs), merged)
    with pytest.raises(ValueError, match="restore_shape must be"):
        te.moe_unpermute(rows, row_map, restore_shape=(5, 4))
    index = torch.tensor([[0], [2], [1]] * 2, dtype=torch.int32)
    rows, row_map = te.moe_permute(x, index, map_type="index")
    assert torch.equal(rows, x[[0, 3, 2, 5, 1, 4]])
    y, p = te.moe_sort_chunks_by_index_with_probs(
        x, probs[:, 0], torch.tensor([2, 4]), torch.tensor([1, 0])
    )
    assert torch.equal(y, torch.cat((x[2:], x[:2])))
    assert torch.equal(p, torch.cat((probs[2:, 0], probs[:2, 0])))


def test_cross_entropy(te: ModuleType) -> None:
    logits, target = torch.randn(2, 3, 8), torch.randint(0, 8, (2, 3))
    loss = te.parallel_cross_entropy(logits, target, 0.1, True, None, -100, False)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(loss, expected)


def test_the_optimizer(te: ModuleType) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = te.optimizers.FusedAdam(
        [parameter], 0.1, (0.9, 0.95), 1e-8, 0.01, False, adam_w_mode=1, master_weights=True
    )
    parameter.grad = torch.ones(4)
    optimizer.step()
    twin = nn.Parameter(torch.ones(4))
    twin.grad = torch.ones(4)
    options = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01, "fused": True}
    torch.optim.AdamW([twin], **options).step()
    assert torch.equal(parameter, twin)
    for option in ({"amsgrad": True}, {"exp_avg_dtype": torch.uint8}, {"set_grad_none": False}):
        with pytest.raises(qv.QuaverError, match=next(iter(option))):
            te.optimizers.FusedAdam([parameter], **option)


def test_graphs_are_refused_where_there_are_none(te: ModuleType) -> None:
    module = te.Linear(4, 4, device="cpu")
    with pytest.raises(qv.QuaverError, match=r"use torch.compile"):
        te.make_graphed_callables(module, (torch.randn(2, 4),), fp8_enabled=True)
    with pytest.raises(qv.QuaverError, match=r"use torch.compile"):
        te.make_graphed_callables(module, (torch.randn(2, 4),), _order=[1])


def test_what_is_refused_unless_switched_off(te: ModuleType) -> None:
    context, sync = te.get_cpu_offload_context(enabled=False, num_layers=1)
    x = torch.ones(2)
    with context:
        assert sync(x) is x
    with pytest.raises(qv.QuaverError, match="save_on_cpu"):
        te.get_cpu_offload_context(enabled=True)
    te.module.destroy_ub()
    with pytest.raises(qv.QuaverError, match="no userbuffers"):
        te.initialize_ub([1, 2], 2)


def test_utilities(te: ModuleType, devices: Devices) -> None:
    from transformer_engine.pytorch import constants, utils

    assert utils.divide(6, 3) == 2
    with pytest.raises(ValueError, match="7 must be a multiple of 3"):
        utils.divide(7, 3)
    assert len(utils.get_device_compute_capability()) == 2
    assert constants.TE_DType[torch.bfloat16] == te.DType.kBFloat16
    assert utils.cast_if_needed(torch.ones(1), torch.float16).dtype == torch.float16
    x = torch.randn(2, 4, device=devices[1])
    assert te.distributed.gather_along_first_dim(x) == (x, None)
    assert te.distributed.reduce_scatter_along_first_dim(x) == (x, None)
    assert te.distributed.allreduce(x) == (x, None)
    assert te.distributed.get_distributed_world_size() == 1


# ---- attention


@pytest.mark.parametrize("checkpointed", [False, True])
def test_core_attention_is_sbhd_unless_told(te: ModuleType, checkpointed: bool, devices) -> None:
    attention = te.DotProductAttention(4, 8, num_gqa_groups=2, tp_group=None, layer_number=1)
    q, k, v = (normal(6, 3, heads, 8, name="x", device=devices[1]) for heads in (4, 2, 2))
    q.requires_grad_()
    out = attention(q, k, v, None, "sbhd", checkpoint_core_attention=checkpointed)
    expected = nn.functional.scaled_dot_product_attention(
        *(t.detach().cpu().permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.cpu(), expected.permute(2, 0, 1, 3).flatten(2))
    out.sum().backward()
    assert q.grad.device == devices[1]
    with pytest.raises(qv.QuaverError, match="was made with qkv_format='sbhd'"):
        attention(q, k, v, qkv_format="bshd")
    with pytest.raises(qv.QuaverError, match="cu_seqlens_q_padded"):
        attention(q, k, v, cu_seqlens_q_padded=torch.zeros(3))
    with pytest.raises(qv.QuaverError, match="cp_group"):
        te.DotProductAttention(4, 8, cp_group=object())


@pytest.mark.parametrize("options", [{}, {"layer_type": "decoder"}, {"output_layernorm": True}])
def test_a_layer_computes_as_quavers_own(te: ModuleType, options: dict, devices: Devices) -> None:
    from quaver.nn.attention import AttentionOptions
    from quaver.nn.transformer import LayerOptions, TransformerLayer

    layer = te.TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device=devices[1], **options
    )
    own = dict(options)
    parts = LayerOptions(output_layernorm=own.pop("output_layernorm", False))
    twin = TransformerLayer(
        32,
        64,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="sbhd",
        attention=AttentionOptions(fuse_qkv_params=False),
        options=parts,
        device=devices[1],
        **own,
    )
    twin.load_state_dict(layer.state_dict())
    x = normal(6, 2, 32, name="x", device=devices[1])
    inputs = {"encoder_output": 2 * x} if "layer_type" in options else {}
    results = []
    for module in (layer, twin):
        with te.fp8_autocast():
            y = module(x, **inputs)
        y.sum().backward()
        results.append({"y": y, **gradients(module)})
    assert_same(results[0], results[1])
    kinds = {type(m) for m in layer.modules() if isinstance(m, qv.nn.QuantizedModule)}
    assert kinds <= {te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.DotProductAttention}
    assert type(layer.self_attention) is te.MultiheadAttention
    assert layer.self_attention.proj.fp8_meta["scaling_fwd"].scale[0] != 1
    weight = layer.self_attention.proj.weight
    assert weight.detach().std().item() == pytest.approx(0.023, rel=0.2)
    assert not layer.layernorm_mlp.fc1_bias.any()


def test_initial_values_of_a_layer(te: ModuleType) -> None:
    layer = te.TransformerLayer(
        16,
        32,
        2,
        init_method=lambda w: nn.init.constant_(w, 1.0),
        output_layer_init_method=lambda w: nn.init.constant_(w, 2.0),
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        device="cpu",
    )
    assert (layer.self_attention.proj.weight == 2).all()
    assert (layer.layernorm_mlp.fc2_weight == 2).all()
    assert (layer.layernorm_mlp.fc1_weight == 1).all()
    (fused,) = (p for n, p in layer.named_parameters() if "qkv" in n and n.endswith(".weight"))
    assert fused.shape == (48, 16)
    assert (fused == 1).all()
    with pytest.raises(qv.QuaverError, match="qkv_weight_interleaved=False"):
        te.TransformerLayer(16, 32, 2, fuse_qkv_params=True)
    with pytest.raises(qv.QuaverError, match="return_bias=True"):
        te.MultiheadAttention(16, 2, return_bias=True)
    with pytest.raises(qv.QuaverError, match="ub_tp_comm_overlap"):
        te.TransformerLayer(16, 32, 2, ub_tp_comm_overlap=True)
