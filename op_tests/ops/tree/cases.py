"""Arguments of the tree ops, as their tests and others need them."""

import torch

from op_tests.harness import to_device
from op_tests.harness.trees import random_drafts
from op_tests.ops.tree.masks import random_parents


def make_tree(batch_size, topk, spec_steps, num_nodes, *, mode="packed", dtype=torch.int64, device="cpu"):
    parent_list, top_scores_index, draft_tokens = random_drafts(batch_size, topk, spec_steps, num_nodes)
    seq_lens = torch.randint(0, 40, (batch_size,))
    values = {
        "verified_id": torch.randint(97, (batch_size,)),
        "parent_list": parent_list,
        "top_scores_index": top_scores_index,
        "draft_tokens": draft_tokens,
        "seq_lens": seq_lens,
    }
    values = {key: value.to(device=device, dtype=dtype) for key, value in values.items()}
    return values | {
        "seq_lens_sum": int(seq_lens.sum()) if mode == "full_mask" else None,
        "topk": topk,
        "spec_steps": spec_steps,
        "num_verify_tokens": num_nodes,
        "tree_mask_mode": mode,
    }


def make_scored(
    batch_size, topk, spec_steps, num_nodes, *, mode="packed", dtype=torch.int64, is_tied=False, device="cpu"
):
    """Scores as drafting makes them, on a grid where ties are common: no child scores above its parent."""
    scores = -torch.randint(0, 2 if is_tied else 16, (batch_size, topk)).float() / 4
    parent_list = torch.full((batch_size, 1), -1)
    beams, beam_scores, first = torch.arange(topk).expand(batch_size, -1), scores, 0
    for level in range(1, spec_steps):
        parent_list = torch.cat([parent_list, beams], dim=1)
        drop = torch.randint(0, 2 if is_tied else 16, (batch_size, topk, topk)).float() / 4
        level_scores = (beam_scores[:, :, None] - drop).flatten(1)
        scores = torch.cat([scores, level_scores], dim=1)
        first = topk + (level - 1) * topk * topk
        best = level_scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
        beams, beam_scores = first + best, level_scores.gather(1, best)
    seq_lens = torch.randint(0, 40, (batch_size,))
    integers = {
        "verified_id": torch.randint(97, (batch_size,)),
        "candidate_tokens": torch.randint(97, scores.shape),
        "parent_list": parent_list,
        "seq_lens": seq_lens,
    }
    values = {key: value.to(device=device, dtype=dtype) for key, value in integers.items()}
    return values | {
        "candidate_scores": scores.to(device),
        "seq_lens_sum": int(seq_lens.sum()) if mode == "full_mask" else None,
        "topk": topk,
        "spec_steps": spec_steps,
        "num_verify_tokens": num_nodes,
        "tree_mask_mode": mode,
    }


def make_parents(batch_size, num_nodes, *, mode="packed", dtype=torch.int64, parents=None, device="cpu"):
    seq_lens = torch.randint(0, 20, (batch_size,))
    parents = random_parents(batch_size, num_nodes) if parents is None else parents
    values = {
        "verified_id": torch.randint(97, (batch_size,)),
        "draft_tokens": torch.randint(97, (batch_size, num_nodes - 1)),
        "parents": parents[:, 1:].contiguous(),
        "seq_lens": seq_lens,
    }
    values = {name: value.to(device, dtype) for name, value in values.items()}
    seq_lens_sum = int(seq_lens.sum()) if mode == "full_mask" else None
    return values | {"seq_lens_sum": seq_lens_sum, "num_verify_tokens": num_nodes, "tree_mask_mode": mode}


def make_words(batch_size, num_nodes, *, mode="qlen_only", dtype=torch.int64, longest=20, device="cpu"):
    """Words of any bits, those past the last key too."""
    seq_lens = torch.randint(0, longest, (batch_size,))
    words = torch.randint(-(2**63), 2**63 - 1, (batch_size, num_nodes, -(-num_nodes // 64)))
    values = {"tree_mask": words, "tree_mask_mode": mode}
    if mode == "full_mask":
        values |= {"seq_lens": seq_lens.to(dtype), "seq_lens_sum": int(seq_lens.sum())}
    return to_device(values, device)


def make_block(
    batch_size, depth, topk, num_nodes, *, vocab_size=None, mode="packed", dtype=torch.float32, has_transitions=False,
    has_budget=False, is_mapped=False, grain=64, device="cpu",
):  # fmt: skip
    """Candidates on a grid, whose sums are exact and often equal, or logits with `vocab_size`."""
    seq_lens = torch.randint(0, 40, (batch_size,))
    values = {"verified_id": torch.randint(97, (batch_size,)), "logits": None, "seq_lens": seq_lens}
    if vocab_size is None:
        values["candidate_scores"] = -torch.randint(0, 4 * grain, (batch_size, depth, topk)).float() / grain
        values["candidate_tokens"] = torch.randint(97, (batch_size, depth, topk))
    else:
        values["logits"] = torch.randn(batch_size, depth, vocab_size).mul(3).to(dtype)
    if has_transitions:
        shape = batch_size, depth - 1, topk, topk
        values["transition_scores"] = torch.randint(-2 * grain, grain + 1, shape).float() / grain
    if has_budget:
        values["num_nodes"] = torch.randint(1, num_nodes + 1, (batch_size,))
    if is_mapped:
        values["draft_to_target"] = torch.randint(0, 3, (vocab_size,)).cumsum(0)
    return to_device(values, device) | {
        "seq_lens_sum": int(seq_lens.sum()) if mode == "full_mask" else None,
        "topk": topk,
        "num_verify_tokens": num_nodes,
        "tree_mask_mode": mode,
    }
