"""`scale_update` in Triton's interpreter."""

import pytest
import torch

from quaver.kernels import scale_update
from quaver.kernels.scale_update import triton as version
from tests.kernels.triton.per_tensor import check_scale_update

CPU = torch.device("cpu")


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 7, 1024])
def test_random_histories(length: int, algorithm: str, reduced: bool) -> None:
    for seed in range(2):
        check_scale_update(length, algorithm, reduced, CPU, seed)


@pytest.mark.parametrize("length", [3, 4, 9, 16])
def test_a_history_longer_than_a_program_moves_at_a_time(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "ROWS", 4)
    for seed in range(4):
        check_scale_update(length, "max", False, CPU, seed)


def test_on_another_device_than_the_current(devices) -> None:
    for device in devices:
        check_scale_update(4, "max", True, device)


def update(scales: list[torch.Tensor]) -> None:
    histories = [torch.full((2, s.shape[0]), 2.0, device=s.device) for s in scales]
    scale_update(histories, scales, [torch.zeros_like(s) for s in scales], None, 448.0, "max")


def test_tables_are_made_once_for_the_same_memory_and_do_not_pile_up(
    devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "TABLES", 3)
    scales = [torch.ones(3, device=devices[1])]
    states = [torch.full((2, 3), 2.0, device=devices[1])], scales, [torch.zeros_like(scales[0])]
    made = version._table(*states)
    assert made.device == devices[1]
    assert version._table(*states) is made
    states[2].append(states[2].pop().clone())
    assert version._table(*states) is not made, "another address"
    kept = [[torch.ones(1)] for _ in range(8)]
    for scales in kept:
        update(scales)
        assert scales[0].item() == 224.0
    assert len(version._tables.get(CPU)) <= 3
