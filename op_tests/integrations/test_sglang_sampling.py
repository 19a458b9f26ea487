"""Sample and match in the SGLang plug-in: one seed gives one text, with and without drafts, whatever the host knows.

A small engine takes SGLang's place: prompts, plain steps and verification steps of a batch, whose host never learns
what was drawn (the furthest that SGLang's may lag behind). The target's logits follow from the last token.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.integrations.sglang import parts, sampling, verification
from op_tests.integrations import sglang_stub as stub

VOCAB, STEPS, LENGTH, END = 61, 3, 24, 5
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 4]
DEPTHS = [0, 1, 1, 2, 2, 2, 3, 3]
FIRST = [next((child for child, parent in enumerate(PARENTS) if parent == node), -1) for node in range(8)]
NEXT = [next((other for other in range(node + 1, 8) if PARENTS[other] == PARENTS[node]), -1) for node in range(8)]
NEXT[0] = -1
PARAMS = {
    "temperature": 0.8, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0, "sampling_seed": None,
    "stop_token_ids": None, "logit_bias": None,
}  # fmt: skip
WANTED = {
    "nothing": {},
    "greedy": {"top_k": 1, "temperature": 1.0},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.7},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 4.0},
    "greedy, penalties": {"top_k": 1, "temperature": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
    "least length": {"min_new_tokens": 9},
    "least length, then ends": {"min_new_tokens": 9, "logit_bias": {END: 50.0}},
    "bias": {"logit_bias": {3: 2.0, 9: -5.0}},
}


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    monkeypatch.setattr(sampling, "REQUESTS", sampling.Requests())
    monkeypatch.setattr(parts, "_on", {"verify", "match"})
    return stub.imported_by_steps(monkeypatch)


class Batch(SimpleNamespace):
    """What is weakly referred to."""


def request(number: int, **changes) -> SimpleNamespace:
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=END)
    params = SimpleNamespace(**(PARAMS | {"sampling_seed": 100 + number} | changes))
    return SimpleNamespace(rid=f"request {number}", sampling_params=params, output_ids=[], tokenizer=tokenizer)


class Engine:
    """SGLang's part: batches of requests in rows of a pool, and what calls the hooks."""

    def __init__(self, requests, device, rows=None, *, prompt: int = 4, last=None, grammar=None, overlaps=True):
        """prompt: its length. last: the token that it ends with, of each request. grammar: bool [V], None: all."""
        self.device, self.overlaps, self.grammar = device, overlaps, grammar
        self.table = 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7)).to(device)
        rows = list(range(len(requests))) if rows is None else rows
        self.rows = torch.tensor(rows, device=device)
        self.batch = Batch(
            reqs=requests, req_pool_indices=self.rows, req_pool_indices_cpu=self.rows.cpu(), device=device,
            forward_mode=stub.Mode.EXTEND,
        )  # fmt: skip
        self.info = sampling.from_schedule_batch(self._describe, None, self.batch, VOCAB)
        self.last = torch.tensor(last or [1 + number % 5 for number in range(len(requests))], device=device)
        self.position = torch.full_like(self.rows, prompt - 1)  # of the last token
        self.texts = [[] for _ in requests]
        self.runner = SimpleNamespace(
            is_draft_worker=False, req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(9, 1)),
            sampler=SimpleNamespace(output_logprob_processor=SimpleNamespace(compute_logprobs=self._note_logprobs)),
        )  # fmt: skip
        self.logprobs, self.wants_logprobs = [], False
        self.step(stub.Mode.EXTEND)

    def _describe(self, cls, batch, vocab_size):
        params = [each.sampling_params for each in batch.reqs]
        make = lambda name, dtype: torch.tensor(  # noqa: E731
            [getattr(each, name) for each in params], dtype=dtype, device=self.device
        )
        bias = torch.zeros(len(params), VOCAB, device=self.device)
        for row, each in enumerate(params):
            for token, value in (each.logit_bias or {}).items():
                bias[row, token] = value
        return SimpleNamespace(
            temperatures=make("temperature", torch.float32)[:, None], top_ks=make("top_k", torch.int32),
            top_ps=make("top_p", torch.float32), min_ps=make("min_p", torch.float32), vocab_size=vocab_size,
            is_all_greedy=all(each.top_k <= 1 for each in params),
            is_any_greedy=any(each.top_k <= 1 for each in params),
            need_top_k_sampling=any(each.top_k != 1 << 30 for each in params),
            need_top_p_sampling=any(each.top_p != 1 for each in params),
            need_min_p_sampling=any(each.min_p > 0 for each in params), return_sampling_masks=None,
            logit_bias=bias if any(each.logit_bias for each in params) else None,
            acc_additive_penalties=None, acc_scaling_penalties=None, penalizer_orchestrator="SGLang's",
        )  # fmt: skip

    def _copy(self, info):
        """SGLang's copy_for_forward and what it makes of penalties."""
        copied = copy.copy(info)
        assert not info.penalizer_orchestrator.is_required
        copied.penalizer_orchestrator = None
        for name in ("eagle_kernels_asked", "eagle_kernels_is_penalised"):
            delattr(copied, name)  # no fields of SGLang's
        return copied

    def _forward_info(self):
        return sampling.copy_for_forward(self._copy, self.info) if self.overlaps else self.info

    def _sample(self, runner, output, forward_batch):
        """SGLang's ModelRunner.sample."""
        info, logits = forward_batch.sampling_info, output.next_token_logits
        assert info.penalizer_orchestrator is None or not info.penalizer_orchestrator.is_required
        if self.grammar is not None:
            logits.masked_fill_(~self.grammar, float("-inf"))
        if info.logit_bias is not None:
            logits.add_(info.logit_bias)
        greedy = lambda sampler, output, *rest: output.next_token_logits.argmax(-1)  # noqa: E731
        given = (output, info, self.wants_logprobs, [0], [None], forward_batch.positions)
        return sampling.forward(greedy, runner.sampler, *given)

    def _note_logprobs(self, logprobs, top_nums, token_ids, tokens):
        self.logprobs.append(logprobs.gather(1, tokens.long()[:, None])[:, 0])
        return SimpleNamespace(write_output_to=lambda output: None)

    def step(self, mode=stub.Mode.DECODE) -> None:
        """Draws the first token after the prompts, or decodes plainly."""
        batch = SimpleNamespace(
            sampling_info=self._forward_info(), req_pool_indices=self.rows, positions=self.position,
            forward_mode=SimpleNamespace(is_decode=lambda: mode is stub.Mode.DECODE),
        )  # fmt: skip
        output = SimpleNamespace(next_token_logits=self.table[self.last].clone())
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
            forward_mode=stub.Mode.TARGET_VERIFY, seq_lens=self.position, sampling_info=self._forward_info(),
            req_pool_indices=self.rows,
        )  # fmt: skip
        mask = None
        if self.grammar is not None:
            mask = SimpleNamespace(apply=lambda logits: logits.masked_fill_(~self.grammar, float("-inf")))
        output = SimpleNamespace(next_token_logits=self.table[tokens.flatten()].clone())
        predicts, lengths, paths = verification.eagle_sample(None, verify_input, batch, output, mask)
        assert predicts.min() >= 0  # the draft model reads all of it as tokens
        for row, length in enumerate(lengths.tolist()):
            self.texts[row] += predicts[paths[row, :length].long()].tolist()
        self.last = torch.tensor([text[-1] for text in self.texts], device=self.device)
        self.position = self.position + lengths
        return lengths.tolist()


def plain(requests, device, **options) -> list[list[int]]:
    engine = Engine(requests, device, **options)
    while len(engine.texts[0]) < LENGTH + STEPS + 1:
        engine.step()
    return engine.texts


def speculative(requests, device, ahead, **options) -> tuple[list[list[int]], list[int]]:
    engine, lengths, seed = Engine(requests, device, **options), [], 0
    while min(map(len, engine.texts)) < LENGTH:
        seed += 1
        lengths += engine.verify(ahead, seed)
    return engine.texts, lengths


def assert_same(texts, others) -> None:
    for text, other in zip(texts, others, strict=True):
        assert text[:LENGTH] == other[:LENGTH]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", WANTED)
def test_one_seed_gives_one_text(name, overlaps, device):
    make = lambda: [request(number, **WANTED[name]) for number in range(5)]  # noqa: E731
    wanted = plain(make(), device, overlaps=overlaps)
    texts, lengths = speculative(make(), device, wanted, overlaps=overlaps)
    assert_same(texts, wanted)
    assert {1, 2, 3, 4} <= set(lengths)


def test_a_batch_of_different_requests(device):
    """Also alone each has the text that it has among the others."""
    make = lambda: [request(number, **changes) for number, changes in enumerate(list(WANTED.values())[:9])]  # noqa: E731
    wanted = plain(make(), device)
    assert_same(speculative(make(), device, wanted)[0], wanted)
    for number, changes in enumerate(list(WANTED.values())[:9]):
        assert_same(
            plain([request(number, **changes)], device, rows=[8 - number], last=[1 + number % 5]), [wanted[number]]
        )


def test_greedy_requests_take_the_first_of_equal_logits(device):
    """As SGLang's argmax does, also beside a request that is sampled, which k = 1 alone would not give."""
    engine = Engine([request(0), request(1, **WANTED["greedy"])], device)
    engine.table.zero_()  # all but the first tokens are drawn from it
    for _ in range(4):
        engine.step()
    engine.verify([[], []], seed=1)
    sampled, greedy = (set(text[1:]) for text in engine.texts)
    assert greedy == {0} != sampled


def test_nothing_outside_of_the_grammar(device):
    grammar = torch.arange(VOCAB, device=device) % 3 == 1
    make = lambda: [request(number) for number in range(3)]  # noqa: E731
    wanted = plain(make(), device, grammar=grammar)
    texts, lengths = speculative(make(), device, wanted, grammar=grammar)
    assert_same(texts, wanted)
    assert {token % 3 for text in texts for token in text} == {1} and max(lengths) > 1


@pytest.mark.parametrize("changes", [{"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-6}], ids=str)
def test_filters_that_leave_one_token(changes, device):
    """One seed gives one text also where both ways leave a filter out: so they are held against the greedy text."""
    make = lambda **params: [request(number, **params) for number in range(5)]  # noqa: E731
    assert_same(plain(make(**changes), device), plain(make(top_k=1, temperature=1.0), device))


@pytest.mark.parametrize("name", ["nothing", "frequency", "least length"])
def test_a_request_that_was_retracted_goes_on(name, device):
    """In another row of the pool, beside another request, it reads its own output as a prompt."""
    wanted = plain([request(0, **WANTED[name])], device)[0]
    again = request(0, **WANTED[name])
    again.output_ids = wanted[:9]
    others = [request(7, presence_penalty=1.0), again]
    engine = Engine(others, device, rows=[0, 3], prompt=13, last=[2, wanted[8]])
    while len(engine.texts[1]) < LENGTH - 9:
        engine.step()
    assert engine.texts[1][: LENGTH - 9] == wanted[9:LENGTH]


def test_rows_and_counts_are_taken_over(device):
    """A request finds nothing of the one that had its row of the pool, nor of the one that had its slot of counts."""
    make = lambda: [request(4, frequency_penalty=2.0), request(5)]  # noqa: E731
    wanted = plain(make(), device)
    sampling.REQUESTS = sampling.Requests()
    plain([request(number, frequency_penalty=3.0, min_new_tokens=50) for number in range(4)], device)
    assert_same(plain(make(), device, rows=[1, 0]), wanted)
    assert set(sampling.REQUESTS._slots) == {1, 2, 3}
    assert_same(plain([request(6, frequency_penalty=1.0)], device, rows=[0], last=[1]),
                plain([request(6, frequency_penalty=1.0)], device, rows=[2], last=[1]))  # fmt: skip


def test_penalties_count_and_stops_wait(device):
    (text,) = plain([request(0, frequency_penalty=50.0)], device)
    assert len(set(text)) == len(text)
    forced = {END: 100.0}
    (text,) = plain([request(1, min_new_tokens=6, logit_bias=forced)], device)
    assert END not in text[:6] and text[6:] == [END] * len(text[6:])


def test_requests_without_a_seed(device):
    """Each has one of its own, which is the same wherever it is served; SGLang's deterministic mode gives all 42."""
    make = lambda numbers: [request(number, sampling_seed=None) for number in numbers]  # noqa: E731
    wanted = plain(make([0, 1, 0]), device, last=[1, 1, 1])
    assert wanted[0] == wanted[2] != wanted[1]
    assert 0 <= sampling.seed_of(make([0])[0]) < 2**63


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, -1, 0])
def test_a_seed_of_any_size_is_served(seed, device):
    (text,) = plain([request(0, sampling_seed=seed)], device)
    assert len(text) > LENGTH


def test_seeds_are_all_that_texts_differ_by(device):
    texts = plain([request(0, sampling_seed=seed) for seed in (1, 2, 1)], device, last=[1, 1, 1])
    assert texts[0] == texts[2] != texts[1]


def test_log_probabilities_are_sglangs(device):
    """Of the logits as adjusted, divided by the temperature."""
    engine = Engine([request(0, temperature=0.5, top_k=9), request(1, temperature=2.0)], device)
    engine.wants_logprobs = True
    given = engine.table[engine.last].clone()
    engine.step()
    wanted = (given / torch.tensor([[0.5], [2.0]], device=device)).log_softmax(-1)
    torch.testing.assert_close(engine.logprobs[0], wanted.gather(1, engine.last[:, None])[:, 0])


@pytest.mark.parametrize("case", ["masks", "a batch of no request", "more options"])
def test_what_only_sglang_samples(case, device):
    engine = Engine([request(0)], device)
    info, options = engine._forward_info(), {}
    info.eagle_kernels_seeds = engine.rows
    if case == "masks":
        info.return_sampling_masks = [True]
    elif case == "a batch of no request":
        del info.eagle_kernels_seeds
    else:
        options = {"logprob_logits": engine.table}
    output = SimpleNamespace(next_token_logits=engine.table[:1])
    given = (engine.runner.sampler, output, info, False, [0], [None], engine.position)
    assert sampling.forward(lambda *given, **more: (given, more), *given, **options) == (given, options)


def test_other_batches_are_sglangs(device):
    engine = Engine([request(0)], device)
    original = lambda *given: given  # noqa: E731
    bare = SimpleNamespace(sampling_info=SimpleNamespace(), req_pool_indices=engine.rows)
    assert sampling.sample(original, engine.runner, "logits", bare) == (engine.runner, "logits", bare)
    engine.runner.is_draft_worker = True
    draft = SimpleNamespace(sampling_info=engine.info, req_pool_indices=engine.rows)
    assert sampling.sample(original, engine.runner, "logits", draft) == (engine.runner, "logits", draft)
