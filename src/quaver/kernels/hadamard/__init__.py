"""The kernel `hadamard`."""
