"""Suffix decoding: drafts from suffix trees of the request itself and of past responses, which live on the host.

The host is a step behind the device. So that the device never waits, the host offers more than a step can use: from the
last token that it knows, far enough to reach past what the running step may bring. The device follows the tokens that
have come since, and drafts what lies below them; where they lead out of the offer, the row has no drafts in that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ..batch.batch import Batch
from ..batch.state import BatchState
from ..config.eagle_config import EAGLEConfig
from ..requests.request import Request
from .protocol import Proposal
from .suffix_cache import SuffixCache, SuffixDraft
from .suffix_drafts import ROUNDING_UP
from .trees import tree_of


class Offers:
    """What the host offers to R rows, in one piece of memory that is sent at once, before every step.

    tokens   [R, W] int64  of nodes 1..W, -1 padded
    parents  [R, W] int64  their parents' nodes, 0 the root
    bases    [R] int64     place of the root in the row's history
    matches  [R] int64     the longest match, at the root
    """

    def __init__(self, num_rows: int, width: int, **options: Any):
        sizes = [num_rows * width, num_rows * width, num_rows, num_rows]
        self.all = torch.full((sum(sizes),), -1, dtype=torch.int64, **options)
        tokens, parents, self.bases, self.matches = self.all.split(sizes)
        self.tokens, self.parents = tokens.view(num_rows, width), parents.view(num_rows, width)


class _Offer(NamedTuple):
    """What the host offers to a row; see `Offers`."""

    base: int
    match: int
    draft: SuffixDraft


class SuffixDrafter:
    """The device's part: what is left of an offer.

    feed: who sends them, shared by all drafters of a batch.
    """

    reader = None
    reads_history = True
    feed: SuffixFeed

    def __init__(self, config: EAGLEConfig):
        self._config = config
        self.num_steps, self.num_nodes = config.num_steps, config.num_verify_tokens
        self.num_slots = self.num_nodes

    def propose(self, batch: Batch) -> Proposal:
        """See `Drafter`."""
        offers, rows, history = self.feed.offers, batch.rows, batch.state.history[batch.rows]
        places = offers.bases[rows, None] + torch.arange(1, self.feed.most_tokens + 1, device=history.device)
        is_since = places <= batch.lengths[:, None]
        path = torch.where(is_since, history.gather(1, places.clamp(0, history.shape[1] - 1)), -1)
        found = ops.reroot_drafts(
            offers.tokens[rows],
            offers.parents[rows],
            path,
            num_speculative_tokens=self.num_nodes - 1,
            spec_steps=self.num_steps,
        )
        # longer by the tokens since at most, no longer than the trees know any
        matches = (offers.matches[rows] + is_since.sum(1)).clamp(max=self._config.suffix_decoding_max_tree_depth - 1)
        most = matches.double() * self._config.suffix_decoding_max_spec_factor + ROUNDING_UP
        is_allowed = torch.arange(1, self.num_nodes, device=most.device) <= most[:, None]
        tokens, parents = (torch.where(is_allowed, nodes, -1) for nodes in (found.tokens, found.parents))
        return Proposal(
            tree_of(batch, tokens, parents, self._config),
            path_probs=lambda: self.feed.path_probs(batch.rows, path, tokens, parents),
        )


class SuffixFeed:
    """The host's part: the suffix trees, and what they offer to each row.

    More drafts are asked for than a step has, as much of them is not to come, so another match may be the best than
    for that number: on text that is edited this accepts more.

    configs      of all trees that steps choose from
    lag          steps that the host is behind
    most_tokens  that a step may bring
    """

    def __init__(self, configs: Sequence[EAGLEConfig], cache: SuffixCache, state: BatchState, lag: int):
        self._config, self._cache = configs[0], cache
        self.most_tokens = 1 + max(config.num_steps for config in configs)
        self._ahead = lag * self.most_tokens
        # of a tree twice as many drafts as a step has, since much of it will not come
        self._is_tree = any(config.topk > 1 for config in configs)
        num_drafts = max(config.num_verify_tokens for config in configs) - 1
        self._width = (2 if self._is_tree else 1) * num_drafts + self.most_tokens
        self.offers = Offers(state.num_rows, self._width, device=state.lengths.device)
        self._running: set[Request] = set()
        self._made: dict[Request, _Offer] = {}
        self._sent: Sequence[tuple[int, Request]] = ()

    def start(self, request: Request) -> None:
        """A request begins."""
        self._cache.start(request, request.prompt)
        self._running.add(request)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """Tokens that it has brought; what was offered is out of date."""
        self._cache.extend(request, tokens)
        self._made.pop(request, None)

    def stop(self, request: Request) -> None:
        """It has ended, perhaps before it began."""
        if request in self._running:
            self._running.remove(request)
            self._cache.stop(request)
        self._made.pop(request, None)

    def think(self, requests: Iterable[Request]) -> None:
        """Makes the offers of those that have none, while the device is busy."""
        for request in requests:
            if request not in self._made and self._serves(request):
                base = len(request.prompt) + len(request.output_ids) - 1
                self._made[request] = _Offer(base, self._cache.longest_match(request), self._draft(request))

    def send(self, rows: Sequence[tuple[int, Request]]) -> None:
        """Their offers go to the device, for the step that is launched next."""
        self.think(request for _, request in rows)
        self._sent = rows
        num_rows, width = self.offers.tokens.shape
        sent = Offers(num_rows, width, pin_memory=self.offers.all.device.type == "cuda")
        tokens, parents, bases, matches = (
            piece.numpy() for piece in (sent.tokens, sent.parents, sent.bases, sent.matches)
        )
        for row, request in rows:
            if not self._serves(request):
                continue
            bases[row], matches[row], draft = self._made[request]
            count = len(draft.token_ids)
            tokens[row, :count] = draft.token_ids
            # of nodes, where the root is 0
            parents[row, :count] = [1 + parent for parent in draft.parents]
        self.offers.all.copy_(sent.all, non_blocking=True)

    def path_probs(self, rows: slice, path: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `Proposal`, of drafts [B, N - 1] that lie below `path` [B, T] in what was sent last: shares of what
        followed the match, and the path."""
        probs = torch.full(tokens.shape, float("nan"))
        paths, tokens, parents = path.tolist(), tokens.tolist(), parents.tolist()
        for row, request in self._sent:
            place = row - (rows.start or 0)
            if not (0 <= place < len(paths) and request in self._made):
                continue
            draft = self._made[request].draft
            nodes = {key: node for node, key in reversed(list(enumerate(zip(draft.parents, draft.token_ids))))}
            root = -1
            for token in paths[place]:
                root = root if token < 0 else nodes.get((root, token))
            reached, whole = [root], 1.0 if root in (-1, None) else draft.probs[root]
            for number, (token, parent) in enumerate(zip(tokens[place], parents[place])):
                node = nodes.get((reached[parent], token)) if parent >= 0 else None
                reached.append(node)
                if node is not None:
                    probs[place, number] = draft.probs[node] / whole
        return probs.to(path.device)

    def _serves(self, request: Request) -> bool:
        """Whether its drafts are to come from here; the trees learn from all."""
        return (request.params.drafter or self._config.methods[0]) == "suffix"

    def _draft(self, request: Request) -> SuffixDraft:
        config = self._config
        return self._cache.speculate(
            request,
            max_spec_tokens=self._width,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            # once the tokens that are on their way have come, the match is longer by as many
            max_spec_offset=self._ahead,
            min_token_prob=config.suffix_decoding_min_token_prob,
            use_tree=self._is_tree,
        )
