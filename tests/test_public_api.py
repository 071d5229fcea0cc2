"""The names and signatures that users write."""

import importlib
import inspect
import subprocess
import sys

import pytest

import quaver as qv

PACKAGES = (
    "quaver quaver.nn quaver.ops quaver.devices quaver.kernels quaver.tensors quaver.quantizers "
    "quaver.recipe quaver.scaling quaver.functional quaver.conversion quaver.checkpoint "
    "quaver.simulator quaver.testing"
).split()

SIGNATURES = {
    "autocast": "(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None)",
    "quantized_model_init": "(enabled=True, recipe=None, preserve_high_precision_init_val=False)",
    "Float8Quantizer": "(scale, amax, dtype, *, rowwise=True, columnwise=True)",
    "Linear": (
        "(in_features, out_features, bias=True, *, device=None, dtype=None, recipe=None, "
        "wgrad=None, init_method=None, return_bias=False)"
    ),
    "Linear.forward": "(self, x=None, is_first_microbatch=None, *, input=None)",
    "Linear.end_forward": "(self)",
    "RecipeState.create": "(recipe, *, mode, num_quantizers, device)",
    "get_module_device": "(module)",
    "is_fp8_available": "(return_reason=False)",
    "testing.simulated_devices": "(count=2)",
    "testing.launches": "()",
}


def resolve(path: str):
    owner = importlib.import_module("quaver.testing") if path.startswith("testing.") else qv
    for name in path.removeprefix("testing.").split("."):
        owner = getattr(owner, name)
    return owner


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    bare = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(resolve(path)).parameters.values()
    ]
    assert str(inspect.Signature(bare)) == SIGNATURES[path]


@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_package_promises_is_there_and_sorted(name: str) -> None:
    module = importlib.import_module(name)
    assert all(hasattr(module, each) for each in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


def test_the_names_of_the_readme() -> None:
    expected = {
        "autocast",
        "quantized_model_init",
        "recipe",
        "Linear",
        "ops",
        "nn",
        "Float8Quantizer",
        "Float8Tensor",
        "RecipeState",
        "convert",
        "convert_back",
        "Rule",
        "status",
        "optim",
        "Float8CurrentScalingQuantizer",
        "Float8BlockQuantizer",
        "MXFP8Quantizer",
        "NVFP4Quantizer",
        "IdentityQuantizer",
        "Float8BlockwiseTensor",
        "MXFP8Tensor",
        "NVFP4Tensor",
        "get_module_device",
        "is_fp8_available",
        "GroupedLinear",
        "Fp8Padding",
        "Fp8Unpadding",
        "moe_permute",
        "moe_unpermute",
        "parallel_cross_entropy",
        "RNGStatesTracker",
        "CudaRNGStatesTracker",
        "DotProductAttention",
        "MultiheadAttention",
        "TransformerLayer",
        "AttentionOptions",
        "LayerOptions",
        "QKNorm",
        "InferenceParams",
        "RotaryPositionEmbedding",
        "apply_rotary_pos_emb",
    }
    assert expected <= set(qv.__all__)
    assert qv.nn.Linear is qv.Linear
    for name in ("BasicLinear", "Linear", "Bias", "Sequential", "OperationFuser"):
        assert name in qv.ops.__all__
    for name in (
        *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"),
        *("NVFP4BlockScaling", "CustomRecipe", "Format", "Role"),
    ):
        assert name in qv.recipe.__all__


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (qv.DeviceMismatchError, RuntimeError),
        (qv.RecipeError, ValueError),
        (qv.CheckpointError, ValueError),
        (qv.SimulatorUnavailableError, RuntimeError),
    ],
)
def test_errors_can_be_caught_as_quavers_and_as_pythons(error, builtin) -> None:
    assert issubclass(error, qv.QuaverError)
    assert issubclass(error, builtin)


def test_importing_it_loads_nothing_that_is_optional_and_no_simulator() -> None:
    script = (
        "import sys, torch, torch._dynamo.comptime\n"
        "brought = set(sys.modules)\n"  # by torch, which loads Triton where there is one
        "import quaver, quaver.integrations\n"
        "found = [n for n in ('transformers', 'accelerate', 'peft', 'lightning', 'triton', 'typer')"
        " if n in sys.modules and n not in brought]\n"
        "print(found, hasattr(torch, 'sim'), quaver.testing.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[] False quaver.testing"
    with pytest.raises(AttributeError, match="no attribute 'tests'"):
        qv.tests  # noqa: B018
