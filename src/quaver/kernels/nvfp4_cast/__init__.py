"""The kernels `nvfp4_cast` and `nvfp4_dequantize`."""
