"""The kernel `cast_grad`."""
