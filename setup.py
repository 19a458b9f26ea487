"""Pure Python: there is no build step, kernels are compiled by Triton on first use.

Triton is an extra, never a requirement: PyTorch's GPU builds bring the one that fits them, and an installer that
replaces it (PyPI's build over AMD's, say) breaks that machine.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
REPOSITORY = "https://github.com/eagle-kernels/eagle_kernels"


def read_version() -> str:
    """Returns the version without importing the package, which needs torch."""
    text = (ROOT / "eagle_kernels" / "runtime" / "version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


def read_description() -> str:
    """Returns the README with absolute links, since an index page knows no relative ones."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[([^\]]*)\]\((?!http)([^)]+)\)", rf"![\1]({REPOSITORY}/raw/main/\2)", text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!http|#)([^)]+)\)", rf"[\1]({REPOSITORY}/blob/main/\2)", text)


class LinkedSdist(sdist):
    """Writes an archive in which `eagle_kernels/reference` is the link that it is in a checkout, not a second copy."""

    def make_release_tree(self, base_dir, files):
        files = {file.removeprefix("./") for file in files}  # of the packages, which package_dir says are in "."
        super().make_release_tree(base_dir, sorted(f for f in files if not f.startswith("eagle_kernels/reference/")))
        Path(base_dir, "eagle_kernels", "reference").symlink_to("../reference")


setup(
    name="eagle_kernels",
    version=read_version(),
    description="Triton kernels for speculative decoding with token trees, each paired with a PyTorch reference",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    author="The eagle_kernels authors",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/blob/main/eagle_kernels/README.md",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    keywords=["speculative decoding", "EAGLE", "token tree", "Triton", "LLM inference"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",  # those with a row in op_tests/README.md
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    license_expression="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # eagle_kernels/reference is a link to ../reference, which is followed: a wheel holds the real files
    # makes an editable install a path, which type checkers and editors follow, and not an import hook
    package_dir={"": "."},
    packages=find_packages(include=["eagle_kernels", "eagle_kernels.*"]),
    package_data={"eagle_kernels": ["assets/**/*", "examples/*.ipynb", "py.typed", "**/*.pyi"]},
    install_requires=["torch>=2.8", "numpy"],  # the first whose own triton is 3.4 or newer, see runtime/language.py
    extras_require={
        "models": ["safetensors>=0.4", "tokenizers>=0.15"],
        "train": ["safetensors>=0.4", "tqdm"],  # bench.lab.train_head and bench.lab.train_demo_pair
        "transformers": ["transformers>=4.56"],
        "datasets": ["datasets>=2.14"],  # the laboratory's prompts from the hub, instead of those built in
        "plots": ["matplotlib>=3.6"],
        # setuptools as in pyproject.toml: tests of the packaging build without a network
        "test": ["pytest>=7", "pytest-benchmark>=4", "pytest-xdist>=3.3", "safetensors>=0.4", "setuptools>=77.0.3"],
        # Kernels on a machine without a GPU; GPU builds of torch bring their own triton, which must not be replaced.
        # Up to the newest that the smoke set was run with (op_tests/README.md): interpreters differ by minor version.
        # triton 3.6's interpreter turns one-element arrays into ints, which numpy 2.4 refuses.
        "interpreter": ["triton>=3.4,<3.10; platform_system == 'Linux'", "numpy<2.4"],
        "dev": ["eagle_kernels[test,interpreter]", "ruff==0.17.5", "mypy==2.4.1", "pyright==1.1.414"],
    },
    cmdclass={"sdist": LinkedSdist},
    entry_points={
        "console_scripts": ["eagle-kernels = eagle_kernels.tools.cli.main:main"],
        "sglang.srt.plugins": ["eagle_kernels = eagle_kernels.integrations.sglang:register"],
        "vllm.general_plugins": ["eagle_kernels = eagle_kernels.integrations.vllm:register"],
        "eagle_kernels.reports": [  # of the command `env`
            "sglang = eagle_kernels.integrations.sglang.report:lines",
            "vllm = eagle_kernels.integrations.vllm.report:lines",
        ],
    },
)
