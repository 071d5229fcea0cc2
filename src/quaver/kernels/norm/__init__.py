"""The kernels `norm`, `norm_backward` and `norm_cast`."""
