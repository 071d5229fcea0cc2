"""The kernels `activation`, `activation_backward`, and both with a cast."""
