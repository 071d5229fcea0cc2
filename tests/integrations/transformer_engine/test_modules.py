"""The shim's modules: their signatures, and that they compute what Quaver's own do."""

import copy
import inspect
from types import ModuleType

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.testing import launches
from tests.integration.helpers import assert_guarded, assert_same, gradients, scaling
from tests.integration.recipes import RECIPES
from tests.samples import normal

Devices = list[torch.device]

SIGNATURES = {
    "Linear": "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
    "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype "
    "parallel_mode parameters_split device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad "
    "ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type "
    "save_original_input name",
    "Linear.forward": "self inp is_first_microbatch fp8_output fp8_grad",
    "LayerNormLinear": "in_features out_features eps sequence_parallel fuse_wgrad_accumulation "
    "tp_group tp_size get_rng_state_tracker init_method bias normalization return_bias "
    "params_dtype parallel_mode return_layernorm_output return_layernorm_output_gathered "
    "parameters_split zero_centered_gamma device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad "
    "ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute symmetric_ar_type name",
    "LayerNormMLP": "hidden_size ffn_hidden_size eps sequence_parallel return_bias "
    "get_rng_state_tracker tp_group tp_size init_method bias normalization activation "
    "activation_params output_layer_init_method fuse_wgrad_accumulation params_dtype "
    "return_layernorm_output return_layernorm_output_gathered seq_length micro_batch_size "
    "set_parallel_mode zero_centered_gamma device ub_overlap_ag name ub_overlap_rs "
    "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad delay_wgrad_compute symmetric_ar_type "
    "checkpoint",
    "DotProductAttention": "num_attention_heads kv_channels num_gqa_groups attention_dropout "
    "qkv_format attn_mask_type window_size sequence_parallel tp_size get_rng_state_tracker "
    "tp_group layer_number attention_type cp_group cp_global_ranks cp_stream cp_comm_type "
    "softmax_scale softmax_type return_max_logit device",
    "DotProductAttention.forward": "self query_layer key_layer value_layer attention_mask "
    "qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q "
    "max_seqlen_kv attn_mask_type window_size checkpoint_core_attention core_attention_bias_type "
    "core_attention_bias alibi_slopes fast_zero_fill inference_params pad_between_seqs fp8_output "
    "num_splits",
    "MultiheadAttention.forward": "self hidden_states attention_mask encoder_output "
    "attn_mask_type window_size is_first_microbatch checkpoint_core_attention inference_params "
    "rotary_pos_emb core_attention_bias_type core_attention_bias alibi_slopes cu_seqlens_q "
    "cu_seqlens_kv max_seqlen_q max_seqlen_kv fast_zero_fill pad_between_seqs",
    "LayerNormLinear.forward": "self inp is_first_microbatch fp8_output fp8_grad",
    "LayerNormMLP.forward": "self inp is_first_microbatch",
    "GroupedLinear.forward": "self inp m_splits is_first_microbatch",
    "checkpoint": "function args kwargs",
    "fp8_autocast": "enabled calibrating fp8_recipe fp8_group _graph",
    "autocast": "enabled calibrating recipe amax_reduction_group _graph",
    "fp8_model_init": "enabled recipe preserve_high_precision_init_val",
    "moe_permute": "inp routing_map num_out_tokens max_token_num map_type",
    "moe_unpermute": "inp row_id_map merging_probs restore_shape map_type probs",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(te: ModuleType, path: str) -> None:
    thing = te
    for name in path.split("."):
        thing = getattr(thing, name)
    assert " ".join(inspect.signature(thing).parameters) == SIGNATURES[path]


def made(te: ModuleType, kind: str, device, **options: object) -> nn.Module:
    if kind == "Linear":
        return te.Linear(24, 40, device=device, **options)
    if kind == "LayerNormLinear":
        return te.LayerNormLinear(24, 40, device=device, **options)
    if kind == "LayerNormMLP":
        return te.LayerNormMLP(24, 40, activation="swiglu", device=device, **options)
    return te.GroupedLinear(2, 24, 40, device=device, **options)


def native(kind: str, device) -> nn.Module:
    if kind == "Linear":
        return qv.Linear(24, 40, device=device)
    if kind == "LayerNormLinear":
        return qv.nn.LayerNormLinear(24, 40, device=device)
    if kind == "LayerNormMLP":
        return qv.nn.LayerNormMLP(24, 40, activation="swiglu", device=device)
    return qv.GroupedLinear(2, 24, 40, device=device)


def call(module: nn.Module, x: torch.Tensor, **options: object):
    if isinstance(module, qv.GroupedLinear):
        return module(x, [3, 5], **options)
    return module(x, **options)


KINDS = pytest.mark.parametrize(
    "kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"]
)


@KINDS
@pytest.mark.parametrize("recipe", [None, *(name for name in RECIPES if name != "custom")])
def test_they_compute_as_quavers_own(
    te: ModuleType, kind: str, recipe: str | None, devices: Devices
) -> None:
    device = devices[1]
    theirs, ours = made(te, kind, device), native(kind, device)
    ours.load_state_dict(theirs.state_dict())
    found = []
    with launches() as log:
        for module in (theirs, ours):
            results = {}
            for step in range(3):
                x = normal(8, 24, name=f"x{step}", device=device).requires_grad_()
                module.zero_grad()
                chosen = RECIPES[recipe] if recipe else None
                with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=chosen):
                    y = call(module, x)
                y.backward(normal(*y.shape, name="grad", device=device))
                results = {"y": y, "dx": x.grad, **gradients(module)}
            found.append({**results, **scaling(module)} if recipe else results)
    if recipe == "nvfp4":  # which draws by the module's name and class
        assert torch.equal(found[0]["y"], found[1]["y"])
    else:
        assert_same(found[0], found[1])
    if recipe:
        assert_guarded(log, [device])


@KINDS
def test_weights_are_drawn_as_scripts_expect(te: ModuleType, kind: str) -> None:
    module = made(te, kind, "cpu", params_dtype=torch.bfloat16)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        if "layer_norm" in name:
            continue
        if "bias" in name:
            assert not parameter.any()
        else:
            assert parameter.float().std().item() == pytest.approx(0.023, rel=0.15)
    filled = made(te, kind, "cpu", init_method=lambda weight: nn.init.constant_(weight, 3.0))
    weights = [p for n, p in filled.named_parameters() if "weight" in n and "layer_norm" not in n]
    assert (weights[0] == 3).all()


def test_weights_are_drawn_from_the_trackers_stream(te: ModuleType, devices: Devices) -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    tracker.add("experts", 6)
    weights = []
    for name in ("model-parallel-rng", "experts"):
        options = {"get_rng_state_tracker": lambda: tracker, "rng_tracker_name": name}
        weights.append(te.Linear(4, 4, device=devices[1], **options).weight)
        torch.manual_seed(5 if name != "experts" else 6)
        assert torch.equal(weights[-1], te.Linear(4, 4, device=devices[1]).weight)
    assert not torch.equal(*weights)


@KINDS
def test_the_bias_can_be_returned(te: ModuleType, kind: str) -> None:
    module = made(te, kind, "cpu", return_bias=True)
    plain = made(te, kind, "cpu")
    plain.load_state_dict(module.state_dict())
    for each in (module, plain):
        for name, parameter in each.named_parameters():
            if name.endswith("bias") or ("bias" in name and "layer_norm" not in name):
                nn.init.constant_(parameter, 2.0)
    x = normal(8, 24, name="x")
    for recipe in (None, RECIPES["current"]):
        with torch.no_grad(), te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y, bias = call(module, x)
            whole = call(plain, x)
        if kind == "GroupedLinear":
            y = torch.cat([part + b for part, b in zip(y.split([3, 5]), bias, strict=True)])
        else:
            y = y + bias
        torch.testing.assert_close(y, whole)


def test_without_a_bias_an_empty_one_is_returned(te: ModuleType) -> None:
    module = te.Linear(4, 4, bias=False, return_bias=True, device="cpu")
    y, bias = module(torch.randn(2, 4))
    assert (y.shape, bias.shape) == ((2, 4), (0,))


def test_where_parameters_are_made(te: ModuleType, devices: Devices) -> None:
    accelerator = torch.device(devices[0].type, torch.accelerator.current_device_index())
    for make in (lambda **o: te.Linear(4, 4, **o), lambda **o: te.LayerNorm(4, **o)):
        assert make().weight.device == accelerator
        assert make(device=devices[1]).weight.device == devices[1]
        assert make(device="meta").weight.is_meta
        with torch.device("meta"):
            assert make().weight.is_meta


def test_norms(te: ModuleType) -> None:
    x = normal(3, 16, name="x")
    for ours, options in ((te.LayerNorm, {}), (te.RMSNorm, {})):
        module = ours(16, eps=1e-3, params_dtype=torch.bfloat16, device="cpu", **options)
        assert module.weight.dtype == torch.bfloat16
        old = ours(hidden_size=16, eps=1e-3, zero_centered_gamma=True, device="cpu")
        assert not old.weight.any()
        torch.testing.assert_close(old(x), module.float()(x))
        with pytest.raises(qv.QuaverError, match="older name hidden_size"):
            ours()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Linear", {"ub_overlap_ag": True}),
        ("Linear", {"ub_name": "qkv"}),
        ("Linear", {"parameters_split": ("q", "k")}),
        ("LayerNormLinear", {"symmetric_ar_type": "two_shot"}),
        ("LayerNormMLP", {"ub_bulk_wgrad": True}),
        ("GroupedLinear", {"tp_size": 2}),
        ("Linear", {"tp_size": 2}),
    ],
)
def test_what_has_no_meaning_is_refused(te: ModuleType, kind: str, options: dict) -> None:
    with pytest.raises(qv.QuaverError, match=next(iter(options))):
        made(te, kind, "cpu", **options)
    with pytest.raises(qv.QuaverError, match="fp8_output"):
        te.Linear(4, 4, device="cpu")(torch.randn(2, 4), fp8_output=True)


def test_options_at_their_defaults_are_taken(te: ModuleType) -> None:
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"):
        cls = getattr(te, name)
        defaults = {
            key: parameter.default
            for key, parameter in inspect.signature(cls).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        sizes = (8, 8, 2) if name == "TransformerLayer" else (8, 8)
        cls(*sizes, **{**defaults, "device": "cpu", "sequence_parallel": True})


def test_a_deep_copy_keeps_what_the_original_knows(te: ModuleType) -> None:
    module = te.Linear(8, 8, device="cpu", init_method=lambda w: nn.init.constant_(w, 2.0))
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin.weight)
    twin.reset_parameters()
    assert (twin.weight == 2).all()
    twin.reset_parameters(defer_init=True)
