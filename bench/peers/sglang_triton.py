"""SGLang's Triton kernels, out of the wheel sglang 0.5.23: `.peers/sglang_triton/*.py`.

SGLang itself runs them on XPU only, where its CUDA ops do not exist.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

import torch

from eagle_kernels.runtime.language import triton

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


def draft_kv_indices(values: dict) -> Run:
    """The positions that it sums up are made in the timed call, as its caller does."""
    kernel = _module("cache_locs").generate_draft_decode_kv_indices
    if values.get("window_counts_drafts"):
        raise Unavailable("has another kernel for windows that count drafts")
    table, seq_lens, topk, num_steps = (values[name] for name in ("req_to_token", "seq_lens", "topk", "num_steps"))
    batch_size, num_branches = len(seq_lens), len(seq_lens) * topk
    kv_indptr = torch.zeros(num_steps, num_branches + 1, dtype=torch.int32, device=table.device)
    kv_indices = torch.full((num_steps, values["capacity"]), -1, dtype=torch.int32, device=table.device)
    bounds = [triton.next_power_of_2(size) for size in (batch_size, num_steps, num_branches)]

    def run():
        kernel[num_steps, batch_size, topk](
            values["req_pool_indices"], table, seq_lens, kv_indices, kv_indptr,
            seq_lens.repeat_interleave(topk, output_size=num_branches), table.stride(0), kv_indices.stride(0),
            kv_indptr.stride(0), *bounds, values.get("page_size", 1), values.get("window_size", 0),
            values.get("sink_size", 0),
        )  # fmt: skip
        return {"kv_indptr": kv_indptr, "kv_indices": kv_indices}

    return run


def extend_cache_locs(values: dict) -> Run:
    """Its uniform kernel writes positions as well, the other one does not."""
    kernels = _module("cache_locs")
    rows, table, starts, ends = values["req_pool_indices"], values["req_to_token"], values["starts"], values.get("ends")
    batch_size, columns = len(starts), table.shape[1]
    if ends is not None:
        cache_locs = torch.empty(values["capacity"], dtype=torch.int64, device=table.device)
        bound = triton.next_power_of_2(batch_size)

        def run():
            kernels.assign_extend_cache_locs[(batch_size,)](rows, table, starts, ends, cache_locs, columns, bound)
            return {"cache_locs": cache_locs}

        return run
    num_tokens = values["num_tokens"]
    cache_locs, positions = torch.empty(2, batch_size * num_tokens, dtype=torch.int64, device=table.device)

    def run():
        kernels.assign_extend_cache_locs_uniform[(batch_size,)](
            rows, table, starts, cache_locs, columns, num_tokens, positions_out=positions
        )
        return {"cache_locs": cache_locs, "positions": positions}

    return run


def draft_cache_locs(values: dict) -> Run:
    """Where branches lie one after another; the rest it leaves to torch."""
    if values["page_size"] > 1 and values["topk"] > 1:
        raise Unavailable("has no kernel for several branches with pages")
    kernel = _module("cache_locs").assign_draft_cache_locs_contiguous
    table, seq_lens = values["req_to_token"], values["seq_lens"]
    topk, num_steps, batch_size = values["topk"], values["num_steps"], len(seq_lens)
    cache_locs = torch.empty(batch_size * topk, num_steps, dtype=torch.int64, device=table.device)
    positions = torch.empty(batch_size * topk, dtype=torch.int64, device=table.device)

    def run():
        kernel[(batch_size,)](
            values["req_pool_indices"], table, seq_lens, cache_locs, table.shape[1], topk, num_steps,
            positions=positions, BS=batch_size, WRITE_POSITIONS=True,
        )  # fmt: skip
        return {"cache_locs": cache_locs, "positions": positions}

    return run
