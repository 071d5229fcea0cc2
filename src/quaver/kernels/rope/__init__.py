"""The kernel `rope`."""
