"""SGLang's Triton kernels, out of the wheel sglang 0.5.23: `.peers/sglang_triton/*.py`.

SGLang itself runs them on XPU only, where its CUDA ops do not exist.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

import torch

from ..harness.declaration import Run, Unavailable
from ..harness.inputs import visible_drafts
from ..harness.timing import quick_us
from . import FOLDER, sglang_caller

# what the files import from SGLang: questions about the platform, most of which may be answered with no, and each other
_STUBS = (
    "sglang",
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.kernels.ops.attention",
    "sglang.srt",
    "sglang.srt.environ",
    "sglang.srt.platforms",
    "sglang.srt.platforms.interface",
    "sglang.srt.utils",
)
_NEEDS = {"decode_attention": ("score_mod",), "extend_attention": ("decode_attention", "score_mod")}
# by file, the questions that are answered with yes; spec_tree's answers lead to the same kernels either way
_YES = {"extend_attention": ("is_cuda",)}


class _Stub(ModuleType):
    """Has every name, as a function that answers no (or, for the names in `yes`, yes)."""

    def __init__(self, name: str, yes: tuple[str, ...]):
        super().__init__(name)
        self._yes = yes

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: name in self._yes


@functools.cache
def _module(name: str) -> ModuleType:
    """One of the files, imported with stubs in place of the package that it was taken from."""
    file = FOLDER / "sglang_triton" / f"{name}.py"
    if not file.exists():
        raise Unavailable(f"{file} does not exist")
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", file)
    module = importlib.util.module_from_spec(spec)
    needed = {f"sglang.kernels.ops.attention.{other}": _module(other) for other in _NEEDS.get(name, ())}
    stand_ins = {stub: _Stub(stub, _YES.get(name, ())) for stub in _STUBS} | needed
    before = {stub: sys.modules[stub] for stub in stand_ins if stub in sys.modules}
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Unavailable(f"{file.name} does not import: {type(error).__name__}: {error}") from None
    finally:
        for stub in stand_ins:
            del sys.modules[stub]
        sys.modules.update(before)
    return module


def gqa_decode(values: dict) -> Run:
    """With as many splits as are fastest for the case, which is looked for once."""
    decode = _module("decode_attention").decode_attention_fwd
    query, lengths = values["query"], values["seq_lens"]
    batch_size, num_heads, head_dim = query.shape
    k_buffer, v_buffer = (values[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    kv_indptr, kv_indices = _token_indices(values, lengths.tolist())
    output = torch.empty_like(query)

    def prepared(num_splits: int) -> Run:
        logits = torch.empty(batch_size, num_heads, num_splits, head_dim, device=query.device)
        lse = torch.empty(batch_size, num_heads, num_splits, device=query.device)
        splits = torch.full((batch_size,), num_splits, dtype=torch.int32, device=query.device)

        def run():
            decode(query, k_buffer, v_buffer, output, kv_indptr, kv_indices, logits, lse, splits, num_splits,
                   head_dim**-0.5, 1.0, 1.0)  # fmt: skip
            return {"output": output}

        return run

    return min((prepared(num_splits) for num_splits in (1, 2, 4, 8, 16, 32, 64)), key=quick_us)


def tree_attention(values: dict) -> Run:
    """extend_attention with a custom mask; it reads the draft block from tensors of its own."""
    extend = _module("extend_attention").extend_attention_fwd
    query, prefixes = values["query"].flatten(0, 1), values["seq_lens"].tolist()
    batch_size, num_nodes, _, head_dim = values["query"].shape
    caches = [values[name].flatten(0, 1) for name in ("k_cache", "v_cache")]
    kv_indptr, kv_indices = _token_indices(values, prefixes)
    _, with_drafts = _token_indices(values, [prefix + num_nodes for prefix in prefixes])
    bounds = torch.tensor([0, *prefixes]).cumsum(0) + torch.arange(batch_size + 1) * num_nodes
    places = torch.cat([torch.arange(last - num_nodes, last) for last in bounds[1:].tolist()])
    drafts = [cache[with_drafts[places.to(query.device)]] for cache in caches]
    visible = visible_drafts(values)
    masks = [
        torch.nn.functional.pad(visible[request], (prefix, 0), value=True).flatten()
        for request, prefix in enumerate(prefixes)
    ]
    sizes = torch.tensor([0, *(len(mask) for mask in masks)])
    mask, mask_indptr = torch.cat(masks), sizes.cumsum(0).to(query.device)
    qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=query.device) * num_nodes
    output = torch.empty_like(query)

    def run():
        extend(query, *drafts, output, *caches, qo_indptr, kv_indptr, kv_indices, mask, True, mask_indptr, num_nodes,
               1.0, 1.0, head_dim**-0.5)  # fmt: skip
        return {"output": output.view_as(values["query"])}

    return run


def _token_indices(values: dict, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_indptr [B + 1] int32 and kv_indices int64, one per slot, of the first `lengths` slots of each request."""
    table, page_size = values["block_table"].long(), values["k_cache"].shape[1]
    slots = [
        table[request, torch.arange(length, device=table.device) // page_size] * page_size
        + torch.arange(length, device=table.device) % page_size
        for request, length in enumerate(lengths)
    ]
    return torch.tensor([0, *lengths]).cumsum(0).to(table.device, torch.int32), torch.cat(slots)


def build_tree(values: dict) -> Run:
    """With what it leaves to its caller: see sglang_caller."""
    if values["tree_mask_mode"] == "qlen_only_bitpacking":
        raise Unavailable("has no bit-packed masks")
    return sglang_caller.build_tree(values, _module("spec_tree").sgl_build_tree_kernel_triton)


def verify_tree_greedy(values: dict) -> Run:
    """With what it leaves to its caller: see sglang_caller."""
    return sglang_caller.verify_tree_greedy(values, _module("spec_tree").verify_tree_greedy_triton)
