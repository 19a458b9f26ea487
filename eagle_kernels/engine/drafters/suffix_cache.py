"""Suffix decoding: drafts are what followed the last tokens of a request before, in its own text or in a response.

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
from .suffix_automaton import Cursor, SuffixAutomaton
from .suffix_drafts import Limits, SuffixDraft, limits_of
from .suffix_matches import best_path, best_tree

MAX_TREE_DEPTH = 2**16  # there is a limit for every length of a match
_MOST_TOKEN_IDS = 2**31  # they lie in int32


class _Response:
    """A response in the global automaton: where it ends there, and what to remove from it; None if it is never."""

    __slots__ = ("cursor", "tokens", "is_cached")

    def __init__(self, tokens: array | None):
        self.cursor, self.tokens, self.is_cached = Cursor(), tokens, True


class _Request:
    """A running request: the counts of its own text, where that ends in them, and the text's last tokens."""

    __slots__ = ("counts", "cursor", "context", "response")

    def __init__(self, counts: SuffixAutomaton, response: _Response | None):
        self.counts, self.response = counts, response
        self.cursor, self.context = Cursor(), []


class SuffixCache:
    """What followed which tokens, in every running request's own text and in the responses of all.

    A running request has a *local* automaton, of its prompt and response; the *global* one holds the responses of
    running and past requests. Both know strings of up to `max_tree_depth` tokens, a match and its drafts together.

    max_tree_depth       2..65536; time and memory hardly depend on it
    max_cached_requests  responses in the global automaton; -1: all of them, 0: none. The oldest makes room for a new
                         one; if its request still runs, it goes on with its local automaton and what others add
    """

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1):
        args = check.Arguments("SuffixCache", locals())
        self.max_tree_depth = args.integer("max_tree_depth", 2, MAX_TREE_DEPTH)
        self.max_cached_requests = args.integer("max_cached_requests", -1)
        self._counts = SuffixAutomaton(max_tree_depth)
        self._requests: dict[Hashable, _Request] = {}
        self._responses: deque[_Response] = deque()

    def start(self, request: Hashable, prompt: Sequence[int]) -> None:
        """A new request; the id may be that of one that was stopped."""
        if request in self._requests:
            _fail("start", "request", "not run already", repr(request))
        tokens = _token_ids("start", "prompt", prompt)
        new = _Request(SuffixAutomaton(self.max_tree_depth), self._new_response())
        self._requests[request] = new
        self._append(new, tokens)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Appends accepted tokens to a request's response."""
        running, tokens = self._running("extend", request), _token_ids("extend", "tokens", tokens)
        self._append(running, tokens)
        response = running.response
        if response is not None and response.is_cached:
            response.cursor = self._counts.extend(response.cursor, tokens)
            if response.tokens is not None:
                response.tokens.extend(tokens)

    def stop(self, request: Hashable) -> None:
        """Ends a request: its own text is forgotten, its response stays in the global automaton."""
        self._running("stop", request)
        del self._requests[request]

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Within, no response from before is known, and behind it none from within; no request runs when it begins."""
        if self._requests:
            raise RuntimeError(f"SuffixCache: forgetting needs that no request runs, got {len(self._requests)}")
        known = self._counts, self._responses
        self._counts, self._responses = SuffixAutomaton(self.max_tree_depth), deque()
        try:
            yield
        finally:
            for running in self._requests.values():  # whose responses are of no use to the others
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
        """The best drafts to follow the text of a request.

        A match is the last m >= 1 tokens of the text that occur, m below max_tree_depth. It allows
        min(max_spec_tokens, m * max_spec_factor + max_spec_offset) drafts, rounded down, that lie at most
        max_tree_depth - m deep. The probability of a draft is that of the one before it times the share of occurrences
        of all tokens up to that one which it follows; none is below min_token_prob. A path follows the most frequent
        token, of equals the one that was added last; a tree takes the most probable of all, of equals the child of the
        one taken first, then the one that was added last. The score is the sum of the probabilities. Of all matches
        the best score counts, of equal ones the longest match; the request's own text wins against responses.
        Nothing found: no drafts, and the longest match in its text.
        """
        running = self._running("speculate", request)
        values = (max_spec_tokens, max_spec_factor, max_spec_offset, min_token_prob)
        try:
            limits = _limits(self.max_tree_depth, *values)
        except TypeError:  # a list, say, which no dict takes: without one the check names it
            limits = _limits.__wrapped__(self.max_tree_depth, *values)
        find = best_tree if use_tree else best_path
        local = find(running.counts, running.counts.settle(running.cursor), limits, min_token_prob)
        return find(self._counts, self._match(running), limits, min_token_prob, local)

    def longest_match(self, request: Hashable) -> int:
        """How many of the last tokens of a request's text something has followed, in it or in a response."""
        running = self._running("longest_match", request)
        local = running.counts.followed(running.counts.settle(running.cursor))
        return max(local.size, self._counts.followed(self._match(running)).size)

    @property
    def num_states(self) -> tuple[int, int]:
        """How large the local automata are, all together, and the global one."""
        return sum(request.counts.num_states for request in self._requests.values()), self._counts.num_states

    def _running(self, op: str, request: Hashable) -> _Request:
        running = self._requests.get(request)
        if running is None:
            _fail(op, "request", "be one that runs", repr(request))
        return running

    def _new_response(self) -> _Response | None:
        if self.max_cached_requests <= 0:
            return None if self.max_cached_requests == 0 else _Response(None)
        if len(self._responses) == self.max_cached_requests:
            oldest = self._responses.popleft()
            self._counts.remove(oldest.tokens)
            oldest.is_cached = False
        response = _Response(array("i"))
        self._responses.append(response)
        return response

    def _append(self, running: _Request, tokens: list[int]) -> None:
        running.cursor = running.counts.extend(running.cursor, tokens)
        running.context += tokens
        if len(running.context) > 4 * self.max_tree_depth:
            del running.context[: 1 - self.max_tree_depth]

    def _match(self, running: _Request) -> Cursor:
        """The longest match in the global automaton."""
        response = running.response
        if response is not None and response.is_cached and response.cursor.size == self.max_tree_depth - 1:
            return self._counts.settle(response.cursor)
        return self._counts.match(running.context)


@functools.lru_cache(maxsize=64, typed=True)
def _limits(
    max_tree_depth: int, max_spec_tokens: int, max_spec_factor: float, max_spec_offset: float, min_token_prob: float
) -> Limits:
    """Of arguments of `speculate`, which are checked when they are new."""
    args = check.Arguments("SuffixCache.speculate", locals())
    args.integer("max_spec_tokens", 0)
    for name, low in (("max_spec_factor", 0), ("max_spec_offset", None), ("min_token_prob", 0)):
        args.number(name, low)
    return limits_of(max_tree_depth, max_spec_tokens, max_spec_factor, max_spec_offset)


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
