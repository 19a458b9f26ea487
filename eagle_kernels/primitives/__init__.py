"""L1, what kernels share: Triton device functions, and steps (a kernel and its launch) that several ops take."""
