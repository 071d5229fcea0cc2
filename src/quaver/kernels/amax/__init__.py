"""The kernel `amax`."""
