"""Trees of drafts in vLLM: to its scheduler a tree is a chain of N - 1 placeholders of which some number was accepted.

A step, in the order in which things happen
    1. `Trees.lay_out`: vLLM has laid the nodes of a tree out as rows, in slots one after another. Each row gets the
       position of its depth, and a mask of the nodes that it sees.
    2. The target attends (attention.py), and `TreeVerifier` (tree_verification.py) walks the trees.
    3. `TreeDrafts` (tree_drafting.py): keys and values of the accepted paths move to the front, in all layers, before
       anything else reads them. Tokens and hidden states of the paths come to the front rows, so that vLLM's first pass
       of the draft sees a chain. Then levels of beams are drafted, and the best candidates of all are the next tree.
Nodes are in the order of their ids, so parents come before children, and a list that vLLM cuts is a tree.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

import torch

from ...ops.attention.shared.drafts import MAX_DRAFT_KEYS, MAX_QUERY
from ...ops.tree.shared.levels import MAX_TOPK
from ...ops.tree.shared.tree_contract import MAX_CANDIDATES
from ...runtime import check

OPTION = "eagle_kernels"  # of --additional-config
# The most requests at once, and the tree that they get: topk, depth, nodes. Few requests leave the GPU waiting for
# memory; with more of them the target's time grows with every node.
PRESETS = ((4, (8, 5, 64)), (16, (4, 4, 16)), (float("inf"), (4, 3, 8)))


class TreeShape(NamedTuple):
    """The trees of all requests: `topk` beams on each of `depth` levels, and `num_nodes` nodes, the root included."""

    topk: int
    depth: int
    num_nodes: int

    @property
    def num_words(self) -> int:
        """Returns how many words hold a bit for each node."""
        return -(-self.num_nodes // 64)

    @property
    def num_candidates(self) -> int:
        """Returns how many tokens a draft chooses the nodes from."""
        return self.topk + (self.depth - 1) * self.topk**2


def preset(max_requests: int | None) -> TreeShape:
    """Returns the shape for this number of requests at once; None: vLLM chooses it, and takes many."""
    count = float("inf") if max_requests is None else max_requests
    return TreeShape(*next(shape for most, shape in PRESETS if count <= most))


def shape_of(vllm_config) -> TreeShape | None:
    """Returns the shape that a configuration asks for; None: chains.

    Raises:
        ValueError: a number is missing, unknown, or out of its range.
    """
    options, speculation = vllm_config.additional_config, vllm_config.speculative_config
    asked = options.get(OPTION) if isinstance(options, dict) else None
    if asked is None or speculation is None:
        if isinstance(options, dict) and OPTION not in options and get_close_matches(OPTION, options, 1, 0.8):
            raise ValueError(f"--additional-config must name {OPTION!r} where trees are wanted; got {[*options]}")
        return None
    if not isinstance(asked, dict) or set(asked) != {"topk", "depth"}:
        raise ValueError(f"{OPTION} in --additional-config must name topk and depth, or be {{}}; got {asked!r}")
    shape = TreeShape(asked["topk"], asked["depth"], speculation.num_speculative_tokens + 1)
    for name, value, most in (("topk", shape.topk, MAX_TOPK), ("depth", shape.depth, MAX_QUERY - 1)):
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{OPTION} in --additional-config: {name} must be an integer in 1..{most}, got {value!r}")
    candidates, keys = shape.num_candidates, shape.topk * (shape.depth - 1)
    if candidates > MAX_CANDIDATES or keys > MAX_DRAFT_KEYS:
        raise ValueError(
            f"{OPTION} in --additional-config: topk {shape.topk} with depth {shape.depth} has {candidates} candidates "
            f"and {keys} beams below the first level; at most {MAX_CANDIDATES} and {MAX_DRAFT_KEYS} are allowed"
        )
    # a path must fit, and an empty list is a chain's business
    least, most = max(shape.depth, 2), min(MAX_QUERY - 1, candidates)
    if not least <= shape.num_nodes - 1 <= most:
        raise ValueError(
            f"num_speculative_tokens must be in {least}..{most} for trees of topk {shape.topk} and depth {shape.depth}"
            f", got {shape.num_nodes - 1}"
        )
    return shape


class Trees:
    """The trees of a worker's requests, at the requests' places in vLLM's states, and those of the current step.

    state: int64 [3 + W, R, N], of each node: its depth less its number; its first child and its next sibling, -1 for
        none; and W words of the nodes that it sees. At first all trees are chains.
    current: the same of the requests of a step, [3 + W, B, N]; None without drafts.
    row_mask: int64 [T, W], what each row of a step sees of the rows of its own request. CUDA graphs read it, and:
    accept_index: int32 [R, S + 1], b * N + node of the paths that were accepted last, -1 padded, by row of the batch.
    num_accepted: int32 [R], without the root; -1 for a row without a request, and for all where there were no trees.
    num_noted: how many of its first rows may be others than -1.
    """

    def __init__(self, shape: TreeShape, max_requests: int, max_rows: int, device: torch.device):
        self.shape, num_nodes, num_words = shape, shape.num_nodes, shape.num_words
        node, word = torch.arange(num_nodes, device="cpu"), torch.arange(num_words, device="cpu")
        last = node[:, None] - 64 * word  # of the nodes in a word that are seen in a chain
        # shifted in two steps: a shift by 64 has no meaning
        seen = torch.where(last >= 63, -1, (2 << last.clamp(0, 62)) - 1).masked_fill(last < 0, 0)
        child = torch.where(node + 1 < num_nodes, node + 1, -1)
        chain = torch.cat([torch.stack([torch.zeros_like(node), child, torch.full_like(node, -1)]), seen.T])
        self.chain = chain[:, None].to(device)  # [3 + W, 1, N]
        self.state = self.chain.repeat(1, max_requests, 1)
        self.current: torch.Tensor | None = None
        self.row_mask = self.chain[3:, 0, :1].T.repeat(max_rows, 1)
        self.accept_index = torch.full((max_requests, shape.depth + 1), -1, dtype=torch.int32, device=device)
        self.num_accepted = torch.full((max_requests,), -1, dtype=torch.int32, device=device)
        self.num_noted = 0

    def lay_out(self, batch) -> None:
        """Gives the rows of a step, of vLLM's InputBatch, the positions of their depths, and their masks."""
        num_nodes, count = self.shape.num_nodes, batch.num_reqs
        if batch.num_draft_tokens == 0:
            self.forget()
        else:
            self.current = self.state.index_select(1, batch.idx_mapping)
        if batch.num_draft_tokens == count * (num_nodes - 1) and batch.num_tokens == count * num_nodes:
            of_row = self.current.flatten(1)
        else:
            states = self.chain if self.current is None else torch.cat([self.current, self.chain], 1)
            of_row = states.flatten(1).index_select(1, self._nodes(batch))
        self.row_mask[: batch.num_tokens].copy_(of_row[3:].T)
        if self.current is not None:
            if check.DEBUG:
                self._check_rows(batch)
            batch.positions[: batch.num_tokens].add_(of_row[0])  # += would also copy them onto themselves

    @staticmethod
    def _check_rows(batch) -> None:
        """Raises RuntimeError where rows are not at the positions of their slots; EAGLE_KERNELS_DEBUG=1 asks for it."""
        bounds = batch.query_start_loc[: batch.num_reqs + 1].long()
        first = (batch.seq_lens[: batch.num_reqs] - bounds[1:]).repeat_interleave(bounds.diff())
        row = torch.arange(batch.num_tokens, device=bounds.device)
        if not torch.equal(batch.positions[: batch.num_tokens], first + row):
            raise RuntimeError("eagle_kernels: vLLM's positions of a step with trees do not follow one another")

    def _nodes(self, batch) -> torch.Tensor:
        """Returns which node of `current`, with a chain after it, each row int64 [T] of a step with other rows is.

        The rows of a request with drafts are a tree; rows of prompts and single ones see what a chain does.
        """
        num_nodes, count = self.shape.num_nodes, batch.num_reqs
        lengths = torch.from_numpy(batch.num_scheduled_tokens).long()
        local = torch.arange(batch.num_tokens, device="cpu") - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        first = torch.zeros_like(lengths)
        if self.current is not None:
            drafts = torch.from_numpy(batch.num_draft_tokens_per_req)
            if (lengths != drafts + 1)[drafts > 0].any():
                raise RuntimeError("eagle_kernels: vLLM scheduled drafts after rows that are no tree's")
            first = torch.where(drafts > 0, torch.arange(count, device="cpu"), count) * num_nodes
        # rows of prompts past a tree's size are not read by this mask
        node = first.repeat_interleave(lengths) + local.clamp(max=num_nodes - 1)
        return to_device(node, batch.positions.device)

    def forget(self) -> None:
        """Notes that a step has no trees: nothing moves."""
        self.current, self.num_noted = None, 0
        self.num_accepted.fill_(-1)

    def note(self, path: torch.Tensor, number: torch.Tensor) -> None:
        """Notes what was accepted of the trees of a step, [B, S + 1] and [B]."""
        size = len(number)
        self.accept_index[:size], self.num_accepted[:size] = path, number
        if size < self.num_noted:
            self.num_accepted[size : self.num_noted] = -1
        self.num_noted = size

    def keep(self, places: torch.Tensor, drafted: torch.Tensor) -> None:
        """Keeps new trees, as in `state`, of the requests at these places."""
        self.state[:, places] = drafted[:, : len(places)]
        if check.DEBUG:
            self._check(drafted[:, : len(places)])

    def _check(self, drafted: torch.Tensor) -> None:
        """Raises RuntimeError where new trees are none; EAGLE_KERNELS_DEBUG=1 asks for it."""
        node = torch.arange(self.shape.num_nodes, device=drafted.device)
        depth, child, sibling, words = drafted[0] + node, drafted[1], drafted[2], drafted[3:]
        own = words.gather(0, (node // 64).expand_as(words[:1])) >> (node % 64) & 1
        rules = {
            "the root is at depth 0, and others below it": (depth > 0) == (node > 0),
            "none is deeper than the draft": depth <= self.shape.depth,
            "children and siblings come later": ((child > node) | (child == -1)) & ((sibling > node) | (sibling == -1)),
            "each node sees itself": own[0] == 1,
        }
        for rule in (rule for rule, holds in rules.items() if not holds.all()):
            raise RuntimeError(f"eagle_kernels: of the trees that were drafted it does not hold that {rule}")


class Level(NamedTuple):
    """Stands in the place of a draft layer's metadata where a level of beams is read.

    The keys and values of all levels lie beside the cache, which keeps what was accepted alone.
    """

    number: int  # from 1 on
    keys: torch.Tensor  # [R, K * (S - 1), Hkv, D]; latents and the keys beside them [R, K * (S - 1), D]
    values: torch.Tensor | None
    block_table: torch.Tensor
    prefix_lens: torch.Tensor  # int32 [B]
    ancestors: torch.Tensor  # int64 [B, K, W], of the beams


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies numbers of the host to the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
