"""The kernel `scale_update`."""
