"""Static input scales from a run over some text, in high precision."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quaver.errors import CheckpointError
from quaver.formats import E4M3, MAX

_LONGEST = 2048
_INSTALL = 'pip install "quaver[hf]"'


def calibrate_checkpoint(folder: str | Path, text: str, context: int = 512) -> dict[str, float]:
    """The input scale of each linear layer of a causal language model, by the layer's name.

    The model is loaded onto the CPU in its own dtype and reads the text in windows; the largest
    input that a layer meets becomes E4M3's largest value.

    Args:
        folder: a checkpoint of transformers that is not quantized, with its tokenizer.
        text: what the model reads.
        context: tokens in a window, 2 to 2048.

    Returns:
        By layer, the scale with which x ≈ payload * scale.

    Raises:
        CheckpointError: transformers, the model or its tokenizer cannot be loaded, the text is
            empty, or the model gave NaN or inf.
    """
    if not 2 <= context <= _LONGEST:
        raise CheckpointError(f"context must be from 2 to {_LONGEST} tokens, not {context}")
    model, tokens = _load(Path(folder), text)
    window = min(context, getattr(model.config, "max_position_embeddings", None) or context)
    largest: dict[str, torch.Tensor] = {}

    def observe(name: str, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen = args[0].detach().abs().amax().to(torch.float32)
        largest[name] = torch.maximum(largest[name], seen) if name in largest else seen

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(observe, name))
    with torch.no_grad():
        for part in tokens.split(window):
            model(input_ids=part[None], use_cache=False)
    scales = {name: (amax / MAX[E4M3]).item() for name, amax in largest.items()}
    odd = [name for name, scale in scales.items() if not 0 < scale < math.inf]
    if odd:
        raise CheckpointError(
            f"the inputs of {odd[0]} must be finite and not all zero, but the largest is "
            f"{scales[odd[0]] * MAX[E4M3]}; take another text, or convert without static scales"
        )
    return scales


def _load(folder: Path, text: str) -> tuple[Any, torch.Tensor]:
    """The model, in evaluation mode, and the text as token ids [n]."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise CheckpointError(f"calibration needs transformers: {_INSTALL}") from None
    try:
        # Code that lies in the folder is never run, nor asked about.
        options = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises whatever its parts raise
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"calibration needs a causal language model and its tokenizer, which transformers does "
            f"not load from {folder} ({type(error).__name__}: {said}); convert without --calibrate"
        ) from None
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError(
            f"{folder} is quantized; calibration needs the checkpoint in high precision"
        )
    tokens = tokenizer(text, return_tensors="pt").input_ids[0]
    if tokens.numel() == 0:
        raise CheckpointError("the text of a calibration must not be empty")
    return model.eval(), tokens
