"""The meaning of every op in plain PyTorch: `reference/ops/A/X.py` explains `eagle_kernels/ops/A/X.py`.

Imports torch and nothing of the package, so that a shared mistake cannot hide.
"""
