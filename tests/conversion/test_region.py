"""A recipe given to `convert`: each call of the model is a region, and its hooks behave."""

import contextlib
import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import quaver as qv
from quaver.conversion import convert, convert_back
from quaver.recipe import DelayedScaling
from quaver.scaling import current_region
from quaver.testing import launches
from tests.conversion.models import Mlp, calibrate

RECIPE = DelayedScaling(amax_history_len=4)


def hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_pre_hooks)
        + len(module._forward_hooks)
        + len(module._forward_hooks_always_called)
        for module in model.modules()
    )


def updates(layer: nn.Module) -> int:
    return layer.recipe_states["forward"].updates


def test_each_call_is_in_fp8_and_finalized_once_at_its_exit():
    model = Mlp()
    convert(model, RECIPE)
    x = torch.randn(4, 16)
    for step in range(1, 4):
        with launches() as log:
            model(x * step)
        kernels = [launch.kernel for launch in log]
        assert kernels.count("scaled_mm") == 2
        assert kernels.index("scale_update") == len(kernels) - 1  # once, after all layers
        assert updates(model.fc1) == updates(model.fc2) == step
        assert current_region() is None
    history = model.fc1.recipe_states["forward"].amax_history[:, 0]
    assert torch.equal(history, torch.stack([(x * step).abs().max() for step in range(4)]))


def test_inference_without_calibration_warns_once_by_name():
    model = nn.ModuleDict({"encoder": Mlp()})["encoder"]
    convert(model, RECIPE)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="no scales yet in fc1, fc2"):
            model(torch.randn(4, 16))
        model(torch.randn(4, 16))


def test_autocast_around_the_call_has_the_last_word():
    model = Mlp()
    convert(model, RECIPE)
    x = torch.randn(4, 16)
    with launches() as log, qv.autocast(enabled=False):
        model(x)
    assert log == []
    with qv.autocast():
        model(x)
        assert updates(model.fc1) == 0
        model(x)
    assert updates(model.fc1) == 1
    assert model.fc1.recipe_states["forward"].recipe == RECIPE


def test_a_submodule_called_alone_is_its_own_region():
    model = nn.Sequential(Mlp(), Mlp())
    convert(model, RECIPE)
    with launches() as log:
        model[0].fc1(torch.randn(4, 16))
    assert [launch.kernel for launch in log].count("scaled_mm") == 1
    assert updates(model[0].fc1) == 1
    assert current_region() is None


class Failing(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fc1(x)
        raise self.error


def test_a_forward_that_raises_closes_the_region_and_finalizes():
    model = Failing()
    model.error = ValueError("user's own")
    convert(model, RECIPE)
    with pytest.raises(ValueError, match="user's own"):
        model(torch.randn(4, 16))
    assert current_region() is None
    assert updates(model.fc1) == 1


def fail(module: nn.Module, args: tuple) -> None:
    raise ValueError("hook")


def test_a_pre_hook_that_raises_leaves_no_region():
    model = Mlp()
    convert(model, RECIPE)

    for prepend in (False, True):
        handle = model.register_forward_pre_hook(fail, prepend=prepend)
        with pytest.raises(ValueError, match="hook"):
            model(torch.randn(4, 16))
        assert current_region() is None
        handle.remove()
    model(torch.randn(4, 16))
    assert updates(model.fc1) == 1


def call_fc1(module: nn.Module, args: tuple) -> None:
    module.fc1(args[0])


def test_a_users_hook_that_calls_a_layer_runs_inside_the_region():
    model = Mlp()
    model.register_forward_pre_hook(call_fc1)
    convert(model, RECIPE)
    model(torch.randn(1, 16))
    assert updates(model.fc1) == 1


class Forgiving(nn.Module):
    """Goes on when its part fails."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Mlp()
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.out(x)
        with contextlib.suppress(ValueError):
            self.part(x)
        return self.out(x)


def test_a_parts_failing_hook_does_not_close_the_models_region():
    model = Forgiving()
    convert(model.part, RECIPE)
    convert(model, RECIPE)
    model.part.register_forward_pre_hook(fail, prepend=True)
    model(torch.randn(4, 16))
    assert updates(model.out) == 1
    assert current_region() is None


def test_after_a_keyboard_interrupt_the_next_calls_are_finalized():
    model = Failing()
    model.error = KeyboardInterrupt()
    convert(model, RECIPE)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 16))
    model.__class__ = Mlp
    x = torch.randn(4, 16)
    before = updates(model.fc1)
    model(x)
    model(x)
    assert updates(model.fc1) >= before + 2
    assert current_region() is None


class Recursive(Mlp):
    """Calls itself once from inside."""

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        if again:
            self(x, again=False)
            assert current_region() is not None
            assert updates(self.fc1) == 0
        return super().forward(x)


def test_a_model_that_calls_itself_is_one_region():
    model = Recursive()
    convert(model, RECIPE)
    calibrated = RECIPE  # the state exists already, since the weight's scale is set
    assert model.fc1.recipe_states["forward"].recipe == calibrated
    model(torch.randn(4, 16))
    assert updates(model.fc1) == 1
    assert current_region() is None


def test_converting_twice_replaces_the_recipe_and_keeps_one_pair_of_hooks():
    model = Mlp()
    convert(model, RECIPE, include="fc1")
    once = hooks(model)
    other = DelayedScaling(margin=1)
    report = convert(model, other)
    assert hooks(model) == once == 3
    assert [layer.recipe for layer in report.converted] == [other, other]
    assert report.converted[0].class_before == "quaver Linear"
    assert model.fc1.recipe == model.fc2.recipe == other
    model(torch.randn(4, 16))
    assert updates(model.fc1) == updates(model.fc2) == 1
    convert(model)  # no recipe: the attached one stays
    assert model.fc1.recipe == other
    convert_back(model)
    assert hooks(model) == 0


def test_a_converted_part_inside_a_converted_model_is_one_region():
    model = nn.Sequential(Mlp(), nn.Linear(64, 4))
    inner, outer = DelayedScaling(margin=1), DelayedScaling()
    convert(model[0], inner)
    convert(model, outer, include="1")
    x = torch.randn(4, 16)
    with launches() as log:
        model(x)
    kernels = [launch.kernel for launch in log]
    assert kernels.count("scaled_mm") == 3
    assert "scale_update" not in kernels[: -kernels.count("scale_update")]
    assert updates(model[0].fc1) == updates(model[1]) == 1
    assert model[0].fc1.recipe_states["forward"].recipe == inner
    assert model[1].recipe_states["forward"].recipe == outer
    model[0](x)
    assert updates(model[0].fc1) == 2
    convert_back(model)
    assert hooks(model) == 0
    assert type(model[0].fc1) is nn.Linear


def reload_with_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def reload_with_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, reload_with_pickle, reload_with_torch])
@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_a_duplicate_runs_alike_learns_on_its_own_and_converts_back(duplicate, weights):
    model = Mlp()
    convert(model, RECIPE, weights=weights)
    x = torch.randn(4, 16)
    model(x)
    twin = duplicate(model)
    assert hooks(twin) == hooks(model) == 3
    assert type(twin.fc1) is qv.nn.Linear
    with launches() as log:
        out = twin(x)
    assert [launch.kernel for launch in log].count("scaled_mm") == 2
    assert torch.equal(out, model(x))
    twin(4 * x)
    assert updates(twin.fc1) == updates(model.fc1) + 1
    scales = [m.fc1.recipe_states["forward"].scale[0] for m in (twin, model)]
    assert scales[0] * 4 == scales[1]
    convert_back(twin)
    assert type(twin.fc1) is nn.Linear
    assert type(model.fc1) is qv.nn.Linear
    assert hooks(twin) == 0


def test_hooks_of_another_process_do_not_push_out_the_unpickled_ones(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4))
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    convert(model, RECIPE)
    model = reload_with_pickle(model)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in a process that begins
    for _ in range(4):
        model.register_forward_pre_hook(lambda module, args: None)
        model.register_forward_hook(lambda module, args, out: None)
    with launches() as log:
        model(torch.randn(2, 4))
    assert [launch.kernel for launch in log].count("scaled_mm") == 1
    assert updates(model[0]) == 1
    assert current_region() is None


def replicate(module: nn.Module) -> nn.Module:
    """As nn.DataParallel does for each device: a shallow copy, parameters as plain attributes."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = replicate(child)
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            setattr(replica, name, parameter.view_as(parameter))
    return replica


def run_in_thread(model: nn.Module, x: torch.Tensor) -> list:
    result = []

    def run() -> None:
        try:
            result.append(model(x))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result


def test_a_dataparallel_replica_runs_in_fp8_on_its_own_thread():
    model = Mlp()
    convert(model, RECIPE)
    x = torch.randn(4, 16)
    calibrate(model, x)
    with torch.no_grad():
        expected = model(x)
    with launches() as log:
        (out,) = run_in_thread(replicate(model), x)
    assert [launch.kernel for launch in log].count("scaled_mm") == 2
    assert torch.equal(out, expected)


def test_a_replica_without_a_recipe_raises_instead_of_running_without_fp8():
    model = Mlp()
    convert(model)
    with qv.autocast():
        (error,) = run_in_thread(replicate(model), torch.randn(4, 16))
    assert isinstance(error, qv.RecipeError)
    assert "attach a recipe with convert(model, recipe=...)" in str(error)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_converted_model_traces_whole_under_compile():
    model = Mlp()
    convert(model, RECIPE)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(3):
        x = torch.randn(4, 16)
        assert torch.equal(compiled(x), twin(x)), step
    for layer, other in ((model.fc1, twin.fc1), (model.fc2, twin.fc2)):
        for name in ("scale", "amax_history"):
            states = [getattr(m.recipe_states["forward"], name) for m in (layer, other)]
            assert torch.equal(*states)
