"""The command line: `python -m eagle_kernels`."""
