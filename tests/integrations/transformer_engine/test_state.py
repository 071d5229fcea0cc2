"""Recipes, fp8_meta and FP8GlobalStateManager: what scripts read and write."""

from types import ModuleType

import pytest
import torch

import quaver as qv
from quaver.recipe import DelayedScaling as NativeDelayedScaling
from tests.samples import normal

Devices = list[torch.device]


def trained(te: ModuleType, device: torch.device | str = "cpu", **recipe: object):
    from transformer_engine.common.recipe import DelayedScaling

    module = te.Linear(16, 32, device=device)
    x = normal(8, 16, name="x", device=device)
    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=3, **recipe)):
        y = module(x)
    y.sum().backward()
    return module, x


# ---- recipes


def test_the_first_cast_takes_scale_one(te: ModuleType) -> None:
    from transformer_engine.common.recipe import DelayedScaling

    assert DelayedScaling().first_scale == "one"
    module = te.Linear(16, 32, device="cpu")
    x = 1e-3 * normal(8, 16, name="x")
    with torch.no_grad(), te.fp8_autocast():
        coarse = module(x)
    with torch.no_grad(), qv.autocast(recipe=NativeDelayedScaling()):
        fine = qv.Linear.forward_high_precision(module, x)
    weight = module.weight.detach().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    expected = x.to(torch.float8_e4m3fn).float() @ weight.t() + module.bias.detach()
    torch.testing.assert_close(coarse, expected)
    assert (coarse - fine).norm() > 0.05 * fine.norm()


def test_recipes_answer_what_they_are(te: ModuleType) -> None:
    from transformer_engine.common import recipe

    kinds = {
        recipe.DelayedScaling: ("delayed", "float8_per_tensor_scaling"),
        recipe.Float8CurrentScaling: ("float8_current_scaling", "float8_per_tensor_scaling"),
        recipe.Float8BlockScaling: ("float8_block_scaling",),
        recipe.MXFP8BlockScaling: ("mxfp8",),
        recipe.NVFP4BlockScaling: ("nvfp4",),
    }
    questions = {answer for answers in kinds.values() for answer in answers} | {"custom"}
    for cls, answers in kinds.items():
        made = cls()
        assert isinstance(made, recipe.Recipe)
        assert made == cls()
        assert {question for question in questions if getattr(made, question)()} == set(answers)
    assert recipe.CustomRecipe(lambda role: None).custom()
    with pytest.raises(qv.RecipeError, match="margin must be 0"):
        recipe.MXFP8BlockScaling(margin=1)


def test_options_that_recipes_do_not_have_are_taken_at_their_defaults(te: ModuleType) -> None:
    from transformer_engine.common import recipe

    default = recipe.MMParams(use_split_accumulator=False)
    made = recipe.Float8CurrentScaling(fp8_gemm_fprop=default, use_power_2_scales=True)
    assert made == recipe.Float8CurrentScaling(use_power_2_scales=True)
    assert recipe.DelayedScaling(backward_override=None) == recipe.DelayedScaling()
    recipe.NVFP4BlockScaling(fp8_format=recipe.Format.E4M3)
    with pytest.raises(qv.RecipeError, match=r"fp8_gemm_fprop must be MMParams.*=False"):
        recipe.Float8CurrentScaling(fp8_gemm_fprop=recipe.MMParams(True))
    with pytest.raises(qv.RecipeError, match="backward_override must be None, not 'dequantized'"):
        recipe.DelayedScaling(backward_override="dequantized")


def test_formats_know_their_largest_values(te: ModuleType) -> None:
    from transformer_engine.common.recipe import Format
    from transformer_engine.pytorch.fp8 import get_fp8_max, get_fp8_te_dtype, get_fp8_torch_dtype
    from transformer_engine_torch import DType

    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    recipe = te.get_default_recipe()
    assert isinstance(recipe, NativeDelayedScaling)
    assert (get_fp8_max(recipe), get_fp8_max(recipe, fprop_tensor=False)) == (448, 57344)
    assert get_fp8_torch_dtype(recipe, False) == torch.float8_e5m2
    assert get_fp8_te_dtype(recipe) == DType.kFloat8E4M3 == 7


# ---- fp8_meta


def test_it_is_a_view_of_the_states(te: ModuleType, devices: Devices) -> None:
    from transformer_engine_torch import FP8FwdTensors

    module, x = trained(te, devices[1])
    forward = module.recipe_states["forward"]
    meta = module.fp8_meta["scaling_fwd"]
    assert meta.scale is forward.scale
    assert meta.amax_history is forward.amax_history
    amax = meta.amax_history[-1, FP8FwdTensors.GEMM1_INPUT]
    assert amax == x.abs().max()
    torch.testing.assert_close(meta.scale_inv, 1 / forward.scale)
    assert (meta.num_quantizers, meta.dtype) == (3, te.DType.kFloat8E4M3)
    backward = module.fp8_meta["scaling_bwd"]
    assert backward.scale is module.recipe_states["backward"].scale
    assert backward.dtype == te.DType.kFloat8E5M2
    assert module.fp8_meta["recipe"] == forward.recipe
    assert module.fp8_meta["num_gemms"] == 1
    assert list(module.fp8_meta)[:2] == ["scaling_fwd", "scaling_bwd"]


def test_what_is_written_is_used_and_stays_on_the_modules_device(
    te: ModuleType, devices: Devices
) -> None:
    module, x = trained(te, devices[1])
    meta = module.fp8_meta["scaling_fwd"]
    meta.scale = torch.tensor([2.0, 4.0, 1.0])  # from the CPU
    assert meta.scale.device == devices[1]
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=module.fp8_meta["recipe"]):
        y = module(x)

    def cast(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return (tensor.detach() * scale).to(torch.float8_e4m3fn).float() / scale

    expected = cast(x, 2.0) @ cast(module.weight, 4.0).t() + module.bias.detach()
    torch.testing.assert_close(y, expected)
    meta.scale.fill_(3.0)
    assert module.recipe_states["forward"].scale.tolist() == [3, 3, 3]
    other, _ = trained(te)
    module.fp8_meta["scaling_bwd"] = other.fp8_meta["scaling_bwd"]
    assert torch.equal(
        module.recipe_states["backward"].scale.cpu(), other.recipe_states["backward"].scale
    )
    assert module.recipe_states["backward"].device == devices[1]


def test_states_are_made_when_they_are_asked_for(te: ModuleType, devices: Devices) -> None:
    module = te.Linear(16, 32, device=devices[1])
    assert "scaling_fwd" not in module.fp8_meta
    assert not module.fp8_initialized
    module.fp8_meta["scaling_fwd"].scale[0].fill_(2.0)
    assert module.recipe_states["forward"].device == devices[1]
    assert module.fp8_initialized
    module.fp8_meta["note"] = 7
    assert module.fp8_meta["note"] == 7
    del module.fp8_meta["note"]
    with pytest.raises(KeyError):
        module.fp8_meta["note"]
    module.reset_fp8_meta_tensors()
    assert module.recipe_states == {}
    assert module.fp8_meta["scaling_fwd"].scale.tolist() == [1, 1, 1]


def test_recipes_without_scales_say_so(te: ModuleType) -> None:
    module = te.Linear(16, 32, device="cpu")
    with te.autocast(recipe=te.fp8.MXFP8BlockScaling()):
        module(torch.randn(4, 16))
    with pytest.raises(AttributeError, match="the state of MXFP8BlockScaling has no scales"):
        _ = module.fp8_meta["scaling_fwd"].scale


def test_quantized_weights(te: ModuleType) -> None:
    with te.fp8_model_init(enabled=True, preserve_high_precision_init_val=True):
        assert te.fp8.FP8GlobalStateManager.with_fp8_parameters()
        assert te.fp8.FP8GlobalStateManager.with_high_precision_init_val()
        module = te.Linear(16, 32, device="cpu")
    assert isinstance(module.weight, te.Float8Tensor)
    assert module.primary_weights_in_fp8
    assert module.weight.get_high_precision_init_val().std() < 0.03
    assert not te.fp8.FP8GlobalStateManager.with_fp8_parameters()


# ---- the manager


def test_its_questions_are_answered_from_the_region(te: ModuleType) -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager

    module = te.Linear(4, 4, device="cpu")
    assert not Manager.is_fp8_enabled()
    assert not module.fp8
    with te.autocast(recipe=Float8CurrentScaling()):
        assert Manager.is_fp8_enabled()
        assert module.fp8
        assert Manager.get_fp8_recipe() == Float8CurrentScaling()
        assert [Manager.is_first_fp8_module() for _ in range(3)] == [True, False, False]
        with te.fp8_autocast(enabled=False, calibrating=True):
            assert not Manager.is_fp8_enabled()
            assert Manager.is_fp8_calibration()
            assert module.fp8_calibration
    Manager.autocast_enter(enabled=True, fp8_recipe=Float8CurrentScaling())
    assert Manager.is_fp8_enabled()
    Manager.autocast_exit(True, False)
    assert not Manager.is_fp8_enabled()
    for available in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        assert getattr(Manager, f"is_{available}_available")() == (True, "")
        assert getattr(te, f"is_{available}_available")(return_reason=True) == (True, "")
        assert getattr(te, f"is_{available}_available")()
    key = Manager.get_key_in_buffer(False, Float8CurrentScaling(), None)
    assert Manager.split_key_in_buffer(key)[0] is False
    assert Manager.get_meta_tensor_key(False) == "scaling_bwd"
    with pytest.raises(qv.QuaverError, match="is_first_microbatch=False"):
        Manager.set_skip_fp8_weight_update_tensor(True)


def test_what_scripts_tell_it_changes_nothing(te: ModuleType) -> None:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager

    module, _ = trained(te)
    before = {m: s.scale.clone() for m, s in module.recipe_states.items()}
    Manager.reset()
    Manager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
    Manager.copy_forward_fp8_meta_tensors_for_recompute(module.fp8_meta)
    Manager.reduce_and_update_fp8_tensors(forward=True)
    Manager.reduce_and_update_fp8_tensors(forward=False)
    for mode, scale in before.items():
        assert torch.equal(module.recipe_states[mode].scale, scale)


def test_autocast_without_a_recipe_has_the_shims(te: ModuleType) -> None:
    module = te.Linear(16, 32, device="cpu")
    with te.fp8_autocast():
        module(torch.randn(4, 16))
    recipe = module.recipe_states["forward"].recipe
    assert recipe == te.get_default_recipe()
    assert recipe.first_scale == "one"
    with pytest.raises(qv.QuaverError, match="_graph"):
        te.autocast(_graph=True)
