"""Convert a checkpoint to FP8 on disk, and load it with transformers and with Quaver.

python examples/checkpoint_conversion.py [finegrained-fp8 | compressed-tensors | fbgemm-fp8]
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import quaver as qv
from quaver.checkpoint import CheckpointReport, LoadReport, convert_checkpoint, load_quantized
from quaver.examples.tiny_llama import batches, bits, small_llama


@dataclass
class Result:
    """What was done, and what a batch of text costs in bits per byte.

    Attributes:
        transformers: of the FP8 checkpoint as transformers loads it; None where it needs a GPU or
            another package for that.
    """

    converted: CheckpointReport
    loaded: LoadReport
    full: float
    quaver: float
    transformers: float | None = None


def run(format: str = "finegrained-fp8") -> Result:
    """Save a model, convert it, load the result, and read some text with it."""
    (ids,) = batches(1, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "fp8")
        small_llama().save_pretrained(source)  # in place of one from a hub
        full = AutoModelForCausalLM.from_pretrained(source)
        converted = convert_checkpoint(source, target, format=format)
        model = AutoModelForCausalLM.from_pretrained(source)
        qv.convert(model, qv.recipe.Float8BlockScaling())
        loaded = load_quantized(model, target)
        result = Result(converted, loaded, _cost(full, ids), _cost(model, ids))
        if format == "finegrained-fp8":
            result.transformers = _cost(AutoModelForCausalLM.from_pretrained(target), ids)
    return result


@torch.no_grad()
def _cost(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Bits per byte."""
    device = next(model.parameters()).device
    ids = ids.to(device)
    return bits(model(input_ids=ids, labels=ids).loss.item())


def main(format: str = "finegrained-fp8") -> None:
    """Print what became of the checkpoint, and how well it reads."""
    result = run(format)
    print(result.converted)
    print(result.loaded)
    print(f"full precision: {result.full:.4f} bits per byte")
    print(f"FP8, Quaver: {result.quaver:.4f}")
    if result.transformers is not None:
        print(f"FP8, transformers: {result.transformers:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
