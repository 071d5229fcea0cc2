"""Logits, their fingerprints, and calibration."""

from pathlib import Path

import pytest
import torch

import quaver as qv
from quaver.cli.demo.evaluate import calibrate, compare_with, fingerprint, logits
from quaver.cli.demo.layers import quantized_layers
from quaver.cli.demo.model import load_model

CPU = torch.device("cpu")
IDS = torch.arange(40)[None]


def test_a_fingerprint_knows_every_bit() -> None:
    values = torch.linspace(-1, 1, 12).view(3, 4)
    changed = values.clone()
    changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(2.0))
    different = [
        changed,
        values.view(4, 3),
        values.view(torch.int32),
        values.double(),
        torch.where(values == values[0, 0], values, -values),
    ]
    assert fingerprint(values) == fingerprint(values.clone())
    assert fingerprint(values.t()) == fingerprint(values.t().contiguous())
    assert len({fingerprint(x) for x in [values, *different]}) == 6
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.zeros(0)) != fingerprint(torch.zeros(0, 1))


def test_calibration_sets_the_scales_from_the_amaxes(llama_folder: Path) -> None:
    recipe = qv.recipe.DelayedScaling()
    model = load_model(llama_folder).model
    qv.convert(model, recipe=recipe, weights="quantize")
    layer = model.get_submodule("model.layers.0.mlp.gate_proj")
    seen: list[float] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(float(args[0].abs().max())))
    full = logits(load_model(llama_folder).model, IDS, CPU)
    steps: list[int] = []
    calibrate(model, [IDS, IDS.flip(1)], recipe, CPU, lambda: steps.append(1))
    assert len(steps) == 2
    scale = layer.recipe_states["forward"].scale[0]
    assert float(scale) == pytest.approx(448 / max(seen), rel=1e-6)

    before = {
        n: m.recipe_states["forward"].scale.clone() for n, m in quantized_layers(model).items()
    }
    comparison, prints = compare_with(model, [IDS], [full], CPU, lambda: None)
    assert comparison.tokens == 39
    assert 0.0 < comparison.kl_mean < 0.1
    assert prints == [fingerprint(logits(model, IDS, CPU))]
    for name, module in quantized_layers(model).items():
        assert torch.equal(module.recipe_states["forward"].scale, before[name]), name
