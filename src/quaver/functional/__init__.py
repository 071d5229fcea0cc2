"""Autograd functions: plain tensors in, plain tensors saved."""

from quaver.functional.linear import LinearPlan, activation_dtype, linear

__all__ = ["LinearPlan", "activation_dtype", "linear"]
