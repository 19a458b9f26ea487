"""Pure Python: there is no build step, kernels are compiled by Triton on first use.

Triton is an extra, never a requirement: PyTorch's GPU builds bring the one that fits them, and an installer that
replaces it (PyPI's build over AMD's, say) breaks that machine.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="eagle_kernels",
    version="0.1.0",
    description="Triton kernels for speculative decoding with token trees, each paired with a PyTorch reference",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    # eagle_kernels/reference is a link to ../reference, which is followed: a wheel holds the real files
    packages=find_packages(include=["eagle_kernels", "eagle_kernels.*"]),
    package_data={"eagle_kernels": ["assets/**/*"]},
    install_requires=["torch>=2.8", "numpy"],  # the first whose own triton is 3.4 or newer, see runtime/language.py
    extras_require={
        "models": ["safetensors>=0.4", "tokenizers>=0.15"],
        "train": ["safetensors>=0.4", "tqdm"],
        "transformers": ["transformers>=4.56"],
        "plots": ["matplotlib>=3.6"],
        "test": ["pytest>=7", "pytest-benchmark>=4", "pytest-xdist>=3.3", "safetensors>=0.4"],
        # Kernels on a machine without a GPU; GPU builds of torch bring their own triton, which must not be replaced.
        # Up to the newest that the smoke set was run with (op_tests/README.md): interpreters differ by minor version.
        # triton 3.6's interpreter turns one-element arrays into ints, which numpy 2.4 refuses.
        "interpreter": ["triton>=3.4,<3.10; platform_system == 'Linux'", "numpy<2.4"],
    },
    entry_points={"console_scripts": ["eagle-kernels = eagle_kernels.tools.cli.main:main"]},
)
