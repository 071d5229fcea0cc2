"""enable and disable: what Python finds under the name."""

import importlib
import importlib.metadata
import importlib.util
import pickle
import sys
from types import ModuleType

import pytest
import torch

import quaver as qv
from quaver.integrations import transformer_engine as shim
from quaver.integrations.transformer_engine.table import MODULES


def test_nothing_is_found_before_and_after(te: ModuleType) -> None:
    assert shim.is_enabled()
    shim.enable()  # twice does no harm
    shim.disable()
    assert not shim.is_enabled()
    assert importlib.util.find_spec("transformer_engine") is None
    assert "transformer_engine.pytorch" not in sys.modules
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer-engine")


def test_a_distribution_of_the_name_is_found(te: ModuleType) -> None:
    for name in ("transformer-engine", "transformer_engine", "Transformer_Engine"):
        assert importlib.metadata.version(name) == shim.VERSION
    found = importlib.metadata.metadata("transformer-engine")
    assert found["Name"] == "transformer-engine"
    assert importlib.metadata.distribution("transformer-engine").files is None
    names = [d.metadata["Name"] for d in importlib.metadata.distributions()]
    assert names.count("transformer-engine") == 1
    assert "torch" in names


def test_each_module_is_there_and_belongs_to_its_parent(te: ModuleType) -> None:
    import transformer_engine

    assert transformer_engine.pytorch is te
    assert transformer_engine.__version__ == shim.VERSION
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__name__ == name
        parent, _, child = name.rpartition(".")
        if parent:
            assert getattr(sys.modules[parent], child) is module
    assert importlib.util.find_spec("transformer_engine.pytorch.nothing") is None


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "transformer_engine.pytorch",
            "Linear LayerNorm RMSNorm LayerNormLinear LayerNormMLP GroupedLinear Fp8Padding "
            "Fp8Unpadding DotProductAttention MultiheadAttention TransformerLayer InferenceParams "
            "RotaryPositionEmbedding autocast fp8_autocast fp8_model_init quantized_model_init "
            "is_fp8_available is_mxfp8_available is_fp8_block_scaling_available is_nvfp4_available "
            "checkpoint CudaRNGStatesTracker make_graphed_callables moe_permute moe_unpermute "
            "moe_permute_with_probs moe_sort_chunks_by_index parallel_cross_entropy DType ops "
            "optimizers Float8Tensor Float8Quantizer QuantizedTensor get_default_recipe",
        ),
        (
            "transformer_engine.common.recipe",
            "Recipe Format DelayedScaling Float8CurrentScaling Float8BlockScaling "
            "MXFP8BlockScaling NVFP4BlockScaling CustomRecipe MMParams QParams",
        ),
        ("transformer_engine.pytorch.fp8", "FP8GlobalStateManager check_mxfp8_support get_fp8_max"),
        ("transformer_engine.pytorch.quantization", "FP8GlobalStateManager autocast RecipeState"),
        ("transformer_engine.pytorch.float8_tensor", "Float8Tensor Float8Quantizer"),
        ("transformer_engine.pytorch.tensor.float8_tensor", "Float8Tensor"),
        ("transformer_engine.pytorch.quantized_tensor", "QuantizedTensor Quantizer"),
        ("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule get_workspace"),
        ("transformer_engine.pytorch.attention.rope", "RotaryPositionEmbedding"),
        ("transformer_engine.pytorch.distributed", "checkpoint CudaRNGStatesTracker allreduce"),
        ("transformer_engine.pytorch.graph", "make_graphed_callables"),
        ("transformer_engine.pytorch.utils", "get_device_compute_capability divide"),
        ("transformer_engine.pytorch.constants", "TE_DType AttnMaskTypes GemmParallelModes"),
        ("transformer_engine.pytorch.optimizers", "FusedAdam"),
        ("transformer_engine.pytorch.ops", "Sequential Linear BasicLinear Bias"),
        (
            "transformer_engine_torch",
            "DType FP8FwdTensors FP8BwdTensors NVTE_Bias_Type NVTE_Mask_Type NVTE_Softmax_Type "
            "NVTE_QKV_Format NVTE_QKV_Layout NVTE_Fused_Attn_Backend CommOverlapType "
            "CommOverlapAlgo",
        ),
    ],
)
def test_names(te: ModuleType, module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_objects_can_be_pickled_and_come_back_as_what_they_were(te: ModuleType) -> None:
    from transformer_engine.common.recipe import DelayedScaling

    module = te.Linear(8, 8, device="cpu")
    again = pickle.loads(pickle.dumps(module))
    assert type(again) is te.Linear
    assert torch.equal(again.weight, module.weight)
    assert pickle.loads(pickle.dumps(DelayedScaling(margin=1))) == DelayedScaling(margin=1)
    assert pickle.loads(pickle.dumps(te.DType.kBFloat16)) is te.DType.kBFloat16
    assert isinstance(module, torch.nn.Linear)
    assert isinstance(module, qv.Linear)


def test_enumerations_have_the_numbers_that_scripts_print_and_save(te: ModuleType) -> None:
    import transformer_engine_torch as tex

    for member, number in (
        (tex.DType.kFloat8E4M3, 7),
        (tex.FP8FwdTensors.GEMM2_INPUT, 3),
        (tex.FP8BwdTensors.GRAD_OUTPUT2, 2),
        (tex.NVTE_Bias_Type.NVTE_ALIBI, 3),
        (tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, 5),
        (tex.NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX, 2),
        (tex.NVTE_QKV_Format.NVTE_THD_2SBHD, 6),
        (tex.NVTE_QKV_Layout.NVTE_THD_THD_THD, 14),
        (tex.NVTE_QKV_Layout.NVTE_Paged_KV_THD_SBHD_SBHD, 24),
        (tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend, -1),
        (tex.CommOverlapType.AG, 1),
        (tex.CommOverlapAlgo.ATOMIC_GEMM_RS_P2P, 7),
    ):
        assert int(member) == number
        assert pickle.loads(pickle.dumps(member)) is member


def test_another_one_that_was_imported_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    with pytest.raises(RuntimeError, match="transformer_engine was imported already"):
        shim.enable()
    assert not shim.is_enabled()
