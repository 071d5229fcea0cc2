"""The kernel `dequantize`."""
