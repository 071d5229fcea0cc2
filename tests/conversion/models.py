"""Small models for the tests of the conversion, random but fixed by the test's seed."""

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import quaver as qv

VOCABULARY = 64


class Mlp(nn.Module):
    """Two layers and an output layer: fc1, fc2, lm_head."""

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 2 * features)
        self.fc2 = nn.Linear(2 * features, features)
        self.lm_head = nn.Linear(features, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.fc2(torch.relu(self.fc1(x))))


def tiny_llama(layers: int = 2, *, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def tiny_gpt2(layers: int = 2) -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=32)
    return GPT2LMHeadModel(config).eval()


def tokens(rows: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, length))


def calibrate(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """One pass that makes the scales known, so that inference does not warn."""
    with torch.no_grad(), qv.autocast(enabled=False, calibrating=True):
        model(*args, **kwargs)
