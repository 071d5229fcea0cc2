"""The kernels `mx_cast` and `mx_dequantize`."""
