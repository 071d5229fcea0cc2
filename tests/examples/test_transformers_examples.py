"""The examples with transformers, accelerate and peft do what they say."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from quaver.examples import accelerate_training, device_map_inference, lora
from quaver.recipe import named_recipe
from quaver.testing import launches

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_inference_is_the_same_split_or_whole(recipe: str) -> None:
    result = device_map_inference.run(recipe)
    assert len({layer.device for layer in result.status.layers}) == 2
    assert len(result.status.layers) == 28
    assert torch.equal(result.split, result.whole)
    error = ((result.split - result.full).norm() / result.full.norm()).item()
    assert 0 < error < (0.5 if recipe == "nvfp4" else 0.1)


def test_training_with_accelerate_learns_as_full_precision_does() -> None:
    steps = 6
    full = accelerate_training.train(None, steps)
    with launches() as log:
        quantized = accelerate_training.train(named_recipe("current"), steps)
    assert [launch.kernel for launch in log].count("scaled_mm") == steps * 28 * 3
    assert quantized[-1] < quantized[0] - 1
    assert quantized[-1] == pytest.approx(full[-1], abs=0.1)


def test_adapters_learn_and_merge() -> None:
    result = lora.run("mxfp8", steps=6)
    assert result.losses[-1] < result.losses[0] - 0.2
    assert result.merged == pytest.approx(result.apart, abs=0.05)
    assert "adapter_model.safetensors" in result.files


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["device_map_inference", "accelerate_training", "lora", "checkpoint_conversion"]
)
def test_an_example_runs_in_under_a_minute(name: str) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - start < 60
    assert "bits per byte" in done.stdout or "bit for bit: True" in done.stdout
