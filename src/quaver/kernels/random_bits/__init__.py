"""Random bits from a counter, for stochastic rounding in other kernels; no operator."""
