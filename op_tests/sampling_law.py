"""The law of one token, from the definitions: plain Python in float64, with no code of product or reference.

A step changes the scores of all tokens, or takes some away (-inf). What it does is written down as it was published:

    repetition_penalty   Keskar et al., arXiv 1909.05858, with its factor above 0 and below as transformers has it
    frequency_penalty, presence_penalty, logit_bias   OpenAI's API reference
    top_k                Fan et al., arXiv 1805.04833: the k likeliest
    top_p                Holtzman et al., arXiv 1904.09751: the smallest set of likeliest tokens that holds p
    min_p                Nguyen et al., arXiv 2407.01082: p times as likely as the likeliest, or likelier

Of tokens that tie at an edge all stay, which is ours. `given` has the steps' values by name, and "prompt" (tokens),
"output_counts" (a number for each token), "allowed" (tokens) and "filter_order".
"""

import functools
import itertools
import math

import torch

ORDER = (
    "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "allowed", "temperature", "top_k",
    "top_p", "min_p",
)  # fmt: skip
# Three rows that ask for all there is. Each exchange of two steps that can matter is another law by far, for one row at
# least; so it is without the bias and the grammar, and for temperature and filters alone.
CASES = (
    (
        [-2.75, 1.5, -1.625, 3.625, 1.75, 0.375, 2.625],
        {
            "repetition_penalty": 2.0, "frequency_penalty": 0.75, "presence_penalty": 0.75, "prompt": (0, 1, 3),
            "output_counts": [0, 0, 0, 2, 2, 1, 2], "logit_bias": [0.0, 1.25, -0.75, 0.25, -0.75, 0.0, 0.25],
            "allowed": (1, 2, 3, 4, 5, 6), "temperature": 2.0, "top_k": 4, "top_p": 0.78, "min_p": 0.08,
        },
    ),
    (
        [-1.125, 3.0, 3.875, 0.625, 1.5, 2.375, 5.125],
        {
            "repetition_penalty": 1.75, "frequency_penalty": 0.5, "presence_penalty": 0.25, "prompt": (1,),
            "output_counts": [2, 1, 1, 1, 0, 2, 2], "logit_bias": [0.75, -0.25, 1.25, -0.75, -0.75, 1.25, 1.5],
            "allowed": (0, 1, 2, 4, 5), "temperature": 1.5, "top_k": 3, "top_p": 0.68, "min_p": 0.34,
        },
    ),
    (
        [2.75, 3.625, -1.25, -0.625, 3.375, 2.25, 1.75],
        {
            "repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.75, "prompt": (1, 2, 3),
            "output_counts": [0, 1, 1, 1, 2, 1, 2], "logit_bias": [-1.25, -1.25, 1.75, -0.5, 1.0, -0.5, -0.5],
            "allowed": (0, 1, 2, 3, 4, 5, 6), "temperature": 1.5, "top_k": 4, "top_p": 0.74, "min_p": 0.24,
        },
    ),
)  # fmt: skip
_FILTERS = ("top_k", "top_p", "min_p")


def law(logits: list[float], given: dict, order: tuple[str, ...] = ORDER) -> list[float]:
    """Returns the probability of every token; an order of the steps that is not ours is a wrong one."""
    scores, before_filters = list(logits), None
    for name in order:
        if name not in given:
            continue
        seen = scores
        if name in _FILTERS and given.get("filter_order") == "joint":
            before_filters = seen = before_filters or scores
        changed = _STEPS[name](seen, given[name], given)
        scores = changed if seen is scores else [min(pair) for pair in zip(scores, changed)]
    return softmax(scores)


def softmax(scores: list[float]) -> list[float]:
    """Returns the probabilities that are proportional to exp(score)."""
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _repeated(scores, penalty, given):
    is_seen = [count > 0 or token in given.get("prompt", ()) for token, count in enumerate(_counts(scores, given))]
    changed = [score / penalty if score > 0 else score * penalty for score in scores]
    return [new if seen else score for score, new, seen in zip(scores, changed, is_seen)]


def _counts(scores, given):
    return given.get("output_counts", [0] * len(scores))


def _less(scores, penalty, counts):
    return [score - penalty * count for score, count in zip(scores, counts)]


def _kept(scores, is_kept):
    return [score if kept else -math.inf for score, kept in zip(scores, is_kept)]


def _nucleus(scores, top_p, given):
    probs = softmax(scores)
    return _kept(scores, [sum(other for other in probs if other > prob) < top_p for prob in probs])


_STEPS = {
    "repetition_penalty": _repeated,
    "frequency_penalty": lambda scores, penalty, given: _less(scores, penalty, _counts(scores, given)),
    "presence_penalty": lambda scores, penalty, given: _less(scores, penalty, map(bool, _counts(scores, given))),
    "logit_bias": lambda scores, bias, given: [score + more for score, more in zip(scores, bias)],
    "allowed": lambda scores, tokens, given: _kept(scores, [token in tokens for token in range(len(scores))]),
    "temperature": lambda scores, temperature, given: [score / temperature for score in scores],
    "top_k": lambda scores, number, given: _kept(scores, [sum(x > score for x in scores) < number for score in scores]),
    "top_p": _nucleus,
    "min_p": lambda scores, least, given: _kept(scores, [p >= least * max(softmax(scores)) for p in softmax(scores)]),
}


def arguments(givens: list[dict], vocab_size: int, dtype: torch.dtype = torch.float32) -> dict:
    """Returns what is given for each row as the ops take it; every row must give the same."""
    values = {}
    for name in givens[0]:
        column = [given[name] for given in givens]
        if name == "filter_order":
            values[name] = column[0]
        elif name in ("prompt", "allowed"):
            name = {"prompt": "prompt_mask", "allowed": "token_bitmask"}[name]
            values[name] = torch.stack([_words(tokens, vocab_size) for tokens in column])
        elif name in ("top_k", "output_counts"):
            values[name] = torch.tensor(column, dtype=torch.int32)
        else:
            values[name] = torch.tensor(column, dtype=dtype)
    return values


def _words(tokens, vocab_size: int) -> torch.Tensor:
    bits = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.int64)
    bits[list(tokens)] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    return (words - (words >> 31 << 32)).to(torch.int32)


class Target:
    """Logits float64 for every prefix, the same at every call, and the law of the next token after processors,
    temperature and filters; the drafts of a prefix count as output."""

    def __init__(self, vocab_size, seed=0, *, impossible=False, first=None, **given):
        """impossible: one token of each prefix has probability 0. first: the logits after no token."""
        self.vocab_size, self._seed, self._impossible, self._first = vocab_size, seed, impossible, first
        self.given = {"temperature": 1.0} | given

    @functools.cache  # noqa: B019 (a target lives as long as its test)
    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        place = functools.reduce(lambda number, token: number * self.vocab_size + token + 1, prefix, 1)
        generator = torch.Generator().manual_seed(self._seed * 100_003 + place)
        logits = 1.5 * torch.randn(self.vocab_size, generator=generator, dtype=torch.float64)
        if self._first is not None and not prefix:
            logits = torch.tensor(self._first, dtype=torch.float64)
        if self._impossible:
            logits[int(torch.randint(self.vocab_size, (), generator=generator))] = -math.inf
        return logits

    @functools.cache  # noqa: B019
    def probs(self, prefix: tuple[int, ...], order: tuple[str, ...] = ORDER) -> list[float]:
        counts = list(self.given.get("output_counts", [0] * self.vocab_size))
        for token in prefix:
            counts[token] += 1
        return law(self.logits(prefix).tolist(), self.given | {"output_counts": counts}, order)

    def joint(self, text: tuple[int, ...], start: int = 0) -> float:
        """Returns the probability of text[start:] after text[:start]."""
        return math.prod(self.probs(text[:index])[text[index]] for index in range(start, len(text)))


# which orders are other laws


def assert_every_exchange_shows(distance, names=ORDER, filter_order: str = "top_k_first", tolerance=1e-12) -> None:
    """distance(order): how far what is drawn is from the law of that order; it has to be near where it is ours.

    Every exchange of two of these steps must be another law, by far, or change nothing for a reason.
    """
    assert distance(ORDER) < tolerance
    for pair in itertools.combinations(names, 2):
        found = distance(exchanged(pair))
        assert found > 0.02 if can_matter(pair, filter_order) else found < tolerance, f"{pair} exchanged: {found}"


def exchanged(pair: tuple[str, str]) -> tuple[str, ...]:
    """Returns the order with two steps in each other's place."""
    other = dict((pair, pair[::-1]))
    return tuple(other.get(name, name) for name in ORDER)


def can_matter(pair: tuple[str, str], filter_order: str) -> bool:
    """Tells whether exchanging two steps is another law for some logits: not if each can pass the other, and both can
    pass what is between, without a trace."""
    begin, end = (ORDER.index(name) for name in pair)
    passed = {frozenset((pair[0], name)) for name in ORDER[begin + 1 : end + 1]}
    passed |= {frozenset((name, pair[1])) for name in ORDER[begin:end]}
    return not all(_commute(both, filter_order) for both in passed)


def _commute(both: frozenset[str], filter_order: str) -> bool:
    sums = {"frequency_penalty", "presence_penalty", "logit_bias"}
    of_each = sums | {"allowed", "repetition_penalty", "temperature"}
    return (
        both <= sums
        or ("allowed" in both and both <= of_each)  # what is taken away stays away
        or both == {"top_k", "min_p"}  # neither changes which tokens are likelier
        or (both <= set(_FILTERS) if filter_order == "joint" else both == {"temperature", "top_k"})
    )
