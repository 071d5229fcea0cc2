"""Lightning's Trainer and Fabric with QuaverPrecision."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.errors import RecipeError
from quaver.recipe import DelayedScaling
from quaver.testing import launches
from tests.integration.helpers import assert_same, equal, quantized_modules, scaling

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning.*"),
]
RECIPE = DelayedScaling(amax_history_len=4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def batches() -> torch.utils.data.DataLoader:
    data = torch.utils.data.TensorDataset(torch.randn(16, 16))
    return torch.utils.data.DataLoader(data, batch_size=4)


def test_a_trainer_runs_each_step_with_the_recipe(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from quaver.integrations.lightning import QuaverPrecision

    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = (self.net(batch[0]) - batch[0]).square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task, data = Task(), batches()
    twin = copy.deepcopy(task)
    plugin = QuaverPrecision(RECIPE)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        plugins=plugin,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with launches() as log:
        trainer.fit(task, data)
    assert [launch.kernel for launch in log].count("scaled_mm") == 4 * 5  # x needs no gradient
    assert len(plugin.report.converted) == 2
    qv.convert(twin, RECIPE)
    optimizer = twin.configure_optimizers()
    for index, batch in enumerate(data):
        with qv.autocast(recipe=RECIPE):
            loss = twin.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(equal(*pair) for pair in zip(task.losses, twin.losses, strict=True))
    assert_same(scaling(task), scaling(twin))
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    fresh = Task()
    qv.convert(fresh, RECIPE)
    fresh.load_state_dict(stored)
    assert_same(scaling(fresh), scaling(task))


def test_fabric_with_autocast_of_everything_else() -> None:
    from lightning.fabric import Fabric

    from quaver.integrations.lightning import QuaverPrecision

    fabric = Fabric(
        accelerator="cpu", plugins=QuaverPrecision("mxfp8", compute_dtype=torch.bfloat16)
    )
    module = net()
    wrapped = fabric.setup(module)
    with launches() as log:
        y = wrapped(torch.randn(4, 16))
    assert [launch.kernel for launch in log].count("scaled_mm") == 2
    assert y.dtype == torch.bfloat16
    assert module[0].weight.dtype == torch.float32


def test_the_plugin_goes_by_the_modules_device_and_leaves_quavers_layers(devices) -> None:
    from quaver.integrations.lightning import QuaverPrecision

    plugin = QuaverPrecision("current", exclude=("2",))
    module = plugin.convert_module(net().to(devices[1]))
    assert list(quantized_modules(module)) == ["0"]
    with launches() as log, plugin.forward_context():
        module(torch.randn(4, 16, device=devices[1]))
    assert {(launch.device, launch.current) for launch in log} == {(devices[1], devices[1])}
    built = nn.Sequential(qv.Linear(16, 16), nn.Linear(16, 16))
    again = QuaverPrecision("current")
    assert again.convert_module(built) is built
    assert type(built[1]) is nn.Linear
    assert again.report.converted == ()
    for wrong in ("fp8", 3):
        with pytest.raises(RecipeError, match="recipe"):
            QuaverPrecision(wrong)
