"""The proof: tests that mirror eagle_kernels and reference, and the harness they share."""
