"""What the Triton kernels share: launching, and the arithmetic of the formats."""
