"""Suffix decoding: drafts from suffix trees of the request itself and of past responses, kept on the host.

The host is a step behind the device. So that the device never waits, the host offers more drafts than a step can use:
from the last token that it knows, far enough to reach past what the running step may bring. The device follows the
tokens that have come since, and drafts what lies below them. A row whose tokens leave the offer has no drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ..batch.state import Batch, BatchState
from ..config.eagle_config import EAGLEConfig
from ..requests.request import Request
from .protocol import Drafter, Proposal, copy_probs, tree_of
from .suffix_cache import SuffixCache
from .suffix_drafts import ROUNDING_UP, SuffixDraft


class Offers:
    """Holds the host's offers to R rows, in one piece of memory that is sent at once before every step.

    tokens   [R, W] int64  tokens of nodes 1..W, -1 padded
    parents  [R, W] int64  their parents' nodes, 0 the root
    bases    [R] int64     place of the root in the row's history
    matches  [R] int64     length of the longest match at the root
    """

    def __init__(self, num_rows: int, width: int, device: torch.device | str = "cpu", **options: Any):
        sizes = [num_rows * width, num_rows * width, num_rows, num_rows]
        self.all = torch.full((sum(sizes),), -1, dtype=torch.int64, device=device, **options)
        tokens, parents, self.bases, self.matches = self.all.split(sizes)
        self.tokens, self.parents = tokens.view(num_rows, width), parents.view(num_rows, width)


class Offer(NamedTuple):
    """Holds the host's offer to one row; see `Offers`."""

    base: int
    match: int
    draft: SuffixDraft


class SuffixDrafter(Drafter):
    """Drafts, on the device, what is left of an offer of the `feed`, which all drafters of a batch share.

    feed  None: the drafter is made for its sizes alone
    """

    reads_history = True

    def __init__(self, config: EAGLEConfig, feed: SuffixFeed | None):
        super().__init__(config)
        self._feed = feed

    def propose(self, batch: Batch) -> Proposal:
        offers, rows, history = self._feed.offers, batch.rows, batch.state.history[batch.rows]
        places = offers.bases[rows, None] + torch.arange(1, self._feed.most_tokens + 1, device=history.device)
        is_since = places <= batch.lengths[:, None]
        path = torch.where(is_since, history.gather(1, places.clamp(0, history.shape[1] - 1)), -1)
        sizes = {"num_speculative_tokens": self.num_nodes - 1, "spec_steps": self.num_steps}
        found = ops.reroot_drafts(offers.tokens[rows], offers.parents[rows], path, **sizes)
        # the match has grown by the tokens since at most, and is at most as long as the trees know
        matches = (offers.matches[rows] + is_since.sum(1)).clamp(max=self._config.suffix_decoding_max_tree_depth - 1)
        most = matches.double() * self._config.suffix_decoding_max_spec_factor + ROUNDING_UP
        is_allowed = torch.arange(1, self.num_nodes, device=most.device) <= most[:, None]
        tokens, parents = (torch.where(is_allowed, nodes, -1) for nodes in (found.tokens, found.parents))
        tree = tree_of(batch, tokens, parents, self._config)
        return Proposal(tree, path_probs=lambda: self._feed.path_probs(path, tokens, parents))


class SuffixFeed:
    """Makes and sends the offers on the host, from the suffix trees.

    It asks for more drafts than a step verifies, since tokens in flight will invalidate some. Another match may be the
    best for that number; on text that is edited, more drafts are accepted this way.

    configs      the configurations of all trees that steps choose from
    lag          steps that the host is behind
    offers       what the device has been sent
    most_tokens  most tokens that a step may bring
    """

    def __init__(self, configs: Sequence[EAGLEConfig], cache: SuffixCache, state: BatchState, lag: int):
        self._config, self._cache = configs[0], cache
        self.most_tokens = 1 + max(config.num_steps for config in configs)
        self._ahead = lag * self.most_tokens
        self._is_tree = any(config.topk > 1 for config in configs)
        num_drafts = max(config.num_verify_tokens for config in configs) - 1
        # twice the drafts for trees, since tokens in flight invalidate more of a tree than of a chain
        self._width = (2 if self._is_tree else 1) * num_drafts + self.most_tokens
        self.offers = Offers(state.num_rows, self._width, device=state.lengths.device)
        self._made: dict[Request, Offer] = {}
        self._sent: Sequence[tuple[int, Offer]] = ()

    def start(self, request: Request) -> None:
        """Starts the suffix tree of a request."""
        self._cache.start(request, request.prompt)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """Adds a request's new tokens, and drops its offer, which is out of date."""
        self._cache.extend(request, tokens)
        self._made.pop(request, None)

    def stop(self, request: Request) -> None:
        """Ends a request, which may not have started."""
        self._cache.stop(request)
        self._made.pop(request, None)

    def think(self, requests: Iterable[Request]) -> None:
        """Makes offers to the requests that have none, while the device is busy."""
        config = self._config
        for request in requests:
            method = request.params.drafter or config.methods[0]
            if method != "suffix" or request in self._made:  # the trees learn from all requests
                continue
            draft = self._cache.speculate(
                request,
                max_spec_tokens=self._width,
                max_spec_factor=config.suffix_decoding_max_spec_factor,
                # the match will be longer by the tokens in flight
                max_spec_offset=self._ahead,
                min_token_prob=config.suffix_decoding_min_token_prob,
                use_tree=self._is_tree,
            )
            base = len(request.prompt) + len(request.output_ids) - 1
            self._made[request] = Offer(base, self._cache.longest_match(request), draft)

    def send(self, rows: Sequence[tuple[int, Request]]) -> None:
        """Sends the offers to the device, for the step that is launched next."""
        self.think(request for _, request in rows)
        self._sent = [(row, self._made[request]) for row, request in rows if request in self._made]
        sent = Offers(*self.offers.tokens.shape, pin_memory=self.offers.all.device.type == "cuda")
        pieces = sent.tokens, sent.parents, sent.bases, sent.matches
        tokens, parents, bases, matches = (piece.numpy() for piece in pieces)
        for row, (bases[row], matches[row], draft) in self._sent:
            count = len(draft.token_ids)
            tokens[row, :count] = draft.token_ids
            parents[row, :count] = [1 + parent for parent in draft.parents]
        self.offers.all.copy_(sent.all, non_blocking=True)

    def path_probs(self, path: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Returns `Proposal.path_probs` of drafts [B, N - 1], which lie below `path` [B, T], -1 padded, in the offers
        that were sent last: their shares of what followed the match and the path."""
        options = {"dtype": torch.float32, "device": "cpu"}
        probs = torch.full(tokens.shape, math.nan, **options)
        paths, tokens, parents = path.tolist(), tokens.tolist(), parents.tolist()
        for row, (_, _, draft) in self._sent:
            if row < len(paths):
                since = [token for token in paths[row] if token >= 0]
                known = zip(draft.token_ids, [1 + parent for parent in draft.parents])
                copied = copy_probs(zip(tokens[row], parents[row]), known, draft.probs, since)
                probs[row] = torch.tensor(copied, **options)
        return probs.to(path.device)
