"""One model measured three ways: full precision, FP8 on one device, FP8 split over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

import quaver as qv
from quaver.cli.demo.corpus import Corpus
from quaver.cli.demo.devices import reset_peak
from quaver.cli.demo.evaluate import Step, calibrate, compare_with, fingerprint, logits
from quaver.cli.demo.layers import layer_errors, record_outputs
from quaver.cli.demo.model import LanguageModel
from quaver.cli.demo.result import DemoResult, device_shares, weight_bytes
from quaver.cli.demo.split import dispatch
from quaver.cli.errors import CommandError
from quaver.recipe import DelayedScaling

Stage = Callable[[str, int], Step]
"""Opens a stage of so many steps; what it returns is called after each of them."""

LAYER_TOKENS = 128
"""Tokens for the layers' errors: all their full-precision outputs are held for these."""


def measure(
    language: LanguageModel,
    corpus: Corpus,
    places: Mapping[str, torch.device],
    recipe: DelayedScaling,
    stage: Stage,
) -> DemoResult:
    """Convert ``language.model`` to FP8 in place, split it as ``places`` says, and compare.

    The device of the first block runs the full-precision model and the unsplit FP8 model.
    Raises CommandError for a model without a layer for FP8.
    """
    devices = list(dict.fromkeys(places.values()))
    first, model = devices[0], language.model.to(devices[0])
    short = corpus.evaluation[0][:, :LAYER_TOKENS]
    count = len(corpus.evaluation)
    bytes_full = weight_bytes(model)

    step = stage(f"full precision on {first}", count + 1)
    reference = []
    for window in corpus.evaluation:
        reference.append(logits(model, window, first))
        step()
    recorded = record_outputs(model, short, first)
    step()

    conversion = qv.convert(model, recipe=recipe, weights="quantize")
    if not conversion.converted:
        raise CommandError(f"{language.name} has no layer that FP8 could take")
    calibration_step = stage("calibration", len(corpus.calibration))
    calibrate(model, corpus.calibration, recipe, first, calibration_step)
    step = stage(f"FP8 on {first}", count)
    comparison, unsplit = compare_with(model, corpus.evaluation, reference, first, step)
    del reference

    model = dispatch(model, places)
    for device in devices:
        reset_peak(device)
    step = stage(f"FP8 split over {' + '.join(map(str, devices))}", count + 1)
    split = []
    for window in corpus.evaluation:
        split.append(fingerprint(logits(model, window, first)))
        step()
    shares = device_shares(model, devices)
    errors = layer_errors(model, recorded, short, first)
    step()
    return DemoResult(
        comparison=comparison,
        split_equals_unsplit=split == unsplit,
        weight_bytes_full=bytes_full,
        weight_bytes_fp8=weight_bytes(model),
        devices=shares,
        layers=errors,
        conversion=conversion,
    )
