"""A small server in SGLang's place, which calls the plug-in's hooks for sampling; and what it must write, in float64.

Requests are read, batched, merged, filtered and retracted as SGLang's scheduler does it, and the host never learns what
was drawn (the furthest that SGLang's may lag behind). The target's logits follow from the last token.
"""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import torch

from eagle_kernels.integrations.sglang import sampling, verification
from eagle_kernels.reference.ops.sampling.sample_from_logits import sample_from_logits
from op_tests.integrations import sglang_stub as stub

VOCAB, STEPS, LENGTH, END, PROMPT, ROWS = 61, 3, 24, 5, 4, 50
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 4]
DEPTHS = [0, 1, 1, 2, 2, 2, 3, 3]
FIRST = [next((child for child, parent in enumerate(PARENTS) if parent == node), -1) for node in range(8)]
NEXT = [next((other for other in range(node + 1, 8) if PARENTS[other] == PARENTS[node]), -1) for node in range(8)]
NEXT[0] = -1
TOP_K_ALL = 1 << 30
PARAMS = {
    "temperature": 0.8, "top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0, "sampling_seed": None,
    "stop_token_ids": None, "logit_bias": None,
    "allowed": None,  # the tokens of its grammar
}  # fmt: skip
# logits after each token, which likes to come again, so that penalties matter at once
TABLE = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7)) + 3 * torch.eye(VOCAB)


def request(number: int, **changes) -> SimpleNamespace:
    """Returns a request of SGLang's, whose prompt ends with a token of its own."""
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=END)
    params = SimpleNamespace(**(PARAMS | {"sampling_seed": 100 + number} | changes))
    return SimpleNamespace(
        rid=f"request {number}", sampling_params=params, output_ids=[], tokenizer=tokenizer, eos_token_ids=None,
        last=1 + number % 5, prompt=PROMPT,
    )  # fmt: skip


def mixed(number: int, **changes) -> SimpleNamespace:
    """Returns a request that wants several things at once, others than most; every second one has no penalty."""
    coin = random.Random(number)
    wanted = {
        "temperature": coin.choice([0.6, 0.8, 1.3]), "top_k": coin.choice([TOP_K_ALL, 2, 9]),
        "top_p": coin.choice([1.0, 0.7, 0.9]), "min_p": coin.choice([0.0, 0.05, 0.2]),
        "repetition_penalty": coin.choice([1.0, 1.7, 0.8]), "frequency_penalty": coin.choice([0.0, 1.5, -0.5]),
        "presence_penalty": coin.choice([0.0, 2.0]), "min_new_tokens": coin.choice([0, 0, 9]),
        "stop_token_ids": coin.choice([None, {11, 12}]),
        "logit_bias": coin.choice([None, {3: 2.0, 9: -5.0, END: 4.0, 11: 4.0}]),
        "allowed": coin.choice([None, None, [token for token in range(VOCAB) if token % 3 != 1]]),
        "sampling_seed": coin.randrange(2**63),
    }  # fmt: skip
    if coin.random() < 0.15:
        wanted |= {"temperature": 1.0, "top_k": 1}  # SGLang's greedy
    if number % 2:
        wanted |= {name: PARAMS[name] for name in PARAMS if "penalty" in name or name == "min_new_tokens"}
    made = request(number, **(wanted | changes))
    made.last, made.prompt = coin.randrange(VOCAB), coin.randrange(1, 9)
    return made


@dataclasses.dataclass
class Info:
    """The fields of SGLang's SamplingBatchInfo that the plug-in reads; what is no field is lost in a copy."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    is_all_greedy: bool
    is_any_greedy: bool
    need_top_k_sampling: bool
    need_top_p_sampling: bool
    need_min_p_sampling: bool
    vocab_size: int
    logit_bias: torch.Tensor | None
    penalizer_orchestrator: object = "SGLang's"
    acc_additive_penalties: torch.Tensor | None = None
    acc_scaling_penalties: torch.Tensor | None = None
    return_sampling_masks: list[bool] | None = None

    @classmethod
    def from_schedule_batch(cls, batch, vocab_size: int) -> Info:
        params = [each.sampling_params for each in batch.reqs]
        make = lambda name, dtype: torch.tensor(  # noqa: E731
            [getattr(each, name) for each in params], dtype=dtype, device=batch.device
        )
        bias = torch.zeros(len(params), vocab_size, device=batch.device)
        for row, each in enumerate(params):
            for token, value in (each.logit_bias or {}).items():
                bias[row, token] = value
        return cls(
            temperatures=make("temperature", torch.float32)[:, None], top_ks=make("top_k", torch.int32),
            top_ps=make("top_p", torch.float32), min_ps=make("min_p", torch.float32), vocab_size=vocab_size,
            is_all_greedy=all(each.top_k <= 1 for each in params),
            is_any_greedy=any(each.top_k <= 1 for each in params),
            need_top_k_sampling=any(each.top_k != TOP_K_ALL for each in params),
            need_top_p_sampling=any(each.top_p != 1 for each in params),
            need_min_p_sampling=any(each.min_p > 0 for each in params),
            logit_bias=bias if any(each.logit_bias for each in params) else None,
        )  # fmt: skip

    def filter_batch(self, kept: list[int], kept_on_device: torch.Tensor) -> None:
        self.penalizer_orchestrator.filter(kept_on_device)
        for name in ("temperatures", "top_ks", "top_ps", "min_ps", "logit_bias"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[kept_on_device])

    def merge_batch(self, other: Info) -> None:
        self.penalizer_orchestrator.merge(other.penalizer_orchestrator)
        if self.logit_bias is not None or other.logit_bias is not None:
            zeros = [
                torch.zeros(len(info.top_ks), self.vocab_size, device=self.top_ks.device) for info in (self, other)
            ]
            biases = [info.logit_bias for info in (self, other)]
            self.logit_bias = torch.cat([zero if bias is None else bias for zero, bias in zip(zeros, biases)])
        for name in ("temperatures", "top_ks", "top_ps", "min_ps"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        self.is_all_greedy &= other.is_all_greedy
        self.is_any_greedy |= other.is_any_greedy
        for name in ("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling"):
            setattr(self, name, getattr(self, name) | getattr(other, name))

    def copy_for_forward(self) -> Info:
        assert not self.penalizer_orchestrator.is_required
        return dataclasses.replace(self, penalizer_orchestrator=None)


class ScheduleBatch(SimpleNamespace):
    """What is weakly referred to."""


class Engine:
    """A batch of requests in rows of the pool, which it reads at once, with the text of each since then."""

    def __init__(self, requests, device, rows=None, *, overlaps: bool = True, table=TABLE):
        self.device, self.overlaps = device, overlaps
        self.table = table.clone().to(device)
        rows = list(range(len(requests))) if rows is None else rows
        self.rows = torch.tensor(rows, device=device)
        self.batch = ScheduleBatch(
            reqs=list(requests), req_pool_indices=self.rows, req_pool_indices_cpu=self.rows.cpu(), device=device,
        )  # fmt: skip
        describe = lambda cls, batch, vocab_size: Info.from_schedule_batch(batch, vocab_size)  # noqa: E731
        self.info = sampling.from_schedule_batch(describe, Info, self.batch, VOCAB)
        read = [([each.last, *each.output_ids][-1], each.prompt + len(each.output_ids) - 1) for each in requests]
        self.last, self.position = (
            torch.tensor(read, dtype=torch.int64, device=device).view(-1, 2).T
        )  # of the last token
        self.texts = [[] for _ in requests]
        self.runner = SimpleNamespace(
            is_draft_worker=False, req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(ROWS, 1)),
            sampler=SimpleNamespace(output_logprob_processor=SimpleNamespace(compute_logprobs=self._note_logprobs)),
        )  # fmt: skip
        self.logprobs, self.wants_logprobs = [], False
        self.step(stub.Mode.EXTEND)

    def filter_batch(self, kept: list[int]) -> None:
        """Goes on with some of the requests."""
        on_device = torch.tensor(kept, dtype=torch.int64, device=self.device)
        self.info.filter_batch(kept, on_device)
        self.batch.reqs = [self.batch.reqs[index] for index in kept]
        self.texts = [self.texts[index] for index in kept]
        self.rows, self.last, self.position = (part[on_device] for part in (self.rows, self.last, self.position))

    def merge_batch(self, other: Engine) -> None:
        """Takes in the requests of another batch."""
        self.info.merge_batch(other.info)
        self.batch.reqs += other.batch.reqs
        self.texts += other.texts
        for name in ("rows", "last", "position"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    def forward_info(self) -> Info:
        return sampling.copy_for_forward(Info.copy_for_forward, self.info) if self.overlaps else self.info

    def _mask(self, logits: torch.Tensor, repeats: int = 1) -> None:
        """Applies the grammars, as SGLang's bitmask of a batch, or of the nodes of its trees."""
        allowed = torch.zeros(len(self.batch.reqs), VOCAB, dtype=torch.bool, device=self.device)
        for row, each in zip(allowed, self.batch.reqs):
            row[slice(None) if each.sampling_params.allowed is None else each.sampling_params.allowed] = True
        logits.masked_fill_(~allowed.repeat_interleave(repeats, 0), float("-inf"))

    def _sample(self, runner, output, forward_batch):
        """SGLang's ModelRunner.sample."""
        info, logits = forward_batch.sampling_info, output.next_token_logits
        assert info.penalizer_orchestrator is None or not info.penalizer_orchestrator.is_required
        self._mask(logits)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias)
        greedy = lambda sampler, output, *rest: output.next_token_logits.argmax(-1)  # noqa: E731
        given = (output, info, self.wants_logprobs, "top", "ids", forward_batch.positions)
        return sampling.forward(greedy, runner.sampler, *given)

    def _note_logprobs(self, logprobs, top_logprobs_nums, token_ids_logprobs, tokens):
        assert (top_logprobs_nums, token_ids_logprobs) == ("top", "ids")
        of_tokens = logprobs.gather(1, tokens.long()[:, None])[:, 0]
        return SimpleNamespace(write_output_to=lambda output: self.logprobs.append((output, of_tokens)))

    def step(self, mode=stub.Mode.DECODE) -> None:
        """Draws the first token after what was read, or decodes plainly."""
        batch = SimpleNamespace(
            sampling_info=self.forward_info(), req_pool_indices=self.rows, positions=self.position,
            forward_mode=SimpleNamespace(is_decode=lambda: mode is stub.Mode.DECODE),
        )  # fmt: skip
        output = self.output = SimpleNamespace(next_token_logits=self.table[self.last].clone())
        self.last = sampling.sample(self._sample, self.runner, output, batch).long()
        self.position = self.position + 1
        for text, token in zip(self.texts, self.last.tolist()):
            text.append(token)

    def verify(self, ahead: list[list[int]], seed: int) -> list[int]:
        """Verifies trees with drafts of which about half are what comes, by these texts; returns the lengths."""
        coin, size = torch.Generator().manual_seed(seed), len(self.rows)
        tokens = torch.randint(VOCAB, (size, 8), generator=coin)
        is_right = torch.rand(size, 8, generator=coin) < 0.6
        for row, text in enumerate(ahead):
            coming = text[len(self.texts[row]) :] + [0] * STEPS
            for node in (1, 3, 6) if seed % 2 else (2, 5):
                if is_right[row, node]:
                    tokens[row, node] = coming[DEPTHS[node] - 1]
        tokens[:, 0] = self.last.cpu()
        tokens, depths = tokens.to(self.device), torch.tensor(DEPTHS, device=self.device)
        make = lambda values: torch.tensor(values, device=self.device).expand(size, 8).contiguous()  # noqa: E731
        verify_input = SimpleNamespace(
            draft_token=tokens.flatten(), draft_token_num=8, max_tree_depth=STEPS + 1,
            retrieve_index=torch.arange(size * 8, device=self.device).view(size, 8), retrieve_next_token=make(FIRST),
            retrieve_next_sibling=make(NEXT), positions=(self.position[:, None] + depths).flatten(),
        )  # fmt: skip
        batch = SimpleNamespace(
            forward_mode=stub.Mode.TARGET_VERIFY, seq_lens=self.position, sampling_info=self.forward_info(),
            req_pool_indices=self.rows,
        )  # fmt: skip
        output = self.output = SimpleNamespace(next_token_logits=self.table[tokens.flatten()].clone())
        mask = SimpleNamespace(apply=lambda logits: self._mask(logits, 8))
        predicts, lengths, paths = verification.eagle_sample(None, verify_input, batch, output, mask)
        assert predicts.min() >= 0  # the draft model reads all of it as tokens
        assert paths.shape == (size, STEPS + 1) and lengths.tolist() == (paths >= 0).sum(1).tolist()
        for row, length in enumerate(lengths.tolist()):
            self.texts[row] += predicts[paths[row, :length].long()].tolist()
        self.last = torch.tensor([text[-1] for text in self.texts], device=self.device)
        self.position = self.position + lengths
        return lengths.tolist()


def plain(requests, device, rows=None, **options) -> list[list[int]]:
    """Returns the texts of plain decoding."""
    engine = Engine(requests, device, rows, **options)
    while len(engine.texts[0]) < LENGTH + STEPS + 1:
        engine.step()
    return engine.texts


def speculative(requests, device, ahead, rows=None, **options) -> tuple[list[list[int]], list[int]]:
    """Returns the texts of decoding with drafts, and the lengths of all steps."""
    engine, lengths, seed = Engine(requests, device, rows, **options), [], 0
    while min(map(len, engine.texts)) < LENGTH:
        seed += 1
        lengths += engine.verify(ahead, seed)
    return engine.texts, lengths


def serve(requests, device, ahead=None, seed: int = 0) -> list[list[int]]:
    """Returns the texts of requests that come and go, are read in chunks, retracted, and moved to other rows.

    ahead: the texts that drafts are made of; None decodes plainly.
    """
    coin, texts, free = random.Random(seed), [[] for _ in requests], list(range(6))
    waiting, running, steps = list(range(len(requests))), None, 0
    while waiting or running:
        numbers = waiting[: coin.randrange(len(free) + 1)]
        if numbers:
            waiting = waiting[len(numbers) :]
            rows = [free.pop(coin.randrange(len(free))) for _ in numbers]
            for number in numbers:
                requests[number].output_ids, requests[number].number = list(texts[number]), number
            read = lambda: Engine([requests[number] for number in numbers], device, rows)  # noqa: B023, E731
            if coin.random() < 0.3:
                read()  # what is drawn after a chunk is dropped
            new = read()
            if running:
                running.merge_batch(new)
            else:
                running = new
        if running is None:
            continue
        steps += 1
        numbers = [each.number for each in running.batch.reqs]
        if ahead is None:
            running.step()
        else:
            running.verify([ahead[number][len(texts[number]) :] for number in numbers], steps)
        kept = []
        for index, (number, text) in enumerate(zip(numbers, running.texts)):
            is_done, is_retracted = len(texts[number] + text) >= LENGTH, coin.random() < 0.06
            if not is_done and not is_retracted:
                kept.append(index)
                continue
            # of a request that is put back the host may not know the last tokens
            texts[number] += text if is_done else text[: len(text) - coin.randrange(3)]
            free.append(int(running.rows[index]))
            waiting += [] if is_done else [number]
        if len(kept) < len(numbers):
            running.filter_batch(kept) if kept else None
            running = running if kept else None
    return texts


# what must be written


def ends_of(each) -> set[int]:
    """The tokens at which SGLang ends a request."""
    lists = [each.sampling_params.stop_token_ids, each.eos_token_ids]
    if each.tokenizer is not None:
        lists += [each.tokenizer.additional_stop_token_ids, [each.tokenizer.eos_token_id]]
    return {token for tokens in lists for token in tokens or () if token is not None}


def adjusted(logits: torch.Tensor, each, text: list[int]) -> torch.Tensor:
    """Logits float64 [V] after this text, with penalties, ends, grammar and bias."""
    params, logits = each.sampling_params, logits.clone()
    for token in set(text):
        above = float(logits[token]) > 0
        logits[token] *= 1 / params.repetition_penalty if above else params.repetition_penalty
        logits[token] -= text.count(token) * params.frequency_penalty + params.presence_penalty
    if len(text) < params.min_new_tokens:
        logits[list(ends_of(each))] = float("-inf")
    if params.allowed is not None:
        logits[[token for token in range(VOCAB) if token not in params.allowed]] = float("-inf")
    for token, value in (params.logit_bias or {}).items():
        logits[token] += value
    return logits


def kept(logits: torch.Tensor, params) -> torch.Tensor:
    """Logits float64 [V] over the temperature, -inf where SGLang's filters remove a token; they look at all of it."""
    scaled = logits / params.temperature
    probs, order = scaled.softmax(-1).sort(descending=True, stable=True)
    is_kept = torch.arange(len(probs)) < params.top_k
    is_kept &= probs.cumsum(-1) - probs <= params.top_p
    is_kept &= probs >= probs[0] * params.min_p
    return scaled.masked_fill(~torch.zeros_like(is_kept).scatter(0, order, is_kept), float("-inf"))


def written(requests, length: int = LENGTH, table: torch.Tensor = TABLE) -> list[list[int]]:
    """The texts of requests by SGLang's rules, with the noise of their seeds; greedy ones take the best token."""
    texts = [[] for _ in requests]
    positions = torch.tensor([each.prompt for each in requests])
    given = [each.sampling_params.sampling_seed for each in requests]
    seeds = [sampling.seed_of(each) if seed is None else seed for each, seed in zip(requests, given)]
    temperatures = torch.tensor([float(each.sampling_params.top_k > 1) for each in requests], dtype=torch.float64)
    for index in range(length):
        rows = []
        for each, text in zip(requests, texts):
            logits = adjusted(table[[each.last, *text][-1]].double(), each, text)
            rows.append(kept(logits, each.sampling_params))
        drawn = sample_from_logits(torch.stack(rows), positions + index, torch.tensor(seeds), temperatures)
        for text, token in zip(texts, drawn.tolist()):
            text.append(token)
    return texts


# one step's logits

PENALTIES, BIAS, GRAMMAR = "penalties", "bias", "grammar"
ADJUSTED = [(), (PENALTIES,), (BIAS,), (PENALTIES, BIAS), (PENALTIES, BIAS, GRAMMAR)]


def make_adjustments(names, batch_size: int, num_nodes: int, vocab_size: int, device):
    """Returns what requests want changed: fields of a SamplingBatchInfo, and the mask of a grammar."""
    make = lambda: torch.rand(batch_size, vocab_size, device=device)  # noqa: E731
    fields = {"acc_additive_penalties": None, "acc_scaling_penalties": None, "logit_bias": None}
    if PENALTIES in names:
        fields |= {"acc_additive_penalties": -3 * make(), "acc_scaling_penalties": 1 + make()}
    if BIAS in names:
        fields |= {"logit_bias": 6 * make() - 3}
    allowed = make().repeat_interleave(num_nodes, 0) < (0.7 if GRAMMAR in names else 2.0)
    return fields, SimpleNamespace(allowed=allowed, apply=lambda rows: rows.masked_fill_(~allowed, float("-inf")))


def adjusted_nodes(logits: torch.Tensor, sampling, mask) -> torch.Tensor:
    """Logits float64 of all nodes: what is added as a penalty, what is multiplied, the bias, the grammar."""
    rows = lambda values: values.repeat_interleave(len(logits) // len(values), 0).double()  # noqa: E731
    logits = logits.double()
    if sampling.acc_additive_penalties is not None:
        logits = logits + rows(sampling.acc_additive_penalties)
        scale = rows(sampling.acc_scaling_penalties)
        logits = torch.where(logits < 0, logits * scale, logits / scale)
    if sampling.logit_bias is not None:
        logits = logits + rows(sampling.logit_bias)
    return logits.masked_fill(~mask.allowed, float("-inf"))
