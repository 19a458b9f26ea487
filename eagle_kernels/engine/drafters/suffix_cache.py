"""Suffix decoding: drafts are what followed the last tokens of a request earlier, in its own text or in a response.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (2024), with the scores and
limits of Arctic Inference. Pure Python on the host, so that it can overlap the target's forward pass on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from array import array
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NoReturn

from ...runtime import check
from ..config.drafting_options import MAX_TREE_DEPTH
from .suffix_automaton import Cursor, SuffixAutomaton
from .suffix_drafts import ROUNDING_UP, SuffixDraft, SuffixSearch

_MOST_TOKEN_IDS = 2**31  # they are stored as int32


class _Request:
    """Holds a running request's own counts, its last tokens, and its response, which the global automaton has as well.

    response     None: the global automaton does not have it
    end          where the text ends in its own counts
    shared_end   where the response ends in the global automaton
    """

    def __init__(self, max_length: int, response: array | None):
        self.counts, self.end = SuffixAutomaton(max_length), Cursor()
        self.response, self.shared_end = response, Cursor()
        self.context: deque[int] = deque(maxlen=max_length - 1)

    def append(self, tokens: list[int]) -> None:
        self.end = self.counts.extend(self.end, tokens)
        self.context += tokens


class SuffixCache:
    """Counts what followed which tokens, in the text of every running request and in the responses of all.

    A running request has a *local* automaton of its prompt and response. The *global* one holds the responses of
    running and past requests. Both know strings of up to `max_tree_depth` tokens, a match and its drafts together.

    max_tree_depth       2..65536; time and memory hardly depend on it
    max_cached_requests  responses in the global automaton; -1: all of them, 0: none. The oldest makes room for a new
                         one. If its request still runs, it goes on with its local automaton and other responses
    """

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1):
        args = check.Arguments("SuffixCache", locals())
        self.max_tree_depth = args.integer("max_tree_depth", 2, MAX_TREE_DEPTH)
        self.max_cached_requests = args.integer("max_cached_requests", -1)
        self._counts = SuffixAutomaton(max_tree_depth)
        self._requests: dict[Hashable, _Request] = {}
        self._responses: deque[array] = deque()

    def start(self, request: Hashable, prompt: Sequence[int]) -> None:
        """Starts a request; its id may be that of one that was stopped."""
        if request in self._requests:
            _fail("start", "request", "not be running already", repr(request))
        tokens = _token_ids("start", "prompt", prompt)
        running = self._requests[request] = _Request(self.max_tree_depth, self._new_response())
        running.append(tokens)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Appends accepted tokens to a request's response."""
        running, tokens = self._running("extend", request), _token_ids("extend", "tokens", tokens)
        running.append(tokens)
        if running.response is not None:
            running.shared_end = self._counts.extend(running.shared_end, tokens)
            running.response.extend(tokens)

    def stop(self, request: Hashable) -> None:
        """Ends a request. Its own text is forgotten; its response stays in the global automaton."""
        self._running("stop", request)
        del self._requests[request]

    def __contains__(self, request: Hashable) -> bool:
        """Returns whether a request runs."""
        return request in self._requests

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Hides earlier responses inside the context, and forgets those from inside after it.

        No request may run when it begins.
        """
        if self._requests:
            raise RuntimeError(f"SuffixCache: forgetting must begin while no request runs, got {len(self._requests)}")
        known = self._counts, self._responses
        self._counts, self._responses = SuffixAutomaton(self.max_tree_depth), deque()
        try:
            yield
        finally:
            for running in self._requests.values():  # their responses are in the automaton that goes
                running.response = None
            self._counts, self._responses = known

    def speculate(
        self,
        request: Hashable,
        *,
        max_spec_tokens: int,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree: bool = False,
    ) -> SuffixDraft:
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
        running = self._running("speculate", request)
        values = (max_spec_tokens, max_spec_factor, max_spec_offset, min_token_prob)
        try:
            limits = _limits(self.max_tree_depth, *values)
        except TypeError:  # an unhashable argument, which the check names
            limits = _limits.__wrapped__(self.max_tree_depth, *values)
        own, shared = self._matches(running)
        options, draft = (*limits, min_token_prob, use_tree), SuffixDraft([], [], [], 0.0, running.end.size)
        draft = SuffixSearch(running.counts, *options).best_draft(own, draft)
        return SuffixSearch(self._counts, *options).best_draft(shared, draft)

    def longest_match(self, request: Hashable) -> int:
        """Returns how many of the last tokens of a request's text were followed by something, anywhere."""
        return max(match.size for match in self._matches(self._running("longest_match", request)))

    @property
    def num_states(self) -> tuple[int, int]:
        """Sizes of all local automata together, and of the global one."""
        return sum(request.counts.num_states for request in self._requests.values()), self._counts.num_states

    def _running(self, op: str, request: Hashable) -> _Request:
        running = self._requests.get(request)
        if running is None:
            _fail(op, "request", "be running (start begins one)", repr(request))
        return running

    def _new_response(self) -> array | None:
        """Returns an empty response, for which the oldest makes room; None if none is remembered."""
        most, response = self.max_cached_requests, array("i")
        if most > 0:
            self._responses.append(response)
        if len(self._responses) > most > 0:
            oldest = self._responses.popleft()
            self._counts.remove(oldest)
            for running in self._requests.values():
                if running.response is oldest:
                    running.response = None
        return None if most == 0 else response

    def _matches(self, running: _Request) -> tuple[Cursor, Cursor]:
        """Returns the longest matches in the request's own text and in the responses."""
        end = running.shared_end
        if running.response is None or end.size < self.max_tree_depth - 1:
            end = self._counts.match(running.context)
        return running.counts.followed(running.end), self._counts.followed(end)


@functools.lru_cache(maxsize=64, typed=True)
def _limits(
    max_tree_depth: int, max_spec_tokens: int, max_spec_factor: float, max_spec_offset: float, min_token_prob: float
) -> tuple[list[int], list[int]]:
    """Checks the arguments of `speculate`, and returns the limits of `SuffixSearch`."""
    args = check.Arguments("SuffixCache.speculate", locals())
    args.integer("max_spec_tokens", 0)
    for name, low in (("max_spec_factor", 0), ("max_spec_offset", None), ("min_token_prob", 0)):
        args.number(name, low)
    most_drafts = (length * max_spec_factor + max_spec_offset + ROUNDING_UP for length in range(max_tree_depth))
    drafts = [max(0, int(min(max_spec_tokens, most))) for most in most_drafts]
    return drafts, [min(most, max_tree_depth - length) for length, most in enumerate(drafts)]


def _token_ids(op: str, name: str, values: Sequence[int]) -> list[int]:
    try:
        tokens = list(map(operator.index, values))
    except TypeError:
        _fail(op, name, "be a sequence of ints", type(values).__name__, TypeError)
    if tokens and not 0 <= min(tokens) <= max(tokens) < _MOST_TOKEN_IDS:
        wrong = next(token for token in tokens if not 0 <= token < _MOST_TOKEN_IDS)
        _fail(op, name, f"hold token ids in 0..{_MOST_TOKEN_IDS - 1}", wrong)
    return tokens


def _fail(op: str, name: str, rule: str, got: object, kind: type[Exception] = ValueError) -> NoReturn:
    check.Arguments(f"SuffixCache.{op}", {}).fail(name, rule, got, kind)
