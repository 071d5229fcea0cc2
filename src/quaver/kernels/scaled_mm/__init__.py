"""The kernel `scaled_mm`."""
