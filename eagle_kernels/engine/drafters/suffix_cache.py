"""Suffix decoding: drafts are what followed the last tokens of a request earlier, in its own text or in a response.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (2024), with the scores and
limits of Arctic Inference. Pure Python on the host, so that it can overlap the target's forward pass on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from array import array
from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from .suffix_automaton import Cursor, SuffixAutomaton
from .suffix_drafts import ROUNDING_UP, SuffixDraft, SuffixSearch


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
    """Counts what followed which tokens, in the text of every running request and in the responses of all.

    A running request has a *local* automaton of its prompt and response. The *global* one holds the responses of
    running and past requests. Both know strings of up to `max_tree_depth` tokens, a match and its drafts together.

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
