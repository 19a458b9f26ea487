"""SGLang's Triton kernels, out of the wheel sglang 0.5.23: `.peers/sglang_triton/*.py`.

SGLang itself runs them on XPU only, where its CUDA ops do not exist.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

from ..harness.declaration import Run, Unavailable
from . import FOLDER, sglang_caller

# what spec_tree.py imports from SGLang: questions about the platform, all of which may be answered with no
_STUBS = (
    "sglang",
    "sglang.srt",
    "sglang.srt.environ",
    "sglang.srt.platforms",
    "sglang.srt.platforms.interface",
    "sglang.srt.utils",
)


class _Stub(ModuleType):
    """Has every name, as a function that answers no."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False


@functools.cache
def _module(name: str) -> ModuleType:
    """One of the files, imported with stubs in place of the package that it was taken from."""
    file = FOLDER / "sglang_triton" / f"{name}.py"
    if not file.exists():
        raise Unavailable(f"{file} does not exist")
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", file)
    module = importlib.util.module_from_spec(spec)
    before = {stub: sys.modules[stub] for stub in _STUBS if stub in sys.modules}
    sys.modules.update({stub: _Stub(stub) for stub in _STUBS})
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Unavailable(f"{file.name} does not import: {type(error).__name__}: {error}") from None
    finally:
        for stub in _STUBS:
            del sys.modules[stub]
        sys.modules.update(before)
    return module


def build_tree(values: dict) -> Run:
    """With what it leaves to its caller: see sglang_caller."""
    if values["tree_mask_mode"] == "qlen_only_bitpacking":
        raise Unavailable("has no bit-packed masks")
    return sglang_caller.build_tree(values, _module("spec_tree").sgl_build_tree_kernel_triton)


def verify_tree_greedy(values: dict) -> Run:
    """With what it leaves to its caller: see sglang_caller."""
    return sglang_caller.verify_tree_greedy(values, _module("spec_tree").verify_tree_greedy_triton)
