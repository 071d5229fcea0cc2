"""The kernels `block_cast` and `block_dequantize`."""
