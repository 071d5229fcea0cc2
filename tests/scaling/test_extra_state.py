"""Scaling states as bytes in a checkpoint."""

import io
import pickletools

import pytest
import torch

import quaver as qv
from quaver.recipe import DelayedScaling
from quaver.scaling.extra_state import pack, unpack
from quaver.scaling.state import RecipeState

SIZES = {"forward": 3, "backward": 2}
SAVED = ("scale", "ready", "amax_history")
HEADER, BODY = 16, 64  # words, bytes


def states(length: int = 4, device="cpu", **fields) -> dict[str, RecipeState]:
    """Both directions, a value of its own in every cell."""
    recipe = DelayedScaling(amax_history_len=length, **fields)
    made = {}
    for mode, n in SIZES.items():
        state = RecipeState.create(recipe, mode=mode, num_quantizers=n, device=device)
        state.scale.copy_(torch.arange(n) + 2.5)
        state.ready.copy_(torch.tensor([1.0, 0.0, 1.0])[:n])
        state.amax_history.copy_(torch.arange(length * n).reshape(length, n) / 7 + n)
        made[mode] = state
    return made


def packed(length: int = 4, **fields) -> torch.Tensor:
    return pack(states(length, **fields), SIZES, None)


def with_float(data: torch.Tensor, word: int, value: float) -> torch.Tensor:
    """`data` with the float32 `word` of its body replaced."""
    words = data.clone().view(torch.float32)
    words[HEADER + word] = value
    return words.view(torch.uint8)


def with_int(data: torch.Tensor, word: int, value: int) -> torch.Tensor:
    words = data.clone().view(torch.int32)
    words[word] = value
    return words.view(torch.uint8)


def test_it_is_flat_bytes_on_the_cpu_and_no_pickle(devices) -> None:
    data = pack(states(device=devices[1]), SIZES, None)
    assert (data.dtype, data.dim(), data.device.type) == (torch.uint8, 1, "cpu")
    with pytest.raises(ValueError, match=r"."):
        list(pickletools.genops(bytes(data.tolist())))


def test_its_size_does_not_depend_on_what_is_in_it() -> None:
    sizes = {packed(length).numel() for length in (1, 2, 16, 1024)}
    sizes.add(pack({}, SIZES, None).numel())
    assert len(sizes) == 1


@pytest.mark.parametrize("length", [1, 2, 4, 1024])
def test_everything_comes_back_on_the_cpu(devices, length: int) -> None:
    before = states(length, device=devices[1])
    after = unpack(pack(before, SIZES, None), SIZES, None)
    assert set(after) == set(SIZES)
    for mode, state in after.items():
        assert state.device.type == "cpu"
        assert state.mode == mode
        assert state.recipe == DelayedScaling(amax_history_len=length)
        for name in SAVED:
            assert torch.equal(getattr(state, name), getattr(before[mode], name).cpu()), name
        assert state.unset == [False, True, False][: SIZES[mode]]


def test_no_states_come_back_as_none() -> None:
    data = pack({}, SIZES, None)
    assert not data.any()
    assert unpack(data, SIZES, None) == {}


@pytest.mark.parametrize(("saved", "wanted"), [(4, 8), (8, 4), (4, 1), (1, 4), (3, 2)])
def test_another_length_keeps_row_0_and_the_newest(saved: int, wanted: int) -> None:
    before = states(saved)
    recipe = DelayedScaling(amax_history_len=wanted)
    after = unpack(pack(before, SIZES, None), SIZES, recipe)
    for mode, state in after.items():
        old, new = before[mode].amax_history, state.amax_history
        assert state.recipe is recipe
        assert new.shape == (wanted, SIZES[mode])
        assert torch.equal(new[0], old[0])
        kept = min(saved, wanted) - 1
        assert torch.equal(new[wanted - kept :], old[saved - kept :])
        assert new[1 : wanted - kept].count_nonzero().item() == 0


def test_a_longer_history_than_1024_is_kept_when_the_attached_recipe_asks_for_it() -> None:
    before = states(1500)
    recipe = DelayedScaling(amax_history_len=1500)
    data = pack(before, SIZES, recipe)
    assert data.numel() > packed().numel()
    assert data.numel() == pack({}, SIZES, recipe).numel()
    after = unpack(data, SIZES, recipe)
    assert torch.equal(after["forward"].amax_history, before["forward"].amax_history)
    shorter = unpack(data, SIZES, None)  # onto a module that has no recipe attached
    assert torch.equal(shorter["backward"].amax_history, before["backward"].amax_history)


def test_a_longer_history_under_no_attached_recipe_keeps_its_newest_1024() -> None:
    before = states(1500)
    after = unpack(pack(before, SIZES, None), SIZES, None)
    old, new = before["forward"].amax_history, after["forward"].amax_history
    assert new.shape == (1024, 3)
    assert torch.equal(new[0], old[0])
    assert torch.equal(new[1:], old[-1023:])


def test_it_loads_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save({"_extra_state": packed()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["_extra_state"]
    assert torch.equal(loaded, packed())


def test_it_may_lie_on_a_device_or_be_a_view(devices) -> None:
    data = torch.stack([packed(), packed()], 1)[:, 1].to(devices[1])
    after = unpack(data, SIZES, None)
    assert torch.equal(after["forward"].scale, states()["forward"].scale)
    assert after["forward"].device.type == "cpu"


def test_states_loaded_in_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        after = unpack(packed(), SIZES, DelayedScaling(amax_history_len=9))
    for state in after.values():
        for name in SAVED:
            assert not getattr(state, name).is_inference(), name


def corrupt(kind: str):
    data = packed()
    body = (data.numel() // 4) - HEADER
    forward = 3 * (2 + 1024)
    return {
        "pickle": lambda: torch.frombuffer(bytearray(b"\x80\x04]\x94."), dtype=torch.uint8),
        "cut in the header": lambda: data[:40],
        "cut at its end": lambda: data[:-1],
        "cut by a word": lambda: data[:-4],
        "too long": lambda: torch.cat([data, data[:4]]),
        "foreign": lambda: torch.randint(1, 255, (data.numel(),), dtype=torch.uint8),
        "another magic": lambda: with_int(data, 0, 7),
        "another version": lambda: with_int(data, 1, 2),
        "capacity 0": lambda: with_int(data, 2, 0),
        "negative capacity": lambda: with_int(data, 2, -1024),
        "huge capacity": lambda: with_int(data, 2, 2**31 - 1),
        "other slots": lambda: with_int(data, 3, 6),
        "length 0": lambda: with_int(data, 4, 0),
        "length beyond": lambda: with_int(data, 7, 5000),
        "half a pair": lambda: with_int(data, 5, 0),
        "scale nan": lambda: with_float(data, 1, torch.nan),
        "scale inf": lambda: with_float(data, 0, torch.inf),
        "scale 0": lambda: with_float(data, forward, 0.0),
        "scale negative": lambda: with_float(data, 2, -1.0),
        "ready nan": lambda: with_float(data, 3, torch.nan),
        "ready half": lambda: with_float(data, 4, 0.5),
        "history nan": lambda: with_float(data, 6, torch.nan),
        "history negative": lambda: with_float(data, body - 1, -0.5),
        "another dtype": lambda: data.to(torch.int32),
        "two dims": lambda: data.view(4, -1),
        "a dict": lambda: {"scale": torch.ones(3)},
        "None": lambda: None,
    }[kind]()


KINDS = (
    "pickle|cut in the header|cut at its end|cut by a word|too long|foreign|another magic|"
    "another version|capacity 0|negative capacity|huge capacity|other slots|length 0|"
    "length beyond|half a pair|scale nan|scale inf|scale 0|scale negative|ready nan|ready half|"
    "history nan|history negative|another dtype|two dims|a dict|None"
).split("|")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_with_it_is_said_in_one_line(kind: str) -> None:
    with pytest.raises(qv.CheckpointError) as caught:
        unpack(corrupt(kind), SIZES, None)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 300


def test_an_infinity_in_a_history_is_no_error() -> None:
    """An inf enters an amax, and a checkpoint may be written right then."""
    data = with_float(packed(), 6, torch.inf)
    assert unpack(data, SIZES, None)["forward"].amax_history[0, 0].item() == torch.inf


def test_a_state_of_another_module_does_not_fit() -> None:
    with pytest.raises(qv.CheckpointError, match="bytes"):
        unpack(packed(), {"forward": 6, "backward": 4}, None)
