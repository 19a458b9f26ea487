"""The meaning of every op in plain PyTorch: `reference/ops/A/X.py` explains `eagle_kernels/ops/A/X.py`.

Imports torch and nothing of the package, so that a shared mistake cannot hide.
"""

from importlib import import_module
from pkgutil import walk_packages

for module in walk_packages(__path__, f"{__name__}."):  # as reference.ops.tree.build_tree, after a plain import
    import_module(module.name)
