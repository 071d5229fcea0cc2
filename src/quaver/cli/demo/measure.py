"""A model measured in full precision, then with a recipe on one device and split over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import quaver as qv
from quaver.cli.demo.corpus import Corpus
from quaver.cli.demo.devices import reset_peak
from quaver.cli.demo.evaluate import Step, calibrate, compare_with, fingerprint, logits
from quaver.cli.demo.layers import Recorded, layer_errors, record_outputs
from quaver.cli.demo.options import RECIPES
from quaver.cli.demo.result import DemoResult, device_shares, weight_bytes
from quaver.cli.demo.split import dispatch
from quaver.cli.errors import CommandError

Stage = Callable[[str, int], Step]
"""Opens a stage of so many steps; what it returns is called after each of them."""

LAYER_TOKENS = 128
"""Tokens for the layers' errors: all their full-precision outputs are held for these."""


@dataclass(frozen=True)
class Baseline:
    """What a model gives in full precision: logits by window, the layers' outputs, its bytes."""

    logits: Sequence[torch.Tensor]
    layers: Recorded
    weight_bytes: int


def measure_full(model: nn.Module, corpus: Corpus, first: torch.device, stage: Stage) -> Baseline:
    """Run ``model``, which is on ``first``, in full precision."""
    step = stage(f"full precision on {first}", len(corpus.evaluation) + 1)
    reference = []
    for window in corpus.evaluation:
        reference.append(logits(model, window, first))
        step()
    recorded = record_outputs(model, _short(corpus), first)
    step()
    return Baseline(reference, recorded, weight_bytes(model))


def measure(
    model: nn.Module,
    recipe: str,
    baseline: Baseline,
    corpus: Corpus,
    places: Mapping[str, torch.device],
    stage: Stage,
) -> DemoResult:
    """Convert ``model`` in place, split it as ``places`` says, and compare with full precision.

    ``recipe`` is one of RECIPES. The device of the first block runs the unsplit model. Raises
    CommandError for a model without a layer to convert.
    """
    devices = list(dict.fromkeys(places.values()))
    first, count, scheme = devices[0], len(corpus.evaluation), RECIPES[recipe]
    # Nothing is trained here, so that weights need no second copy for a backward pass.
    model = model.to(first).requires_grad_(False)
    conversion = qv.convert(model, recipe=scheme, weights="quantize")
    if not conversion.converted:
        raise CommandError("the model has no layer that could be quantized")
    if scheme.delayed():
        calibration_step = stage("calibration", len(corpus.calibration))
        calibrate(model, corpus.calibration, scheme, first, calibration_step)
    step = stage(f"{recipe} on {first}", count)
    windows = corpus.evaluation
    comparison, unsplit = compare_with(model, windows, baseline.logits, first, step)

    model = dispatch(model, places)
    for device in devices:
        reset_peak(device)
    where = f"split over {' + '.join(map(str, devices))}" if len(devices) > 1 else "not split"
    step = stage(f"{recipe} {where}", count + 1)
    split = []
    for window in windows:
        split.append(fingerprint(logits(model, window, first)))
        step()
    shares = device_shares(model, devices)
    errors = layer_errors(model, baseline.layers, _short(corpus), first)
    step()
    return DemoResult(
        recipe=recipe,
        comparison=comparison,
        split_equals_unsplit=split == unsplit,
        weight_bytes_full=baseline.weight_bytes,
        weight_bytes_fp8=weight_bytes(model),
        devices=shares,
        layers=errors,
        conversion=conversion,
    )


def _short(corpus: Corpus) -> torch.Tensor:
    return corpus.evaluation[0][:, :LAYER_TOKENS]
