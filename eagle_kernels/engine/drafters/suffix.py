"""Suffix decoding: drafts are what followed the last tokens of a request earlier, in its own text or in a response.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (2024), with the scores and
limits of Arctic Inference. The trees are kept on the host, in pure Python that overlaps the forward pass on a GPU.

The host is a step behind the device. So that the device never waits, the host offers more drafts than a step can use:
from the last token that it knows, far enough to reach past what the running step may bring. The device follows the
tokens that have come since, and drafts what lies below them. A row whose tokens leave the offer has no drafts.
"""

import contextlib
import functools
import math
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import ops
from ..batch.state import Batch, BatchState
from ..config.eagle_config import EAGLEConfig
from ..requests.request import Request
from .protocol import Drafter, Drafts, Proposal, copy_probs, tree_of
from .suffix_automaton import Cursor, SuffixAutomaton
from .suffix_drafts import ROUNDING_UP, SuffixDraft, SuffixSearch

# what places of nodes are added to, to be no tokens
_PLACES = 2**40


class _Request:
    """Holds a running request's own counts, its last tokens, and its response, which the global automaton has as well.

    response     None: the global automaton does not have it
    end          where the text ends in its own counts
    shared_end   where the response ends in the global automaton
    """

    def __init__(self, max_length: int, response: array | None, prompt: Sequence[int]):
        self.counts, self.end = SuffixAutomaton(max_length), Cursor()
        self.response, self.shared_end = response, Cursor()
        self.context: deque[int] = deque(maxlen=max_length - 1)
        self._append(prompt)

    def _append(self, tokens: Sequence[int]) -> None:
        self.end = self.counts.extend(self.end, tokens)
        self.context += tokens

    def respond(self, tokens: Sequence[int], shared: SuffixAutomaton) -> None:
        """Appends tokens to the text, and to the response in the global automaton."""
        self._append(tokens)
        if self.response is not None:
            self.shared_end = shared.extend(self.shared_end, tokens)
            self.response.extend(tokens)

    def leave_responses(self) -> None:
        """Goes on without a response in the global automaton."""
        self.response = None

    def matches(self, shared: SuffixAutomaton) -> tuple[Cursor, Cursor]:
        """Returns the longest matches in the request's own text and in the responses."""
        end = self.shared_end
        if self.response is None or end.size < shared.max_length - 1:
            end = shared.match(self.context)
        return self.counts.followed(self.end), shared.followed(end)


class SuffixCache:
    """Counts what followed which tokens, in the text of every running request and in the responses of all. A running
    request has a *local* automaton of its prompt and response. The *global* one holds the responses of running and past
    requests. Both know strings of up to `max_tree_depth` tokens, a match and its drafts together.

    max_tree_depth       time and memory hardly depend on it
    max_cached_requests  responses in the global automaton; -1: all of them, 0: none. The oldest makes room for a new
                         one. If its request still runs, it goes on with its local automaton and other responses
    """

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1):
        self.max_tree_depth, self.max_cached_requests = max_tree_depth, max_cached_requests
        self._counts = SuffixAutomaton(max_tree_depth)
        self._requests: dict[Hashable, _Request] = {}
        self._responses: deque[array] = deque()

    def start(self, request: Hashable, prompt: Sequence[int]) -> None:
        """Starts a request; its id may be that of one that was stopped."""
        self._requests[request] = _Request(self.max_tree_depth, self._new_response(), prompt)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Appends accepted tokens to a request's response."""
        self._requests[request].respond(tokens, self._counts)

    def stop(self, request: Hashable) -> None:
        """Ends a request, if it runs. Its own text is forgotten; its response stays in the global automaton."""
        self._requests.pop(request, None)

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Hides earlier responses inside the context, and forgets those from inside after it. No request may run when
        it begins."""
        if self._requests:
            raise RuntimeError(f"SuffixCache: forgetting must begin while no request runs, got {len(self._requests)}")
        known = self._counts, self._responses
        self._counts, self._responses = SuffixAutomaton(self.max_tree_depth), deque()
        try:
            yield
        finally:
            for running in self._requests.values():  # their responses are in the automaton that goes
                running.leave_responses()
            self._counts, self._responses = known

    def speculate(
        self, request: Hashable, *, max_spec_tokens: int, max_spec_factor: float = 1.0, max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1, use_tree: bool = False,
    ) -> SuffixDraft:  # fmt: skip
        """Returns the best drafts to follow the text of a request.

        A match is the last m tokens of the text if they occur elsewhere, 1 <= m < max_tree_depth. It allows
        min(max_spec_tokens, m * max_spec_factor + max_spec_offset) drafts, rounded down, at most max_tree_depth - m
        deep. The probability of a draft is its parent's times the share of occurrences of everything up to the parent
        that the draft follows; none is below min_token_prob.

        A path follows the most frequent token, of equals the one that was added last. A tree takes the most probable
        drafts: of equals a child of the draft that was taken first, then the one that was added last. The sum of the
        probabilities is the score. The best score of all matches wins, of equals the longest match, and the request's
        own text wins against responses. Without any draft, match_len is the longest match in the request's own text.
        """
        running = self._requests[request]
        limits = _limits(self.max_tree_depth, max_spec_tokens, max_spec_factor, max_spec_offset)
        own, shared = running.matches(self._counts)
        options, draft = (*limits, min_token_prob, use_tree), SuffixDraft([], [], [], 0.0, running.end.size)
        draft = SuffixSearch(running.counts, *options).best_draft(own, draft)
        return SuffixSearch(self._counts, *options).best_draft(shared, draft)

    def longest_match(self, request: Hashable) -> int:
        """Returns how many of the last tokens of a request's text were followed by something, anywhere."""
        return max(match.size for match in self._requests[request].matches(self._counts))

    def _new_response(self) -> array | None:
        """Returns an empty response, for which the oldest makes room; None if none is remembered."""
        if self.max_cached_requests == 0:
            return None
        response = array("i")
        if self.max_cached_requests > 0:
            self._responses.append(response)
            if len(self._responses) > self.max_cached_requests:
                oldest = self._responses.popleft()
                self._counts.remove(oldest)
                for running in self._requests.values():
                    if running.response is oldest:
                        running.leave_responses()
        return response


@functools.lru_cache(maxsize=64)
def _limits(
    max_tree_depth: int, max_spec_tokens: int, max_spec_factor: float, max_spec_offset: float
) -> tuple[list[int], list[int]]:
    """Returns the limits of `SuffixSearch`."""
    most_drafts = (length * max_spec_factor + max_spec_offset + ROUNDING_UP for length in range(max_tree_depth))
    drafts = [max(0, int(min(max_spec_tokens, most))) for most in most_drafts]
    return drafts, [min(most, max_tree_depth - length) for length, most in enumerate(drafts)]


class Offers:
    """Holds the host's offers to R rows, in one piece of memory that is sent at once before every step.

    tokens   [R, W] int64  tokens of nodes 1..W, -1 padded
    parents  [R, W] int64  their parents' nodes, 0 the root
    bases    [R] int64     place of the root in the row's history
    matches  [R] int64     length of the longest match at the root
    depths   [R, W] int64  depths of the nodes, and
    probs    [R, W] fp64   how often each follows its parent, as a share; both of no width unless they are wanted
    """

    def __init__(
        self, num_rows: int, width: int, has_probs: bool, device: torch.device | str = "cpu", **options: Any
    ):  # fmt: skip
        widths = width, width, 1, 1, width * has_probs, width * has_probs
        sizes = [num_rows * each for each in widths]
        self.all = torch.full((sum(sizes),), -1, dtype=torch.int64, device=device, **options)
        pieces = [piece.view(num_rows, each) for piece, each in zip(self.all.split(sizes), widths)]
        self.tokens, self.parents, bases, matches, self.depths, probs = pieces
        self.bases, self.matches, self.probs = bases[:, 0], matches[:, 0], probs.view(torch.float64)


class Offer(NamedTuple):
    """Holds the host's offer to one row; see `Offers`."""

    base: int
    match: int
    draft: SuffixDraft


class SuffixFeed:
    """Makes and sends the offers on the host, from the suffix trees. It asks for more drafts than a step verifies,
    since tokens in flight will invalidate some. Another match may be the best for that number; on text that is edited,
    more drafts are accepted this way.

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
        self.offers = Offers(state.num_rows, self._width, self._config.share_nodes, device=state.lengths.device)
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
            is_wanted = config.share_nodes or (request.params.drafter or config.methods[0]) == "suffix"
            if not is_wanted or request in self._made:  # the trees learn from all requests
                continue
            draft = self._cache.speculate(
                request, max_spec_tokens=self._width, max_spec_factor=config.suffix_decoding_max_spec_factor,
                max_spec_offset=self._ahead,  # the match will be longer by the tokens in flight
                min_token_prob=config.suffix_decoding_min_token_prob, use_tree=self._is_tree,
            )  # fmt: skip
            base = len(request.prompt) + len(request.output_ids) - 1
            self._made[request] = Offer(base, self._cache.longest_match(request), draft)

    def send(self, rows: Sequence[tuple[int, Request]]) -> None:
        """Sends the offers to the device, for the step that is launched next."""
        self.think(request for _, request in rows)
        self._sent = [(row, self._made[request]) for row, request in rows if request in self._made]
        has_probs, is_pinned = self._config.share_nodes, self.offers.all.device.type == "cuda"
        sent = Offers(*self.offers.tokens.shape, has_probs, pin_memory=is_pinned)
        pieces = sent.tokens, sent.parents, sent.bases, sent.matches, sent.depths, sent.probs
        tokens, parents, bases, matches, depths, probs = (piece.numpy() for piece in pieces)
        for row, (bases[row], matches[row], draft) in self._sent:
            count = len(draft.token_ids)
            tokens[row, :count] = draft.token_ids
            parents[row, :count] = [1 + parent for parent in draft.parents]
            if has_probs:
                depths[row, :count], probs[row, :count] = draft.steps()
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


class SuffixDrafter(Drafter):
    """Drafts, on the device, what is left of an offer of the `feed`, which all drafters of a batch share. Without a
    feed it is made for its sizes alone."""

    reads_history = True

    def __init__(self, config: EAGLEConfig, feed: SuffixFeed | None):
        super().__init__(config)
        self._feed = feed

    def propose(self, batch: Batch) -> Proposal:
        path = self._path(batch)
        tokens, parents = self._rest(batch, self._feed.offers.tokens[batch.rows], path)
        tree = tree_of(batch, tokens, parents, self._config)
        return Proposal(tree, path_probs=lambda: self._feed.path_probs(path, tokens, parents))

    def drafts(self, batch: Batch) -> Drafts:
        """Returns what is left of the offers, with the shares that they were offered with."""
        offers, rows, path = self._feed.offers, batch.rows, self._path(batch)
        tokens, place = offers.tokens[rows], torch.arange(offers.tokens.shape[1], device=path.device)
        # Nodes off the path are named by their places, by which they are found again: those on it carry its tokens,
        # and no node below its end is as deep as the path is long.
        depth = (offers.depths[rows] - 1).clamp(0, path.shape[1])
        is_on_path = tokens == pad(path, (0, 1), value=-1).gather(1, depth)
        names, parents = self._rest(batch, torch.where(is_on_path | (tokens < 0), tokens, _PLACES + place), path)
        place = (names - _PLACES).clamp(min=0)
        probs = torch.where(names < 0, 0.0, offers.probs[rows].gather(1, place))
        return Drafts(torch.where(names < 0, -1, tokens.gather(1, place)), parents, probs.float())

    def _path(self, batch: Batch) -> Tensor:
        """Returns the tokens [B, T] that have come since the offers were made, -1 padded."""
        history, bases = batch.state.history[batch.rows], self._feed.offers.bases[batch.rows, None]
        places = bases + torch.arange(1, self._feed.most_tokens + 1, device=history.device)
        is_since = places <= batch.lengths[:, None]
        return torch.where(is_since, history.gather(1, places.clamp(0, history.shape[1] - 1)), -1)

    def _rest(self, batch: Batch, tokens: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens and parents [B, N - 1] of what is left of the offers, whose nodes carry `tokens`."""
        offers, rows, config = self._feed.offers, batch.rows, self._config
        sizes = {"num_speculative_tokens": self.num_nodes - 1, "spec_steps": self.num_steps}
        found = ops.reroot_drafts(tokens, offers.parents[rows], path, **sizes)
        # the match has grown by the tokens since at most, and is at most as long as the trees know
        matches = (offers.matches[rows] + (path >= 0).sum(1)).clamp(max=config.suffix_decoding_max_tree_depth - 1)
        most = matches.double() * config.suffix_decoding_max_spec_factor + ROUNDING_UP
        is_allowed = torch.arange(1, self.num_nodes, device=most.device) <= most[:, None]
        return torch.where(is_allowed, found.tokens, -1), torch.where(is_allowed, found.parents, -1)
