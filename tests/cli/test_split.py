"""Where the parts of a model go."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from quaver.cli.demo.devices import start_devices
from quaver.cli.demo.split import dispatch, place
from quaver.cli.errors import CommandError


@pytest.fixture(scope="module")
def pair() -> list[torch.device]:
    return start_devices(["sim:0", "sim:1"])


def llama(*, tied: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def names(places: dict[str, torch.device], device: torch.device) -> set[str]:
    return {name for name, place in places.items() if place == device}


def test_blocks_are_dealt_out_in_equal_runs(pair: list[torch.device]) -> None:
    places = place(llama(tied=False), pair)
    first = {f"model.layers.{i}" for i in range(3)} | {"model.embed_tokens", "model.rotary_emb"}
    assert names(places, pair[0]) == first
    assert names(places, pair[1]) == {"model.layers.3", "model.layers.4", "model.norm", "lm_head"}


def test_a_tied_head_stays_with_its_embedding(pair: list[torch.device]) -> None:
    places = place(llama(tied=True), pair)
    assert places["lm_head"] == places["model.embed_tokens"] == pair[0]
    assert places["model.norm"] == pair[1]


def test_every_model_has_its_own_names(pair: list[torch.device]) -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    places = place(GPT2LMHeadModel(config), pair)
    assert names(places, pair[1]) == {"transformer.h.1", "transformer.ln_f"}
    assert {"transformer.wte", "transformer.wpe", "transformer.h.0", "lm_head"} <= names(
        places, pair[0]
    )


def test_parameters_of_the_parents_have_a_place(pair: list[torch.device]) -> None:
    model = nn.Module()
    model.body = nn.Module()
    model.body.scale = nn.Parameter(torch.ones(1))
    model.body.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model.small = nn.ModuleList([nn.Linear(1, 1)])
    places = place(model, pair)
    assert places["body.scale"] == pair[0]
    assert names(places, pair[1]) == {"body.blocks.1", "small"}


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])])
def test_too_few_blocks_are_refused(model: nn.Module, pair: list[torch.device]) -> None:
    with pytest.raises(CommandError, match=r"the model has [01] blocks; it cannot be split over 2"):
        place(model, pair)


@pytest.mark.parametrize("tied", [True, False])
def test_dispatch_puts_everything_in_its_place_and_changes_no_bit(
    tied: bool, pair: list[torch.device]
) -> None:
    torch.manual_seed(5)
    model = llama(tied=tied)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        model.to(pair[0])
        whole = model(input_ids=ids.to(pair[0])).logits.cpu()
        places = place(model, pair)
        model = dispatch(model, places)
        split = model(input_ids=ids.to(pair[0])).logits
    assert split.device == pair[0]
    assert torch.equal(split.cpu(), whole)
    for name, parameter in model.named_parameters():
        wanted = [device for part, device in places.items() if name.startswith(f"{part}.")]
        assert [parameter.device] == wanted, name


def test_the_cpu_runs_its_own_half(pair: list[torch.device]) -> None:
    model = llama(tied=True)
    seen = []
    last = model.get_submodule("model.layers.4.mlp.down_proj")
    last.register_forward_hook(lambda module, args, output: seen.append(output.device))
    model = dispatch(model, place(model, [pair[1], torch.device("cpu")]))
    with torch.no_grad():
        model(input_ids=torch.arange(12)[None])
    assert seen == [torch.device("cpu")]
    assert last.weight.device == torch.device("cpu")
    assert model.get_submodule("model.layers.0.mlp.down_proj").weight.device == pair[1]
