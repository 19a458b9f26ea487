"""One module per op, mirroring eagle_kernels.ops."""
