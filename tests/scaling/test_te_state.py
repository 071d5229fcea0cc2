"""TransformerEngine's extra states: read from the forms it writes, and nothing else executed."""

import copy
import dataclasses
import enum
import io
import os
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

import quaver as qv
from quaver.recipe import DelayedScaling, Format
from quaver.scaling.extra_state import unpack, unpack_number

SIZES = {"forward": 3, "backward": 2}
LENGTH = 16


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in of TransformerEngine's recipes, under their names, to pickle with."""
    module = types.ModuleType("transformer_engine.common.recipe")

    class _FormatHelper(NamedTuple):
        max_fwd: float
        max_bwd: float

    class Format(enum.Enum):
        E4M3 = _FormatHelper(448, 448)
        E5M2 = _FormatHelper(57344, 57344)
        HYBRID = _FormatHelper(448, 57344)

    class _OverrideLinearPrecision(NamedTuple):
        fprop: bool = False
        dgrad: bool = False
        wgrad: bool = False

    @dataclasses.dataclass
    class DelayedScaling:
        margin: int = 0
        interval: int = -1
        fp8_format: Any = Format.HYBRID
        amax_history_len: int = 1024
        amax_compute_algo: Any = "max"
        override_linear_precision: Any = (False, False, False)
        scaling_factor_compute_algo: Any = None
        reduce_amax: bool = True
        fp8_dpa: bool = False
        fp8_mha: bool = False

    @dataclasses.dataclass
    class Float8CurrentScaling:
        use_power_2_scales: bool = False
        fp8_format: Any = Format.HYBRID

    for cls in (
        _FormatHelper,
        Format,
        _OverrideLinearPrecision,
        DelayedScaling,
        Float8CurrentScaling,
    ):
        cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(
        sys.modules, "transformer_engine.common", types.ModuleType("transformer_engine.common")
    )
    return module


def content(length: int = LENGTH, gemms: int = 1) -> dict[str, Any]:
    """What TransformerEngine 1.x saves; every value differs from every other."""
    state: dict[str, Any] = {}
    for suffix, n in (("fwd", 3 * gemms), ("bwd", 2 * gemms)):
        state[f"scale_{suffix}"] = torch.arange(n) * 1.5 + 2.0
        state[f"scale_inv_{suffix}"] = 1 / state[f"scale_{suffix}"]
        state[f"amax_history_{suffix}"] = torch.arange(length * n).reshape(length, n) / 8 + n
    state["extra_fp8_variables"] = {"num_gemms": gemms, "fp8_checkpoint": True, "tuple": (1, "a")}
    return state


def tensor(state: Any) -> torch.Tensor:
    """As TransformerEngine 2.x packs it."""
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def file(state: Any, zipped: bool = True) -> io.BytesIO:
    """As TransformerEngine 1.x packs it."""
    data = io.BytesIO()
    torch.save(state, data, _use_new_zipfile_serialization=zipped)
    return data


def raw(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


FORMS = {
    "2.x, a pickle in a tensor": tensor,
    "1.x, a zip file": file,
    "1.x, a file of the older form": lambda state: file(state, zipped=False),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_recipe", [False, True])
def test_each_form_is_read(te: types.ModuleType, form: str, with_recipe: bool) -> None:
    state = content()
    if with_recipe:
        state["recipe"] = te.DelayedScaling(
            margin=1,
            amax_history_len=LENGTH,
            override_linear_precision=te._OverrideLinearPrecision(),
        )
    restored = unpack(FORMS[form](state), SIZES, None)
    assert set(restored) == set(SIZES)
    for mode, suffix in (("forward", "fwd"), ("backward", "bwd")):
        assert torch.equal(restored[mode].scale, state[f"scale_{suffix}"])
        assert torch.equal(restored[mode].amax_history, state[f"amax_history_{suffix}"])
        assert restored[mode].device.type == "cpu"
        assert restored[mode].ready.all()
        assert not any(restored[mode].unset)
        margin = 1 if with_recipe else 0
        assert restored[mode].recipe == DelayedScaling(margin=margin, amax_history_len=LENGTH)


def test_the_recipe_is_mapped(te: types.ModuleType) -> None:
    recipe = te.DelayedScaling(
        fp8_format=te.Format.E4M3,
        amax_history_len=LENGTH,
        amax_compute_algo="most_recent",
        reduce_amax=False,
        fp8_dpa=True,
    )
    restored = unpack(tensor(content() | {"recipe": recipe}), SIZES, None)
    assert restored["backward"].recipe == DelayedScaling(
        fp8_format=Format.E4M3,
        amax_history_len=LENGTH,
        amax_compute_algo="most_recent",
        reduce_amax=False,
    )


@pytest.mark.parametrize("wanted", [1, 8, 1024])
def test_another_history_length_keeps_the_newest(wanted: int) -> None:
    state = content()
    recipe = DelayedScaling(amax_history_len=wanted)
    new = unpack(tensor(state), SIZES, recipe)["forward"].amax_history
    old = state["amax_history_fwd"]
    kept = min(wanted, LENGTH) - 1
    assert new.shape == (wanted, 3)
    assert torch.equal(new[0], old[0])
    assert torch.equal(new[wanted - kept :], old[LENGTH - kept :])


def test_another_margin_and_format_rescale(te: types.ModuleType) -> None:
    state = content() | {"recipe": te.DelayedScaling(margin=1, fp8_format=te.Format.E4M3)}
    recipe = DelayedScaling(amax_history_len=LENGTH)
    restored = unpack(tensor(state), SIZES, recipe)
    assert torch.equal(restored["forward"].scale, state["scale_fwd"] * 2)
    assert torch.equal(restored["backward"].scale, state["scale_bwd"] * (2 * 57344 / 448))


def test_what_was_never_updated_is_not_known() -> None:
    state = content()
    state["scale_fwd"][1] = 1.0
    state["amax_history_fwd"][:, 1] = 0
    assert unpack(tensor(state), SIZES, None)["forward"].unset == [False, True, False]


def test_slots_by_operand_become_slots_by_gemm() -> None:
    """GroupedLinear's of older versions; the slots of outputs and grad_inputs are never used."""
    inputs, weights, grads = [3.0, 4.0, 5.0], [13.0, 14.0, 15.0], [23.0, 24.0, 25.0]
    unused = [1.0] * 3
    by_operand, by_gemm = content(gemms=3), content(gemms=3)
    by_operand["scale_fwd"] = torch.tensor(inputs + weights + unused)
    by_operand["scale_bwd"] = torch.tensor(grads + unused)
    by_gemm["scale_fwd"] = torch.tensor([inputs, weights, unused]).t().flatten()
    by_gemm["scale_bwd"] = torch.tensor([grads, unused]).t().flatten()
    for state in (by_operand, by_gemm):
        for suffix in ("fwd", "bwd"):
            known = state[f"scale_{suffix}"] != 1
            state[f"amax_history_{suffix}"] = known * 448 / state[f"scale_{suffix}"].expand(4, -1)
    sizes = {"forward": 9, "backward": 6}
    one, two = (unpack(tensor(state), sizes, None) for state in (by_operand, by_gemm))
    for mode in sizes:
        assert torch.equal(one[mode].scale, two[mode].scale)
        assert torch.equal(one[mode].amax_history, two[mode].amax_history)
        assert one[mode].unset == two[mode].unset
    assert torch.equal(two["forward"].scale, by_gemm["scale_fwd"])


def test_no_state_is_none(te: types.ModuleType) -> None:
    for nothing in (tensor(None), file(None), torch.empty(0, dtype=torch.uint8)):
        assert unpack(nothing, SIZES, None) == {}
    current = {"recipe": te.Float8CurrentScaling(), "extra_fp8_variables": {}}
    assert unpack(tensor(current), SIZES, None) == {}


def test_the_number_of_a_forward_is_not_read_from_a_pickle() -> None:
    data = tensor(content())
    data[60:64] = torch.tensor([1, 0, 0, 0])  # where ours says that there is one
    assert unpack_number(data) is None


@pytest.mark.parametrize("form", [tensor, file])
def test_a_module_takes_it(form, devices: list[torch.device]) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    layer = qv.Linear(16, 16, device=devices[1], recipe=recipe)
    state = content(length=1024)
    layer.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if k != "_extra_state"}
        | {"_extra_state": form(state)}
    )
    forward = layer.recipe_states["forward"]
    assert forward.device == devices[1]
    assert torch.equal(forward.scale.cpu(), state["scale_fwd"])
    assert forward.amax_history.shape == (4, 3)
    x = torch.full((2, 16), 3.0, device=devices[1])
    with torch.no_grad():
        layer(x)
    assert torch.equal(layer.recipe_states["forward"].scale.cpu(), state["scale_fwd"])
    again = qv.Linear(16, 16, recipe=recipe)
    again.load_state_dict({k: v.cpu() for k, v in layer.state_dict().items()})  # now without pickle
    assert torch.equal(again.recipe_states["forward"].scale, state["scale_fwd"])


def without(name: str) -> dict[str, Any]:
    state = content()
    del state[name]
    return state


def changed(**values: Any) -> dict[str, Any]:
    return content() | values


WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "dict"),
    "no scale": (without("scale_fwd"), "scale_fwd"),
    "no history": (without("amax_history_bwd"), "amax_history_bwd"),
    "scale nan": (changed(scale_fwd=torch.tensor([1.0, torch.nan, 1.0])), "finite"),
    "scale negative": (changed(scale_bwd=torch.tensor([1.0, -1.0])), "positive"),
    "history nan": (changed(amax_history_fwd=torch.full((4, 3), torch.nan)), "NaN"),
    "history negative": (changed(amax_history_fwd=torch.full((4, 3), -1.0)), "negative"),
    "history empty": (changed(amax_history_fwd=torch.zeros(0, 3)), "entries"),
    "half precision": (changed(scale_fwd=torch.ones(3).half()), "float32"),
    "other slots": (content(gemms=2), r"\[3\]"),
    "a recipe of another kind": (changed(recipe="delayed"), "recipe"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_values_are_one_line(kind: str) -> None:
    state, says = WRONG[kind]
    with pytest.raises(qv.CheckpointError, match=says) as caught:
        unpack(tensor(state), SIZES, None)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_recipe_out_of_range_and_one_with_a_function_are_refused(te: types.ModuleType) -> None:
    for recipe, says in (
        (te.DelayedScaling(margin=10**6), "margin"),
        (te.DelayedScaling(fp8_format=te.Format.E5M2), "E4M3 or HYBRID"),
        (te.DelayedScaling(amax_compute_algo=torch._utils._rebuild_tensor_v2), "of its own"),
        (te.DelayedScaling(amax_compute_algo=os.getcwd), "posix.getcwd"),
    ):
        with pytest.raises(qv.CheckpointError, match=says):
            unpack(tensor(changed(recipe=recipe)), SIZES, None)


# ---- malice

FLAG = "QUAVER_TEST_EXECUTED"


class Calls:
    """Pickles as a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def nested_file(content: Any) -> Calls:
    """A storage's file, as torch pickles it, which holds `content` instead of a storage."""
    data = io.BytesIO()
    torch.save(content, data, _use_new_zipfile_serialization=False)
    return Calls(torch.storage._load_from_bytes, data.getvalue())


def deep_tuple_key() -> bytes:
    return pickle.dumps({})[:-1] + b")" + b"\x85" * 2_000_000 + b"NQs."


def op(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts)


def bomb() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(None))
        archive.writestr("archive/data/0", bytes(10_000_000))
    return data.getvalue()


def evil() -> dict[str, bytes]:
    set_flag = f"__import__('os').environ.__setitem__({FLAG!r}, '1')"
    ones = torch.ones(2)
    typed = torch.storage.TypedStorage(
        wrap_storage=ones.untyped_storage(), dtype=torch.float32, _internal=True
    )
    rebuild = torch._utils._rebuild_tensor_v2
    made = {
        "os.system": Calls(os.system, f"export {FLAG}=1"),
        "eval": Calls(eval, set_flag),
        "exec": Calls(exec, set_flag),
        "getattr": Calls(getattr, "", "join"),
        "import": Calls(__import__, "antigravity"),
        "nested eval": nested_file(Calls(eval, set_flag)),
        "nested load": nested_file(nested_file(ones)),
        "nested in a storage": Calls(torch.storage._load_from_bytes, "text"),
        "torch.load": Calls(torch.load, "/dev/zero"),
        "a huge view": Calls(rebuild, typed, 0, (1 << 40,), (0,), False, {}),
        "a view outside": Calls(rebuild, typed, 9, (1,), (1,), False, {}),
        "a partial": Calls(copy.copy, 1),
        "bytearray": bytearray(8),
    }
    found = {name: pickle.dumps(changed(extra_fp8_variables=value)) for name, value in made.items()}
    found |= {
        "eval in a zip file": file(Calls(eval, set_flag)).getvalue(),
        "eval in an old file": file(Calls(eval, set_flag), zipped=False).getvalue(),
        "INST": b"\x80\x02(S'" + set_flag.encode() + b"'\nibuiltins\neval\n.",
        "extension": op(b"\x82\x01."),
        "huge bytes": op(b"\x8e", struct.pack("<Q", 1 << 40), b"."),
        "huge bytearray": op(b"\x96", struct.pack("<Q", 1 << 40), b"."),
        "huge frame": op(b"\x95", struct.pack("<Q", 1 << 62), b"N."),
        "huge memo": op(b"Nr", struct.pack("<I", (1 << 32) - 1), b"."),
        "huge number": op(b"\x8b", struct.pack("<i", 1 << 30), b"."),
        "a tuple in a tuple in a tuple": deep_tuple_key(),
        "lists without end": op(b"]" * 200_000, b"."),
        "zip bomb": bomb(),
        "no zip": b"PK\x03\x04 and nothing",
        "cut": pickle.dumps(content())[:-40],
        "persistent": op(b"NQ."),
        "a tensor that grows": op(
            pickle.dumps(torch.zeros(0))[2:-1],
            b"(",
            pickle.dumps(torch.zeros(0))[2:-1],
            b"K\0\x8a\x05\0\0\0\0\x10\x85K\x01\x85tb.",  # its state: 2^36 values
        ),
        "sets a function's defaults": op(
            b"ctorch._utils\n_rebuild_tensor_v2\n", b"N}X\x0c\0\0\0__defaults__)s\x86b."
        ),
    }
    return found


EVIL = evil()


@pytest.mark.parametrize("kind", EVIL)
def test_malice_is_refused_and_nothing_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLAG, raising=False)
    for state in (raw(EVIL[kind]), io.BytesIO(EVIL[kind])):
        with pytest.raises(qv.CheckpointError) as caught:
            unpack(state, SIZES, None)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
    assert FLAG not in os.environ
    assert "antigravity" not in sys.modules


def test_the_malice_would_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show nothing."""
    monkeypatch.setenv(FLAG, "0")
    pickle.loads(EVIL["eval"])
    assert os.environ[FLAG] == "1"


def test_the_whole_model_s_amaxes_of_early_versions_are_passed_over() -> None:
    state = content()
    buffers = {f"FWD_AMAX_{i}": [torch.ones(3) for _ in range(100)] for i in range(4)}
    state["global_fp8_buffer"] = buffers
    state["global_fp8_state"] = {"FP8_AUTOCAST_COUNTER": 3, "FP8_ENABLED": False}
    assert torch.equal(unpack(file(state), SIZES, None)["forward"].scale, state["scale_fwd"])


def test_shared_and_cyclic_containers_are_harmless() -> None:
    state = content()
    ring: list[Any] = []
    ring.append(ring)
    state["extra_fp8_variables"] = {"ring": ring, "ordered": OrderedDict(a=1), "set": {1, 2}}
    assert set(unpack(tensor(state), SIZES, None)) == set(SIZES)
