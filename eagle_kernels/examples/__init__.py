"""Examples, one file for each kind of user; run one with `python -m eagle_kernels.examples.own_server`."""
