"""SGLang's CUDA ops, out of the wheel sglang-kernel 0.4.4: `.peers/sgl_kernel_sm90.so`, for Hopper and torch 2.11."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from ..harness.declaration import Run, Unavailable

LIBRARY = Path(__file__).parent.parent.parent / ".peers" / "sgl_kernel_sm90.so"

_MASK_MODES = {"full_mask": 0, "qlen_only": 1}


@functools.cache
def _reason() -> str:
    """Why the ops cannot be called, empty if they can."""
    if not LIBRARY.exists():
        return f"{LIBRARY} does not exist"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} does not load: {error}"
    return ""


def _ops():
    if _reason():
        raise Unavailable(_reason())
    return torch.ops.sgl_kernel


def build_tree(values: dict) -> Run:
    """With the fills that the op leaves to its caller: links -1, mask True."""
    ops = _ops()
    mode = values["tree_mask_mode"]
    if mode not in _MASK_MODES:
        raise Unavailable(f"build_tree is compared in the mask layouts {', '.join(_MASK_MODES)}, not {mode}")
    seq_lens = values["seq_lens"]
    batch_size, num_nodes = len(seq_lens), values["num_verify_tokens"]
    row_cells = batch_size * num_nodes + (values["seq_lens_sum"] if mode == "full_mask" else 0)
    tree_mask = torch.empty(num_nodes * row_cells, dtype=torch.bool, device=seq_lens.device)
    positions = torch.empty(batch_size * num_nodes, dtype=torch.int64, device=seq_lens.device)
    links = torch.empty(3, batch_size, num_nodes, dtype=torch.int64, device=seq_lens.device)

    def run():
        tree_mask.fill_(True)
        links.fill_(-1)
        ops.build_tree_kernel_efficient(
            values["parent_list"], values["top_scores_index"], seq_lens, tree_mask, positions, *links,
            values["topk"], values["spec_steps"], num_nodes, _MASK_MODES[mode],
        )  # fmt: skip
        return {
            "tree_mask": tree_mask if mode == "full_mask" else tree_mask.view(batch_size, num_nodes, num_nodes),
            "positions": positions,
            "retrieve_index": links[0],
            "retrieve_next_token": links[1],
            "retrieve_next_sibling": links[2],
        }

    return run


def verify_tree_greedy(values: dict) -> Run:
    """With the fills that the op leaves to its caller, and torch's argmax where the target gives logits."""
    ops = _ops()
    batch_size, num_nodes = values["candidates"].shape
    device = values["candidates"].device
    predicts = torch.empty(batch_size * num_nodes, dtype=torch.int32, device=device)
    accept_index = torch.empty(batch_size, values["spec_steps"] + 1, dtype=torch.int32, device=device)
    accept_token_num = torch.empty(batch_size, dtype=torch.int32, device=device)

    def run():
        target_predict = values.get("target_predict")
        if target_predict is None:
            target_predict = values["target_logits"].argmax(-1).view(batch_size, num_nodes)
        predicts.fill_(-1)
        accept_index.fill_(-1)
        ops.verify_tree_greedy(
            predicts, accept_index, accept_token_num, values["candidates"], values["retrieve_index"],
            values["retrieve_next_token"], values["retrieve_next_sibling"], target_predict,
        )  # fmt: skip
        return {"predicts": predicts, "accept_index": accept_index, "accept_token_num": accept_token_num}

    return run
