"""Attention's dropout draws from the stream of a tracker, on whichever device it runs."""

import pytest
import torch

import quaver as qv
from quaver.nn import checkpoint
from quaver.recipe import Float8CurrentScaling

STREAM = "model-parallel-rng"


def tracker_of(seed: int) -> qv.RNGStatesTracker:
    tracker = qv.RNGStatesTracker()
    tracker.add(STREAM, seed)
    return tracker


def attention(tracker: qv.RNGStatesTracker | None, **options) -> qv.DotProductAttention:
    get = None if tracker is None else lambda: tracker
    return qv.DotProductAttention(2, 8, attention_dropout=0.5, get_rng_state_tracker=get, **options)


def operands(device="cpu") -> list[torch.Tensor]:
    return [torch.randn(2, 6, 2, 8).to(device) for _ in range(3)]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_it_draws_from_the_stream_and_leaves_the_default_one(backend: str) -> None:
    inputs = operands()
    before = torch.get_rng_state()
    tracker = tracker_of(3)
    module = attention(tracker, backend=backend)
    first, second = module(*inputs), module(*inputs)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)  # the stream goes on
    assert torch.equal(attention(tracker_of(3), backend=backend)(*inputs), first)
    assert not torch.equal(attention(tracker_of(4), backend=backend)(*inputs), first)
    torch.manual_seed(3)
    assert torch.equal(attention(None, backend=backend)(*inputs), first)


def test_without_dropout_the_stream_stays() -> None:
    tracker = tracker_of(3)
    module = attention(tracker).eval()
    module(*operands())
    assert tracker.get_states() == {STREAM: {}}


def test_ranks_with_other_seeds_drop_other_weights_and_the_same_elsewhere() -> None:
    x, outputs = torch.randn(2, 6, 16), []
    module = None
    for seed in (5, 6):
        tracker = tracker_of(seed)
        options = qv.AttentionOptions(get_rng_state_tracker=lambda t=tracker: t)
        layer = qv.TransformerLayer(
            16, 32, 2, hidden_dropout=0.0, attention_dropout=0.5, attention=options
        )
        if module is not None:
            layer.load_state_dict(module.state_dict())
        module = layer
        before = torch.get_rng_state()
        outputs.append(layer(x))
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*outputs)


def test_each_device_has_the_stream_and_fp8_draws_from_it_too(devices) -> None:
    recipe, outputs = Float8CurrentScaling(fp8_dpa=True), []
    inputs = operands()
    for device in devices:
        module = attention(tracker_of(3))
        with qv.autocast(recipe=recipe):
            outputs.append(module(*(x.to(device) for x in inputs)))
    assert [y.device for y in outputs] == devices
    assert torch.equal(outputs[0].cpu(), outputs[1].cpu())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_repeats_the_stream(devices, reentrant: bool) -> None:
    grads = []
    inputs = operands(devices[1])
    for checkpointed in (False, True):
        tracker = tracker_of(3)
        module = attention(tracker)
        leaves = [x.clone().requires_grad_() for x in inputs]
        if checkpointed:
            y = checkpoint(
                module,
                *leaves,
                use_reentrant=reentrant,
                get_rng_state_tracker=lambda t=tracker: t,
            )
        else:
            y = module(*leaves)
        y.square().sum().backward()
        grads.append([x.grad for x in leaves])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)
