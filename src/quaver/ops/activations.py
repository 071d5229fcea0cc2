"""The activations as fusible operations."""

from __future__ import annotations

from typing import ClassVar

import torch

from quaver.errors import QuaverError
from quaver.functional import activation, dequantized
from quaver.functional.norm_mlp import Activation
from quaver.kernels.activation.names import DEFAULT_ALPHA, DEFAULT_LIMIT
from quaver.ops.operation import FusibleOperation

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ActivationOperation(FusibleOperation):
    """y = f(x) in float32 arithmetic, rounded once to x's dtype; base class.

    A gated one takes x = [a, b] side by side, the gate first, and gives f(a) * b.
    """

    name: ClassVar[str]
    """That of `quaver.functional.activation`."""

    def function(self) -> Activation:
        """What the kernels take."""
        return Activation(self.name, DEFAULT_LIMIT, DEFAULT_ALPHA)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of each value, or of each vector of the last dimension.

        Args:
            x: [..., W], float32, bfloat16 or float16, on any device.

        Returns:
            [..., W], gated [..., W / 2], in x's dtype.

        Raises:
            QuaverError: another dtype, a scalar, or an odd W and a gated activation.
        """
        if x.dtype not in _DTYPES:
            raise QuaverError(
                f"{type(self).__name__} computes in float32 and takes float32, bfloat16 or "
                f"float16, not {x.dtype}; torch.nn's activations take it"
            )
        if x.dim() == 0:
            raise QuaverError(
                f"{type(self).__name__} takes x of at least one dimension, not a scalar"
            )
        return activation(dequantized(x), *self.function())


def _refuse_inplace(owner: str, inplace: bool) -> None:
    if inplace:
        raise QuaverError(
            f"{owner}(inplace=True) is not possible: the backward needs x; leave it False"
        )


class GELU(ActivationOperation):
    """y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    Args:
        approximate: as for torch.nn.GELU, of which "tanh" alone is here.

    Raises:
        QuaverError: another `approximate`.
    """

    name = "gelu"

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        if approximate != "tanh":
            raise QuaverError(
                f'GELU has the form approximate="tanh", not {approximate!r}; torch.nn.GELU has '
                '"none", and may stand in a Sequential'
            )


class GEGLU(ActivationOperation):
    """y = gelu(a) * b for x = [a, b], with the tanh form of gelu."""

    name = "geglu"


class GLU(ActivationOperation):
    """y = sigmoid(a) * b for x = [a, b]; torch.nn.GLU has the gate in the second half."""

    name = "glu"


class QGELU(ActivationOperation):
    """y = x * sigmoid(1.702 x)."""

    name = "qgelu"


class QGEGLU(ActivationOperation):
    """y = qgelu(a) * b for x = [a, b]."""

    name = "qgeglu"


class ReLU(ActivationOperation):
    """y = max(x, 0).

    Args:
        inplace: as for torch.nn.ReLU; False.

    Raises:
        QuaverError: `inplace` is True.
    """

    name = "relu"

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        _refuse_inplace("ReLU", inplace)


class ReGLU(ActivationOperation):
    """y = relu(a) * b for x = [a, b]."""

    name = "reglu"


class SReLU(ActivationOperation):
    """y = max(x, 0)^2."""

    name = "srelu"


class SReGLU(ActivationOperation):
    """y = srelu(a) * b for x = [a, b]."""

    name = "sreglu"


class SiLU(ActivationOperation):
    """y = x * sigmoid(x).

    Args:
        inplace: as for torch.nn.SiLU; False.

    Raises:
        QuaverError: `inplace` is True.
    """

    name = "silu"

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        _refuse_inplace("SiLU", inplace)


class SwiGLU(ActivationOperation):
    """y = silu(a) * b for x = [a, b]."""

    name = "swiglu"


class ClampedSwiGLU(ActivationOperation):
    """y = z * sigmoid(alpha * z) * (1 + c) for x = [a, b], as in gpt-oss.

    z = min(a, limit), and c is b held within +-limit.

    Args:
        limit, alpha: as in the formula.

    Raises:
        QuaverError: `limit` is not above 0.
    """

    name = "clamped_swiglu"

    def __init__(self, limit: float = DEFAULT_LIMIT, alpha: float = DEFAULT_ALPHA) -> None:
        super().__init__()
        if not limit > 0:
            raise QuaverError(f"limit must be above 0, not {limit}")
        self.limit = limit
        self.alpha = alpha

    def function(self) -> Activation:
        """What the kernels take."""
        return Activation(self.name, self.limit, self.alpha)

    def extra_repr(self) -> str:
        """What repr() shows in the parentheses."""
        return f"limit={self.limit}, alpha={self.alpha}"
