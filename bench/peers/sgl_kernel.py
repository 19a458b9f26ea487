"""SGLang's CUDA ops, out of the wheel sglang-kernel 0.4.4: `.peers/sgl_kernel_sm90.so`, for Hopper and torch 2.11.

Unless they are bare, they are timed with what they leave to their caller: see sglang_caller.
"""

import functools

import torch

from ..harness.declaration import Run, Unavailable
from . import FOLDER, flashinfer, sglang_caller


@functools.cache
def _reason() -> str:
    """Why the ops cannot be called, empty if they can."""
    library = FOLDER / "sgl_kernel_sm90.so"
    if not library.exists():
        return f"{library} does not exist"
    if not torch.cuda.is_available():
        return "needs a GPU"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library.name} does not load: {str(error).partition(chr(10))[0]}"
    return ""


def _ops():
    if _reason():
        raise Unavailable(_reason())
    return torch.ops.sgl_kernel


def build_tree(values: dict) -> Run:
    return sglang_caller.build_tree(values, _ops().build_tree_kernel_efficient)


def verify_tree_coins(values: dict) -> Run:
    return sglang_caller.verify_tree_coins(values, _ops().tree_speculative_sampling_target_only)


def verify_tree_coins_bare(values: dict) -> Run:
    """The kernel alone: its buffers and draft_probs were filled once, nothing counts the bonus."""
    return sglang_caller.verify_tree_coins(values, _ops().tree_speculative_sampling_target_only, is_bare=True)


def verify_tree_sampled(values: dict) -> Run:
    """What a server runs from logits on: torch's softmax, FlashInfer's filters, this walk (`sglang_caller.py`)."""
    op = _ops().tree_speculative_sampling_target_only
    is_filtered = values.get("top_k") is not None or values.get("top_p") is not None
    return sglang_caller.verify_tree_sampled(values, op, *(flashinfer.renorms(values) if is_filtered else ()))


def verify_tree_greedy(values: dict) -> Run:
    return sglang_caller.verify_tree_greedy(values, _ops().verify_tree_greedy)


def verify_tree_greedy_bare(values: dict) -> Run:
    """The kernel alone, which is no whole verification: its buffers were filled once, nothing counts the bonus."""
    if "target_predict" not in values:
        raise Unavailable("the bare kernel reads token ids, not logits")
    return sglang_caller.verify_tree_greedy(values, _ops().verify_tree_greedy, is_bare=True)


def tree_from_mask(values: dict) -> Run:
    """Leaves nothing to its caller; reads "qlen_only" masks."""
    op = _ops().reconstruct_indices_from_tree_mask
    if values["tree_mask_mode"] != "qlen_only":
        raise Unavailable(f"reads qlen_only masks, not {values['tree_mask_mode']}")
    seq_lens, num_nodes = values["seq_lens"], values["num_verify_tokens"]
    batch_size, device = len(seq_lens), seq_lens.device
    positions = torch.empty(batch_size * num_nodes, dtype=torch.int64, device=device)
    links = torch.empty(3, batch_size, num_nodes, dtype=torch.int64, device=device)
    outputs = {"positions": positions, **dict(zip(sglang_caller.LINKS, links))}

    def run():
        op(values["tree_mask"].flatten(), seq_lens, positions, *links, batch_size, num_nodes)
        return outputs

    return run
