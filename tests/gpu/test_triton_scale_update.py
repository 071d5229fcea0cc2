"""`scale_update` on a GPU, bit for bit against the CPU's reference."""

import pytest
import torch

from quaver.kernels import scale_update
from tests.kernels.triton.per_tensor import check_scale_update

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 7, 1024, 1025, 5000])
def test_random_histories(cuda, length: int, algorithm: str, reduced: bool) -> None:
    for seed in range(10):
        check_scale_update(length, algorithm, reduced, cuda, seed)


def test_many_states_again_and_again(cuda) -> None:
    """Rows are moved in place by many threads: a race would show in some of these."""
    states = [
        [torch.rand(1024, 3) for _ in range(300)],
        [torch.ones(3) for _ in range(300)],
        [torch.zeros(3) for _ in range(300)],
    ]
    there = [[t.to(cuda) for t in group] for group in states]
    for step in range(1, 6):
        for here, far in zip(states[0], there[0], strict=True):
            here[0] = far[0] = float(step)
        scale_update(*states, None, 448.0, "max")
        scale_update(*there, None, 448.0, "max")
        for group, other in zip(states, there, strict=True):
            assert all(torch.equal(a, b.cpu()) for a, b in zip(group, other, strict=True))
