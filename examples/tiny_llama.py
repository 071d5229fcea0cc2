"""What the examples with transformers share: a small Llama for bytes, some text, two devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quaver.errors import SimulatorUnavailableError
from quaver.examples.train_bytes import read_text
from quaver.testing import simulated_devices

CONTEXT = 64


def small_llama(seed: int = 0) -> LlamaForCausalLM:
    """A Llama with random weights for bytes as tokens, 200 thousand parameters, on the CPU."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def batches(steps: int, rows: int = 16, seed: int = 0) -> Iterator[torch.Tensor]:
    """``steps`` batches of bytes [rows, CONTEXT] from Python's own documentation."""
    text, _ = read_text()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (rows,), generator=generator)
        yield torch.stack([text[start : start + CONTEXT] for start in starts.tolist()])


def bits(nats: float) -> float:
    """A loss of transformers in bits per byte."""
    return nats / math.log(2)


def two_devices() -> list[torch.device]:
    """Two GPUs if there are two, else two simulated ones, else twice the CPU."""
    if torch.cuda.device_count() > 1:
        return [torch.device("cuda", i) for i in range(2)]
    try:
        return simulated_devices(2)
    except SimulatorUnavailableError:
        return [torch.device("cpu")] * 2
