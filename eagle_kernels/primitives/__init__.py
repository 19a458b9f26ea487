"""L1, Triton device functions that kernels share; none is launched alone."""
