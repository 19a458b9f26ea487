"""What suffix decoding's cache costs the host: `python -m bench.run --app suffix_cache [--responses 10000]`.

Fills the cache with responses of 200 to 500 tokens, whose frequencies fall as 1 / rank over 100,000 tokens; two of five
are edited copies of earlier ones. Then times a step of a request, three accepted tokens and the drafts behind them, of
texts of four kinds. The times are this machine's, so they are printed and go into no file.

    first   the call as it comes, all that another program on the machine takes from it included
    again   the fastest of three more of the same drafts
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from eagle_kernels.engine.drafters.suffix_cache import SuffixCache

VOCABULARY = 100_000
ACCEPTED = 3
MAX_SPEC_TOKENS = 32


class Texts:
    """Random tokens, and copies of what was made before."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._tokens = range(VOCABULARY)
        self._weights = list(accumulate(1 / rank for rank in range(1, VOCABULARY + 1)))
        self._made: list[list[int]] = []

    def fresh(self, num_tokens: int | None = None) -> list[int]:
        count = self._random.randint(200, 500) if num_tokens is None else num_tokens
        return self._random.choices(self._tokens, cum_weights=self._weights, k=count)

    def edited(self) -> list[int]:
        """With 3 to 12 places where up to 10 tokens are others, more or fewer."""
        text = list(self._random.choice(self._made))
        for _ in range(self._random.randint(3, 12)):
            start = self._random.randrange(len(text))
            text[start : start + self._random.randint(0, 10)] = self.fresh(self._random.randint(1, 10))
        return text[:500]

    def response(self) -> list[int]:
        text = self.edited() if self._made and self._random.random() < 0.4 else self.fresh()
        self._made.append(text)
        return text


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs it all and prints a line for each kind of text; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run --app suffix_cache")
    parser.add_argument("--responses", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=40, help="of each kind (default: 40)")
    parser.add_argument("--cached", type=int, default=-1, help="max_cached_requests (default: all)")
    parser.add_argument("--tree", action="store_true", help="trees in place of paths")
    options = parser.parse_args(arguments)
    texts, cache = Texts(0), SuffixCache(max_cached_requests=options.cached)
    responses = [texts.response() for _ in range(options.responses)]
    num_tokens = sum(map(len, responses))
    starts_us, start_s = [], time.perf_counter()
    for response in responses:
        starts_us.append(_us(lambda: cache.start("past", [])))
        for first in range(0, len(response), ACCEPTED):
            cache.extend("past", response[first : first + ACCEPTED])
        cache.stop("past")
    seconds = time.perf_counter() - start_s
    states = cache.num_states[1]
    print(
        f"{len(responses)} responses, {num_tokens} tokens, {states} states: {seconds:.1f} s, start {_text(starts_us)}"
    )
    kinds: dict[str, Callable[[], list[int]]] = {
        "similar": texts.edited,
        "fresh": texts.fresh,
        "repeated": lambda: 20 * texts.fresh(20),
        "one_token": lambda: 400 * [7],
    }
    for kind, make in kinds.items():
        _time_requests(cache, kind, texts, make, options)
    return 0


def _time_requests(
    cache: SuffixCache, kind: str, texts: Texts, make: Callable[[], list[int]], options: argparse.Namespace
) -> None:
    extends_us, firsts_us, agains_us, both_us, num_drafts = [], [], [], [], 0
    for _ in range(options.requests):
        cache.start("now", texts.fresh(300))
        text = make()

        def speculate():
            return cache.speculate("now", max_spec_tokens=MAX_SPEC_TOKENS, use_tree=options.tree)

        for start in range(0, len(text), ACCEPTED):
            accepted = text[start : start + ACCEPTED]
            extends_us.append(_us(lambda accepted=accepted: cache.extend("now", accepted)))
            firsts_us.append(_us(speculate))
            both_us.append(extends_us[-1] + firsts_us[-1])
            agains_us.append(min(_us(speculate) for _ in range(3)))
            num_drafts += len(speculate().token_ids)
        cache.stop("now")
    timed = {"extend": extends_us, "speculate first": firsts_us, "again": agains_us, "extend + first": both_us}
    parts = [f"{name} {_text(times)}" for name, times in timed.items()]
    print(f"{kind}: {num_drafts / len(firsts_us):.1f} drafts; {'; '.join(parts)}", flush=True)


def _us(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start_s)


def _text(times_us: list[float]) -> str:
    ordered = sorted(times_us)
    return f"p50 {ordered[len(ordered) // 2]:.0f} p99 {ordered[len(ordered) * 99 // 100]:.0f} us"
