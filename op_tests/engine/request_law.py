"""What the tokens and scores of a request must be: from the target's logits, its parameters, its seed and the place."""

import math

import pytest
import torch

from eagle_kernels.reference.random import grouped_gumbel
from op_tests.sampling_law import law

_PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def law_of_token(request, place: int, logits: torch.Tensor) -> list[float]:
    """Returns the probability of every token as output token `place`, by the logits [V] after those before it."""
    params, before, scores = request.params, request.output_ids[:place], logits.tolist()
    if place < params.min_new_tokens:
        for end in request.end_token_ids:
            scores[end] = -math.inf
    given = {name: getattr(params, name) for name, off in _PENALTIES.items() if getattr(params, name) != off}
    given |= {"prompt": tuple(request.prompt), "output_counts": [before.count(token) for token in range(len(scores))]}
    if params.temperature > 0:
        given["temperature"] = params.temperature
        given |= {name: getattr(params, name) for name, off in _FILTERS.items() if getattr(params, name) != off}
    return law(scores, given)


def check_tokens(request, logits: torch.Tensor, *, is_seeded: bool = True) -> None:
    """Checks tokens and log-probabilities by the logits [L, V] after the last token of the prompt, and later ones.

    is_seeded: whether the noise of a token is that of its seed and place; otherwise any token that may come is right.
    """
    params, start = request.params, len(request.prompt)
    for place, token in enumerate(request.output_ids):
        probs = law_of_token(request, place, logits[place])
        keys = torch.tensor(probs, dtype=torch.float64).log()
        what = f"token {place} of {params}"
        if params.logprobs is True:
            assert request.logprobs[place] == pytest.approx(keys[token].item(), abs=2e-3), what
        assert probs[token] > 0, what
        if params.temperature > 0 and is_seeded:
            key = torch.tensor([request.seed]), torch.tensor([start + place])
            keys = keys + grouped_gumbel(*key, len(probs))[0][0].double()
        if params.temperature == 0 or is_seeded:
            assert keys[token] >= keys.max() - 1e-3, what


def check_end(request, tokenizer=None, ends: tuple[int, ...] = ()) -> None:
    """Checks that a request that ran to its end did so at the first token that ends it, with its reason and its text.

    ends: the end tokens of the configuration.
    """
    params, tokens, reasons = request.params, request.output_ids, []
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    assert request.error is None and request.end_token_ids == ends
    for size, token in enumerate(tokens, start=1):
        text = tokenizer.decode(tokens[:size]) if params.stop else ""
        is_stopped = any(string in text for string in params.stop)
        is_last = size == params.max_new_tokens
        reasons.append("eos" if token in ends else "stop" if is_stopped else "length" if is_last else None)
    assert reasons == [None] * (len(tokens) - 1) + [request.finish_reason], params
    if params.stop:
        text = tokenizer.decode(tokens)
        assert request.text == text[: min(text.find(string) % (1 + len(text)) for string in params.stop)], params
    else:
        assert request.text is None
