"""LayerNormLinear and LayerNormMLP on a GPU within the bounds of the recorded values."""

import pytest
import torch

from tests.integration.test_golden_fused import (  # noqa: F401 - run here on a GPU
    golden,
    test_layernorm_linear,
    test_layernorm_mlp,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def devices() -> list[torch.device]:
    """A GPU, in place of the simulated devices."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return [torch.device("cuda", 0)] * 2
