"""fuse=True on hand-written blocks: which code is recognized, and which is not."""

import pytest
import torch
from torch import nn

import quaver as qv
from quaver.conversion import convert, convert_back
from quaver.conversion.fusion.functions import activation_of, norm_of
from quaver.conversion.fusion.source import UnrecognizedError, consumer_of, formula, readers_of

WIDTH = 16


class Attention(nn.Module):
    """Projects its input twice; the product of both stands for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        shape = x.shape[:-1]
        return (self.query(x) * self.value(x)).view(*shape, -1).to(x.dtype)


class AlsoAdds(Attention):
    def forward(self, x):
        return self.query(x) * self.value(x) + x


class Conditional(Attention):
    def forward(self, x, other=None):
        if other is not None:
            x = other
        return self.query(x) * self.value(x)


class MissingBranch(Attention):
    def forward(self, x, other=None):
        if other is not None:
            return self.cross(x) * self.value(other)
        return self.query(x) * self.value(x)


class ElsewhereToo(Attention):
    def forward(self, x):
        return self.query(x) * self.value(x)

    def score(self, x):
        return self.query(x)


class Twice(Attention):
    def forward(self, x):
        return self.query(x) * self.query(x)


class Method(Attention):
    def forward(self, x):
        return self.project(x)

    def project(self, x):
        return self.query(x) * self.value(x)


class Mlp(nn.Module):
    """Gated, the gate on the right."""

    def __init__(self, activation=torch.relu) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x):
        """Has a docstring, and a variable that is used again."""
        wide = self.wide(x)
        x = wide * self.activation(self.gate(x))
        return self.back(x)


class Block(nn.Module):
    """Pre-norm, the way that many write it."""

    def __init__(self, attention, norm=nn.LayerNorm, mlp=None) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH, eps=1e-4), norm(WIDTH, eps=1e-4)
        self.attention = attention
        self.mlp = mlp or Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNorm(Block):
    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Parallel(Block):
    def forward(self, x):
        normed = self.norm1(x)
        return x + self.attention(normed) + self.mlp(normed)


class SameMlp(Block):
    def forward(self, x):
        x = x + self.mlp(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, qv.LayerNorm, qv.RMSNorm])
@pytest.mark.parametrize("activation", [torch.relu, torch.sigmoid, nn.SiLU(), nn.GELU("tanh")])
def test_hand_written_blocks_are_fused(norm, activation):
    block = Block(Attention(), norm, Mlp(activation))
    for parameter in block.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(3, 5, WIDTH)
    expected = block(x)
    report = convert(block, fuse=True)
    assert [module.replaces for module in report.fused] == [
        ("norm1", "attention.query", "attention.value"),
        ("norm2", "mlp.gate", "mlp.wide", "mlp.back"),
    ]
    assert torch.allclose(block(x), expected, rtol=1e-4, atol=1e-5)
    convert_back(block)
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize(
    ("block", "reasons"),
    [
        (Block(AlsoAdds()), ["AlsoAdds.forward does more than project it: return self.query(x)"]),
        (Block(Conditional()), ["Conditional.forward gives x another value under a condition"]),
        (Block(ElsewhereToo()), ["ElsewhereToo.score uses query, too"]),
        (Block(Twice()), ["Twice.forward uses query 2 times"]),
        (Block(Method()), ["Method.project, which is called, is no module"]),
        (PostNorm(Attention()), ["give its output to one module", "calls it under a condition"]),
        (Parallel(Attention()), ["does not give its output to one module", "calls it 0 times"]),
        (SameMlp(Attention()), ["SameMlp.forward uses mlp 2 times"] * 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_code_is_not_and_keeps_its_values(block, reasons):
    x = torch.randn(3, WIDTH)
    expected = block(x)
    report = convert(block, fuse=True)
    assert len(report.unfused) == len(reasons)
    for norm, reason in zip(report.unfused, reasons, strict=True):
        assert reason in norm.reason
    assert torch.allclose(block(x), expected, rtol=1e-4, atol=1e-5)


def test_a_hook_on_the_block_and_a_shared_activation_are_no_obstacles():
    activation = nn.SiLU()
    model = nn.Sequential(*(Block(Attention(), mlp=Mlp(activation)) for _ in range(2)))
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.randn(3, WIDTH)
    expected = model(x)
    assert len(convert(model, fuse=True).fused) == 4
    assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-5)
    assert len(seen) == 2
    assert torch.allclose(*seen, rtol=1e-4, atol=1e-5)


def test_a_branch_that_cannot_run_is_left_out():
    block = Block(MissingBranch())
    assert len(convert(block, fuse=True).fused) == 2
    block = Block(MissingBranch())
    block.attention.cross = nn.Linear(WIDTH, WIDTH)
    report = convert(block, fuse=True)
    assert [norm.reason for norm in report.unfused] == ["MissingBranch.forward uses value 2 times"]


def test_formula_consumer_and_readers():
    block = Block(Attention())
    gated = ("*", ("wide", "x"), ("activation", ("gate", "x")))
    assert formula(block.mlp) == ("back", gated)
    with pytest.raises(UnrecognizedError, match="more than calls of its children"):
        formula(block.attention)
    assert consumer_of(block, "norm2") == ("mlp", 0, True)
    assert readers_of(block.attention, 0) == readers_of(block.attention, "x") == ["query", "value"]
    assert readers_of(block.attention, "other") == []


class Gained(nn.RMSNorm):
    """Stores its gain minus one."""

    def forward(self, x):
        return nn.functional.rms_norm(x, (WIDTH,), 1 + self.weight, self.eps)


class Ungained(nn.RMSNorm):
    """Forgets eps."""

    def forward(self, x):
        return nn.functional.rms_norm(x, (WIDTH,), self.weight, 1e-12)


def test_norms_are_told_by_what_they_give():
    assert norm_of(nn.LayerNorm(WIDTH, eps=1e-3)) == ("LayerNorm", 1e-3, False)
    assert norm_of(nn.RMSNorm(WIDTH, eps=1e-3)) == ("RMSNorm", 1e-3, False)
    assert norm_of(Gained(WIDTH, eps=1e-3)) == ("RMSNorm", 1e-3, True)
    assert norm_of(qv.RMSNorm(WIDTH, 1e-3, zero_centered_gamma=True)) == ("RMSNorm", 1e-3, True)
    assert norm_of(qv.LayerNorm(WIDTH, zero_centered_gamma=True)) == ("LayerNorm", 1e-5, True)
    for dtype in (torch.bfloat16, torch.float16):
        assert norm_of(nn.RMSNorm(WIDTH, eps=1e-5, dtype=dtype)) == ("RMSNorm", 1e-5, False)
        assert norm_of(Gained(WIDTH, eps=1e-5, dtype=dtype)) == ("RMSNorm", 1e-5, True)
    for other in (Ungained(WIDTH, eps=1e-3), nn.RMSNorm(WIDTH)):
        with pytest.raises(UnrecognizedError, match="neither a layer norm nor an RMS norm"):
            norm_of(other)


def test_activations_are_told_by_what_they_give():
    assert activation_of(nn.SiLU(), gated=True) == "swiglu"
    assert activation_of(nn.SiLU(), gated=False) == "silu"
    assert activation_of(lambda x: torch.relu(x) ** 2, gated=True) == "sreglu"
    assert activation_of(lambda x: x * torch.sigmoid(1.702 * x), gated=False) == "qgelu"
    for other, gated in ((torch.sigmoid, False), (nn.GELU(), True), (torch.tanh, True)):
        with pytest.raises(UnrecognizedError, match="gives the values of none of"):
            activation_of(other, gated)
    with pytest.raises(UnrecognizedError, match="has parameters or buffers of its own"):
        activation_of(nn.PReLU(), gated=False)
