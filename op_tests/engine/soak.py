"""Random requests, for as long as one likes: `python -m op_tests.engine.soak --minutes 8 --seed 1 [--device cuda]`.

A round is an engine of random configuration and draft, and a few hundred steps of requests that come, are aborted, are
dropped with their stream, or should never have come, while pages are short and speculation goes on and off. Checked
all along: the tokens, ends, texts and log-probabilities of every request are those it has alone without speculation;
every page has one owner; a round ends with all pages free and no row in use.

The first mismatch ends the run with status 1 and what is needed to see it again: `--seed S --round N` runs that round
alone. With adaptive="auto" steps are chosen by measured times, and another run may need some tries.
"""

import argparse
import dataclasses
import gc
import random
import sys
import time
from collections import Counter, defaultdict

import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams, ops
from eagle_kernels.engine.batch.state import RowSampling
from eagle_kernels.engine.requests.request import Request
from eagle_kernels.engine.requests.sampling_params import Features
from op_tests.engine.toys import DEVICE, LetterTokenizer, random_head, random_llama, random_modules
from op_tests.engine.view import View

VOCAB, MOST_TOKENS = 61, 40
COMMON = [(11 * place + place // 7) % VOCAB for place in range(30)]
# of the device; where kernels are references a step takes a hundred times as long
TICKS = {"cuda": 400, "cpu": 40}
TREES = ((1, 1, 2), (1, 3, 4), (1, 5, 6), (2, 3, 8), (4, 2, 7), (4, 4, 16), (8, 5, 64), (3, 3, None))
CHAINS = ((1, 1, 2), (1, 2, 3), (1, 4, 4), (1, 4, 5), (1, 3, None))
# logits of the target that differ by no more may be swapped by another order of summation
ROUNDING = 3e-5


class Mismatch(Exception):
    """Something is not as it should be; says what."""


class Soak:
    """Models and counts of a run on one device."""

    def __init__(self, seed: int, device: str):
        self.seed, self.device = seed, device
        self.target = random_llama(vocab_size=VOCAB, device=device)
        self.drafts = {
            "stranger": random_llama(hidden_size=16, num_layers=1, seed=1, device=device), "itself": self.target,
            "head": random_head(self.target, aux_layers=(0, 1, 2)), "modules": random_modules(self.target, 4),
        }  # fmt: skip
        alone = EAGLEConfig(max_batch=1, share_prefixes=False)
        self.plain = EAGLEInference(self.target, self.target, alone, tokenizer=LetterTokenizer())
        self.counts: Counter[str] = Counter()

    def run_round(self, number: int) -> None:
        """Raises Mismatch."""
        coin = random.Random(f"{self.seed}/{number}")
        kind = coin.choice(list(self.drafts))
        config = random_config(coin, self.target, self.drafts[kind])
        try:
            _Round(
                self, coin, EAGLEInference(self.drafts[kind], self.target, config, tokenizer=LetterTokenizer())
            ).run()
        except Exception as error:
            what = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
            again = f"python -m op_tests.engine.soak --seed {self.seed} --round {number} --device {self.device}"
            raise Mismatch(f"{what}\n  draft: {kind}\n  {config}\n  again: {again}") from error
        gc.collect()  # graphs, and the memory of their steps
        self.counts["rounds"] += 1
        self.counts[kind] += config.needs_model
        for method in config.methods:
            self.counts[f"with {method}"] += method is not None

    def summary(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.counts.items())


def random_config(coin: random.Random, target, draft) -> EAGLEConfig:
    trees = CHAINS if getattr(draft, "num_modules", 1) > 1 else TREES
    topk, num_steps, nodes = coin.choice(trees)
    table = ((1, coin.choice(trees[:-1])), (2, None), (5, coin.choice(trees[:-1])))
    modes = ("packed", "packed", "packed", "qlen_only", "full_mask")
    values = {
        "topk": topk, "num_steps": num_steps, "num_draft_tokens": nodes, "page_size": coin.choice((1, 4, 16, 64)),
        "max_batch": coin.choice((1, 2, 4, 7)), "prefill_chunk": coin.choice((3, 16, 2048)),
        "tree_mask_mode": coin.choice(modes), "cuda_graph": coin.choice((None, None, None, False)),
        "share_prefixes": coin.random() < 0.8, "eos_token_ids": coin.choice((None, None, (coin.randrange(VOCAB),))),
        "adaptive": coin.choice((None, None, "auto", table)),
    }  # fmt: skip
    values |= random_method(coin, values)
    if values["adaptive"] is None:
        values["max_spec_batch"] = coin.choice((None, None, 2))
    if coin.random() < 0.5:  # a pool that some requests never fit into, and few at once
        shapes = (target.kv_shape, getattr(draft, "kv_shape", target.kv_shape))
        token_bytes = sum(8 * shape.num_layers * shape.num_kv_heads * shape.head_dim for shape in shapes)
        values["kv_cache_bytes"] = token_bytes * coin.randrange(90, 400)
    return EAGLEConfig(**values)


def random_method(coin: random.Random, values: dict) -> dict:
    """Whose drafts these are; of trees that not all methods have, one that this one has."""
    method = coin.choice((None, None, None, "ngram", "suffix", "hybrid", "naive"))
    fields = {"method": method, "min_ngram_size": coin.choice((1, 2))}
    if method in ("ngram", "suffix", "hybrid"):
        topk, num_steps = values["topk"], values["num_steps"]
        levels = coin.choice((1, 2)) if method == "hybrid" else 0
        fields["num_steps"] = num_steps = max(num_steps, 1 + levels)
        most, least = topk * num_steps, 1 + topk * levels
        fields["num_draft_tokens"] = 1 + min(max(least, (values["num_draft_tokens"] or 1 + most) - 1), most, 255)
        fields["ngram_prefer"] = coin.choice(("latest", "earliest"))
        fields["adaptive"] = coin.choice((None, None, "auto"))
    if method == "hybrid":
        fields["num_model_steps"] = levels
    if method == "suffix":
        fields["suffix_decoding_max_cached_requests"] = coin.choice((-1, 0, 1, 3))
        fields["suffix_decoding_max_tree_depth"] = coin.choice((4, 16, 64))
    return fields


def random_prompt(coin: random.Random) -> list[int]:
    """Sometimes one that begins as others do."""
    few = coin.choice((2, VOCAB))
    own = [coin.randrange(few) for _ in range(coin.choice((1, 2, 5, 17, 30)))]
    return COMMON[: 30 - len(own)] + own if coin.random() < 0.4 else own


def random_params(coin: random.Random) -> SamplingParams:
    values = {"max_new_tokens": coin.choice((1, 2, 7, 20, MOST_TOKENS)), "seed": coin.randrange(-(2**63), 2**63)}
    if coin.random() < 0.6:
        values["temperature"] = coin.choice((0.3, 0.8, 1.0, 1.5))
        for name, choices in (("top_k", (1, 5, 30)), ("top_p", (0.5, 0.9)), ("min_p", (0.02, 0.2))):
            if coin.random() < 0.3:
                values[name] = coin.choice(choices)
    for name, choices in (
        ("repetition_penalty", (0.8, 1.3)),
        ("frequency_penalty", (-0.2, 0.4)),
        ("presence_penalty", (-0.3, 0.5)),
        ("stop_token_ids", ((coin.randrange(VOCAB), coin.randrange(VOCAB)),)),
        ("stop", (("".join(chr(64 + coin.randrange(VOCAB)) for _ in range(coin.choice((1, 1, 2)))), "~~~"),)),
        ("logprobs", (True,)),
    ):
        if coin.random() < 0.15:
            values[name] = coin.choice(choices)
    return SamplingParams(**values)


def as_options(params: SamplingParams) -> dict:
    """For `generate` and `stream`, which take seeds by another name."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return values | {"seeds": values.pop("seed")}


class _Round:
    def __init__(self, soak: Soak, coin: random.Random, engine: EAGLEInference):
        self.soak, self.coin, self.engine, self.counts = soak, coin, engine, soak.counts
        self.requests: list[Request] = []
        self.unchecked: list[Request] = []
        self.told: dict[int, list[int]] = defaultdict(list)  # tokens by the events of `step`

    def run(self) -> None:
        actions = (
            (0.35, self.submit), (0.04, self.abort), (0.05, self.switch), (0.04, self.submit_nonsense),
            (0.03, self.read_a_stream),
        )  # fmt: skip
        for _ in range(TICKS[self.engine.device.type]):
            for chance, act in actions:
                if self.coin.random() < chance:
                    act()
            self.step()
        self.engine.is_speculating = True
        while self.engine.has_work:
            self.step()
        self.check_empty()

    def step(self) -> None:
        for event in self.engine.step():
            self.told[event.request].append(event.token_id)
        self.counts["steps"] += 1
        self.check_pages()
        for request in [request for request in self.unchecked if request.is_finished]:
            self.unchecked.remove(request)
            self.check(request)
            if self.told.pop(request.id, []) != request.output_ids:
                raise Mismatch(f"events are not the tokens of {describe(request)}")

    def submit(self) -> None:
        if len(self.unchecked) < 12:
            for _ in range(self.coin.randrange(1, 4)):
                request = self.engine.submit(random_prompt(self.coin), random_params(self.coin))
                if request.finish_reason != "error":
                    self.unchecked.append(request)
                elif "kv_cache_bytes makes it larger" in request.error:
                    self.counts["too long for the pool"] += 1
                else:
                    raise Mismatch(f"refused: {describe(request)}")

    def abort(self) -> None:
        if self.unchecked:
            self.engine.abort(self.coin.choice(self.unchecked))

    def switch(self) -> None:
        self.engine.is_speculating = not self.engine.is_speculating

    def submit_nonsense(self) -> None:
        """Fails alone and at once."""
        prompt, count = self.coin.choice((([], 5), ([1, VOCAB], 5), ([-1], 5), ([1] * 250, 10)))
        request = self.engine.submit(prompt, SamplingParams(max_new_tokens=count))
        if request.finish_reason != "error" or request.output_ids:
            raise Mismatch(f"nonsense ran: {describe(request)}")
        try:
            self.engine.generate(prompt, count)
        except ValueError:
            self.counts["nonsense"] += 1
        else:
            raise Mismatch(f"nonsense was generated from: {prompt}")

    def read_a_stream(self) -> None:
        """Some of it, to the end or not; the requests of others go on meanwhile."""
        prompt, params = random_prompt(self.coin), random_params(self.coin)
        try:
            stream = self.engine.stream(prompt, **as_options(params))
        except ValueError as error:
            if "kv_cache_bytes makes it larger" not in str(error):
                raise
            return
        (request,), tokens = stream.requests, []
        for _ in range(self.coin.choice((0, 1, 5, MOST_TOKENS + 1))):
            event = next(stream, None)
            if event is not None:
                tokens.append(event.token_id)
        if self.coin.random() < 0.5:
            stream.close()
        del stream
        self.counts["streams"] += 1
        if tokens and (not request.is_finished or tokens != request.output_ids[: len(tokens)]):
            raise Mismatch(f"a stream gave {tokens} and left {describe(request)}")
        if tokens:
            self.check(request)

    def check(self, request: Request) -> None:
        """What a request has brought against what it has alone."""
        if request.finish_reason == "error":
            raise Mismatch(f"failed: {describe(request)}")
        self.counts[f"'{request.finish_reason}'"] += 1
        self.counts["tokens"] += len(request.output_ids)
        plain, ends = self.soak.plain, self.engine.config.eos_token_ids
        options = as_options(request.params) | {"seeds": request.seed, "eos_token_ids": ends}
        stream = plain.stream(request.prompt, speculative=False, **options)
        for _ in stream:
            pass
        (alone,), got = stream.requests, request.output_ids
        size = len(got) if request.finish_reason == "abort" else None
        if got != alone.output_ids[:size]:
            pairs = zip(got, alone.output_ids)
            index = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
            if index is not None and self.is_close(request, index, {got[index], alone.output_ids[index]}):
                self.counts["ties of the target"] += 1
                return
            raise Mismatch(f"token {index}: {describe(request)}\n  alone: {alone.output_ids} {alone.finish_reason}")
        if size is None and (alone.finish_reason, alone.text) != (request.finish_reason, request.text):
            raise Mismatch(f"{describe(request)}\n  ends alone by {alone.finish_reason}, with {alone.text!r}")
        errors = [abs(one - other) for one, other in zip(request.logprobs, alone.logprobs)]
        if len(request.logprobs) != len(got) * request.params.logprobs or max(errors, default=0.0) > 2e-3:
            raise Mismatch(f"{describe(request)}\n  {request.logprobs}\n  has alone {alone.logprobs}")

    @torch.inference_mode()
    def is_close(self, request: Request, index: int, tokens: set[int]) -> bool:
        """Whether logits a rounding apart lead to each of `tokens` as output token `index`."""
        plain, params, before = self.soak.plain, request.params, request.output_ids[:index]
        logits, count = plain.next_token_logits(request.prompt + before), 256
        torch.manual_seed(0)
        logits = logits + ROUNDING * (2 * torch.rand(count, len(logits), device=logits.device) - 1)
        rows = RowSampling(count, len(logits[0]), logits.device)
        features = Features.of([params])
        for row in range(count):
            rows.set_row(row, params, request.seed, request.prompt)
        if before:
            rows.count(features, slice(0, count), torch.tensor([before] * count, device=logits.device))
        root = torch.arange(count, device=logits.device)[:, None]
        none = torch.full_like(root, -1)
        drawn = ops.verify_tree_sampled(
            torch.zeros_like(root), root, none, none, logits,
            torch.full((count,), len(request.prompt) + index - 1, device=logits.device),
            **rows.arguments(features, slice(0, count)),
            spec_steps=0,
        )  # fmt: skip
        return tokens <= set(drawn.predicts.tolist())

    def check_pages(self) -> None:
        """Of the engine that is tested, and of the one that it is judged by."""
        for view in (View(self.engine), View(self.soak.plain)):
            if view.scheduler is not None:
                view.check_pages()

    def check_empty(self) -> None:
        self.check_pages()
        if self.unchecked:
            raise Mismatch(f"never ended: {self.unchecked}")
        view = View(self.engine)
        if view.scheduler is not None:
            view.check_is_empty()
            if view.state.lengths.any() or view.state.num_behind.any():
                raise Mismatch("rows are nobody's, but not clear")


def describe(request: Request) -> str:
    return (
        f"{request.params}\n  prompt: {request.prompt}\n  tokens: {request.output_ids} {request.finish_reason} "
        f"{request.error or ''}"
    )


def run(seed: int, device: str, seconds: float, rounds: list[int] | None = None) -> Soak:
    """Rounds 0, 1, .. for so long, one at least, or those that are given; raises Mismatch."""
    soak = Soak(seed, device)
    start_s, told = time.monotonic(), 0
    for number in rounds if rounds is not None else range(10**9):
        soak.run_round(number)
        passed_s = time.monotonic() - start_s
        if passed_s >= 60 * (told + 1):
            told = int(passed_s // 60)
            print(f"{told} min: {soak.summary()}", flush=True)
        if rounds is None and passed_s >= seconds:
            break
    return soak


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m op_tests.engine.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int, nargs="+", help="these alone, without a limit of time")
    parser.add_argument("--device", default=DEVICE)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # models this small only wait for each other's threads
    try:
        soak = run(options.seed, options.device, 60 * options.minutes, options.round)
    except Mismatch as mismatch:
        print(f"MISMATCH {mismatch}")
        return 1
    print(f"fine: {soak.summary()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
