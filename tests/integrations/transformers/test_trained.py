"""Trained on two devices, saved there, and loaded elsewhere: the same bytes everywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model

import quaver as qv
from quaver.recipe import DelayedScaling
from tests.conversion.models import tokens
from tests.integration.helpers import assert_same, equal, scaling
from tests.integration.recipes import parts
from tests.integrations.transformers.folders import load, saved, split

Devices = list[torch.device]
EAGER = {"attn_implementation": "eager"}  # torch's fused attention rounds differently on a CPU


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids.to(model.model.embed_tokens.weight.device)).logits.cpu()


@pytest.mark.parametrize("weights", ["keep", "quantize"])
def test_two_steps_on_two_devices_then_anywhere(
    devices: Devices, tmp_path: Path, weights: str
) -> None:
    source = load(saved(tmp_path / "plain"), **EAGER)
    qv.convert(source, DelayedScaling())
    dispatch_model(source, split(devices))
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    ids = tokens()
    for _ in range(2):
        source(ids.to(devices[0]), labels=ids.to(devices[0])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    source.eval().save_pretrained(tmp_path / "trained")
    made = load(tmp_path / "trained", "delayed", weights, device_map=split(devices), **EAGER)
    assert_same(scaling(made), scaling(source))
    made.save_pretrained(tmp_path / "saved")
    expected = logits(made, ids)
    if weights == "keep":
        assert equal(expected, logits(source, ids))
    for places in ({"": devices[0]}, {"": "cpu"}, split(devices[::-1]), split([devices[1], "cpu"])):
        twin = load(tmp_path / "saved", device_map=places, **EAGER)
        assert_same(scaling(twin), scaling(source))
        for (name, mine), theirs in zip(made.named_parameters(), twin.parameters(), strict=True):
            if "cpu" in places.values() and theirs.device.type == "meta":
                continue  # offloaded
            if hasattr(mine, "parts"):
                assert_same(parts(mine), parts(theirs))
            else:
                assert equal(mine, theirs), name
        if devices[0].type != "cuda":
            assert equal(logits(twin, ids), expected)
        else:  # the bound of a layer is derived in tests/gpu/test_checkpoint_cuda.py
            assert (logits(twin, ids) - expected).abs().max() < 0.02 * expected.abs().max()
