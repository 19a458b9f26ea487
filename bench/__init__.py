"""The price of every op: `python -m bench.run --op build_tree`. Nothing in the package imports this."""

import os
import sys

import torch

if not torch.cuda.is_available() and "--compile" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel: declarations are checked, not timed
