"""transformers' Trainer: a few steps of a tiny Llama, in FP8."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

import quaver as qv
from quaver.recipe import named_recipe
from quaver.testing import launches
from tests.conversion.models import tiny_llama, tokens
from tests.integration.helpers import assert_same, quantized_modules
from tests.integrations.transformers.folders import LAYERS, load, saved

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    rows = tokens(16)
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])


def losses(done: Trainer) -> list[float]:
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_few_steps_learn_and_are_saved(recipe: str, tmp_path: Path) -> None:
    model = tiny_llama()
    qv.convert(model, named_recipe(recipe))
    run = trainer(model, tmp_path)
    with launches() as log:
        run.train()
    assert [launch.kernel for launch in log].count("scaled_mm") == 4 * 3 * LAYERS
    assert len(losses(run)) == 4
    assert losses(run)[-1] < losses(run)[0] - 0.02
    if recipe == "delayed":
        updates = {
            layer.recipe_states["forward"].updates for layer in quantized_modules(model).values()
        }
        assert updates == {4}
    run.save_model(str(tmp_path / "saved"))
    twin = load(tmp_path / "saved", recipe, "keep")
    assert_same(dict(twin.state_dict()), dict(model.state_dict()))


def test_it_equals_a_plain_loop(tmp_path: Path) -> None:
    model = tiny_llama()
    qv.convert(model, named_recipe("current"))
    twin = copy.deepcopy(model).train()
    run = trainer(model, tmp_path, lr_scheduler_type="constant", max_grad_norm=0.0, optim="sgd")
    rows = torch.stack([row["input_ids"] for row in run.train_dataset])
    run.train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for logged in losses(run):
        optimizer.zero_grad()
        loss = twin(rows, labels=rows).loss  # one batch is all rows, in whatever order
        loss.backward()
        optimizer.step()
        assert logged == pytest.approx(loss.item(), rel=1e-4)


def test_a_model_that_was_loaded_with_kept_weights_trains_and_a_quantized_one_wants_adapters(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "plain")
    kept = load(tmp_path / "plain", "current", "keep")
    run = trainer(kept, tmp_path)
    run.train()
    assert losses(run)[-1] < losses(run)[0]
    quantized = load(tmp_path / "plain", "current", "quantize")
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trainer(quantized, tmp_path)
    lora = get_peft_model(quantized, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    run = trainer(lora, tmp_path)
    run.train()
    assert losses(run)[-1] < losses(run)[0]
