"""What suffix decoding's cache costs the host: `python -m bench.run --app suffix_cache [--responses 10000] [--tree]`.

Fills the cache with responses of 200 to 500 tokens, whose frequencies fall as 1 / rank over 100,000 tokens; two of five
are edited copies of earlier ones. Then times steps of requests, three accepted tokens and the drafts behind them, and
prints median, 99th percentile and worst; where there is a GPU, steps are kept in `results/<gpu>/suffix_cache.jsonl`.
Arctic Inference's cache, where it is installed, gets the same steps; what share of its drafts has our score and our
tokens is printed as well.

    similar     edited copies of cached responses
    fresh       as frequent as tokens are, and nothing else
    code        a file of which one line in 50 is changed; the prompt is the file
    periodic    20 tokens again and again
    two_tokens  one of ten is the rare one, by chance
    one_token   the worst case: matches of every length, and the text never leaves them

Times are the thread's own on this machine's processor, so another program is not in them, but what it does to caches
is; the garbage collector, to which the drafts kept here would be work, is off. No request of the cached responses has
drafted: some of the worst times are those of states that are asked for the first time.
"""

import argparse
import contextlib
import gc
import inspect
import platform
import random
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from eagle_kernels.engine.drafters.suffix import SuffixCache
from eagle_kernels.engine.drafters.suffix_drafts import SuffixDraft

from ..harness.declaration import Unavailable
from ..harness.markdown import markdown, newest
from ..lab.log import read_lines
from ..peers import arctic_inference
from .generation import keeper
from .replay import edited_file

VOCABULARY = 100_000
ACCEPTED = 3
MAX_SPEC_TOKENS = 32
CODE_LINES, CODE_EDITED = 80, 0.02
PROVIDERS: dict[str, Callable] = {"eagle_kernels": SuffixCache, "arctic_inference": arctic_inference.SuffixCache}


class Request(NamedTuple):
    prompt: list[int]
    response: list[int]


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


def kinds_of(texts: Texts, num_requests: int) -> dict[str, list[Request]]:
    """Returns the requests of each kind of text."""
    coin = random.Random(1)
    makers: dict[str, Callable[[], list[int]]] = {
        "similar": texts.edited,
        "fresh": texts.fresh,
        "periodic": lambda: 20 * texts.fresh(20),
        "two_tokens": lambda: [7 + (coin.random() < 0.1) for _ in range(400)],
        "one_token": lambda: 400 * [7],
    }
    kinds = {kind: [Request(texts.fresh(300), make()) for _ in range(num_requests)] for kind, make in makers.items()}
    files = (
        edited_file(inspect.getsource(argparse), CODE_LINES, CODE_EDITED, VOCABULARY, seed)
        for seed in range(num_requests)
    )
    return {"code": [Request(*file) for file in files], **kinds}


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs it all and prints a line for each kind of text and provider; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run --app suffix_cache")
    parser.add_argument("--responses", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=40, help="of each kind (default: 40)")
    parser.add_argument("--cached", type=int, default=-1, help="max_cached_requests (default: all)")
    parser.add_argument("--tree", action="store_true", help="trees in place of paths")
    options = parser.parse_args(arguments)
    texts = Texts(0)
    responses = [texts.response() for _ in range(options.responses)]
    kinds = kinds_of(texts, options.requests)
    ours: dict[str, list[SuffixDraft]] = {}
    keep = keeper(directory, commit)

    def write(kind: str, provider: str, steps_us: list[float]) -> None:
        line = {"op": "suffix_cache", "section": "tree" if options.tree else "path", "case": kind, "provider": provider}
        names = ("p50_us", "p99_us", "worst_us")
        line |= {name: round(time_us, 1) for name, time_us in zip(names, _marks(steps_us))}
        line |= {"responses": options.responses, "cached": options.cached, "processor": _processor()}
        keep(line)

    for provider, make in PROVIDERS.items():
        try:
            cache = make(max_cached_requests=options.cached)
        except Unavailable as reason:
            print(f"{provider}: {reason}")
            continue
        _fill(cache, provider, responses)
        for kind, requests in kinds.items():
            drafts, steps_us = _time_requests(cache, provider, kind, requests, options.tree)
            write(kind, provider, steps_us)
            if kind in ours:
                print(f"{kind:10}  {_agreement(ours[kind], drafts)}", flush=True)
            else:
                ours[kind] = drafts
        del cache  # two of them need not fit into the memory
    return 0


def tables(file: Path) -> list[str]:
    """Returns a section with the table of what suffix decoding costs the host."""
    lines = read_lines(file)
    table = [["drafts", "text", "provider", "responses", "p50, µs", "p99, µs", "worst, µs", "at commit"]]
    for (section, case, provider), line in newest(lines).items():
        times = [f"{line[name]:.0f}" for name in ("p50_us", "p99_us", "worst_us")]
        table.append([section, case, provider, str(line["responses"]), *times, f"`{line['commit']}`"])
    if len(table) == 1:
        return []
    about = f"A step of a request, update and drafts, on {lines[-1]['processor']} (`--app suffix_cache`):"
    return [f"## Suffix trees on the host\n\n{about}\n\n{markdown(table)}"]


def _fill(cache: SuffixCache, provider: str, responses: list[list[int]]) -> None:
    start_s = time.thread_time()
    for number, response in enumerate(responses):
        cache.start(number, [])
        for first in range(0, len(response), ACCEPTED):
            cache.extend(number, response[first : first + ACCEPTED])
        cache.stop(number)
    seconds, num_tokens = time.thread_time() - start_s, sum(map(len, responses))
    print(f"{provider}: {len(responses)} responses, {num_tokens} tokens in {seconds:.1f} s; then p50, p99, worst in us")


def _time_requests(
    cache: SuffixCache, provider: str, kind: str, requests: list[Request], use_tree: bool
) -> tuple[list[SuffixDraft], list[float]]:
    drafts, extends_us, speculates_us = [], [], []
    gc.disable()
    for number, (prompt, response) in enumerate(requests):
        request = kind, number
        cache.start(request, prompt)
        for first in range(0, len(response), ACCEPTED):
            accepted = response[first : first + ACCEPTED]
            start_s = time.thread_time()
            cache.extend(request, accepted)
            extended_s = time.thread_time()
            drafts.append(cache.speculate(request, max_spec_tokens=MAX_SPEC_TOKENS, use_tree=use_tree))
            if isinstance(cache, SuffixCache):  # the engine asks this, too
                cache.longest_match(request)
            speculates_us.append(1e6 * (time.thread_time() - extended_s))
            extends_us.append(1e6 * (extended_s - start_s))
        cache.stop(request)
    gc.enable()
    steps_us = list(map(sum, zip(extends_us, speculates_us)))
    mean_drafts = sum(len(draft.token_ids) for draft in drafts) / len(drafts)
    timed = {"extend": extends_us, "speculate": speculates_us, "step": steps_us}
    parts = "  ".join(f"{name} {_text(times)}" for name, times in timed.items())
    print(f"{kind:10}  {provider:16}  {parts}  {mean_drafts:4.1f} drafts", flush=True)
    return drafts, steps_us


def _agreement(ours: list[SuffixDraft], theirs: list[SuffixDraft]) -> str:
    pairs = list(zip(ours, theirs, strict=True))
    # its probabilities are float32
    same_score = sum(abs(our.score - their.score) < 1e-4 for our, their in pairs) / len(pairs)
    same_tokens = sum(our.token_ids == list(their.token_ids) for our, their in pairs) / len(pairs)
    return f"same score {same_score:.1%}, same tokens {same_tokens:.1%}"


def _marks(times_us: list[float]) -> tuple[float, float, float]:
    """Returns median, 99th percentile and worst."""
    ordered = sorted(times_us)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]


def _text(times_us: list[float]) -> str:
    return " ".join(f"{time_us:4.0f}" for time_us in _marks(times_us))


def _processor() -> str:
    """Returns the processor's name, as far as the system knows it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
