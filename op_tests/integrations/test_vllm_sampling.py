"""One seed, one text in the vLLM plug-in: requests by themselves, in batches, with drafts, against vLLM's rules."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle_kernels.reference.ops.sampling.sample_from_logits import sample_from_logits
from op_tests.integrations import vllm_stub as stub

VOCAB, DRAFTS, LENGTH = 40, 3, 9
# logits after each token, and prompts
TABLE = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
PROMPT = [5, 9, 2, 31]
OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "logprobs": None, "repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "allowed_token_ids": None, "logit_bias": None, "min_tokens": 0,
    "all_stop_token_ids": set(), "bad_words_token_ids": None, "logprob_token_ids": None, "structured_outputs": None,
}  # fmt: skip
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.8}
WANTED = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "seed": 1} | PENALTIES,
    "seed": {"seed": 0},
    "a seed below 0": {"temperature": 0.7, "seed": -(2**63)},
    "a large seed": {"temperature": 1.5, "seed": 2**63 - 1},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6, "temperature": 1.3},
    "min-p": {"min_p": 0.2, "temperature": 1.7},
    "top-k, top-p": {"top_k": 6, "top_p": 0.7, "temperature": 1.4},
    "min-p, top-k": {"min_p": 0.1, "top_k": 4, "temperature": 1.6},
    "min-p, top-p": {"min_p": 0.15, "top_p": 0.75, "temperature": 1.8},
    "all filters": {"min_p": 0.05, "top_k": 7, "top_p": 0.8, "temperature": 1.9},
    "repetition": {"repetition_penalty": 1.6},
    "frequency": {"frequency_penalty": 1.1},
    "presence": {"presence_penalty": 1.9},
    "biases": {"logit_bias": {3: 4.0, 11: -6.0}},
    "allowed": {"allowed_token_ids": [1, 4, 9, 16, 25, 36], "temperature": 1.5},
    "ends": {"min_tokens": 6, "all_stop_token_ids": {3, 11}, "logit_bias": {3: 5.0, 11: 4.0}},
    "everything": {
        "temperature": 1.4, "min_p": 0.03, "top_k": 9, "top_p": 0.9, "logit_bias": {8: 2.0}, "min_tokens": 4,
        "all_stop_token_ids": {8},
    } | PENALTIES,
}  # fmt: skip
MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


def request(**changes) -> SimpleNamespace:
    return SimpleNamespace(**OFF | changes)


def speculation(**changes) -> SimpleNamespace:
    fields = {
        "num_speculative_tokens": DRAFTS, "rejection_sample_method": "standard", "synthetic_acceptance_rates": None,
        "enable_adaptive_verification": False, "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


# what must be written


def adjusted(wants, output: list[int]) -> torch.Tensor:
    """Logits float64 [V] after this output: biases, then penalties, then bans."""
    logits = TABLE[[*PROMPT, *output][-1]].double()
    if wants.allowed_token_ids:
        banned = [token for token in range(VOCAB) if token not in wants.allowed_token_ids]
        logits[banned] = float("-inf")
    for token, value in (wants.logit_bias or {}).items():
        logits[token] += value
    if len(output) < wants.min_tokens:
        logits[list(wants.all_stop_token_ids)] = float("-inf")
    for token in {*PROMPT, *output}:
        logits[token] *= 1 / wants.repetition_penalty if logits[token] > 0 else wants.repetition_penalty
    for token in set(output):
        logits[token] -= output.count(token) * wants.frequency_penalty + wants.presence_penalty
    for *start, last in wants.bad_words_token_ids or ():
        if output[len(output) - len(start) :] == start:
            logits[last] = float("-inf")
    return logits


def kept(logits: torch.Tensor, wants) -> torch.Tensor:
    """Logits float64 [V] over the temperature, -inf where a filter removes a token: min-p, of what it leaves top-k,
    and of what that leaves top-p."""
    logits = logits / (wants.temperature or 1.0)
    probs = logits.softmax(-1)
    logits = logits.masked_fill(probs < wants.min_p * probs.max(), float("-inf"))
    order = logits.argsort(descending=True)
    removed = order[wants.top_k or VOCAB :]
    logits[removed] = float("-inf")
    probs = logits.softmax(-1)[order]
    logits[order[probs.cumsum(-1) - probs >= wants.top_p]] = float("-inf")
    return logits


def written(requests, length: int = LENGTH) -> list[list[int]]:
    """The texts of requests by vLLM's rules, with the noise of their seeds; greedy ones take the best token."""
    texts = [[] for _ in requests]
    seeds = torch.tensor([each.seed for each in requests])
    temperatures = torch.tensor([float(each.temperature > 0) for each in requests], dtype=torch.float64)
    for index in range(length):
        rows = torch.stack([kept(adjusted(each, text), each) for each, text in zip(requests, texts)])
        positions = torch.full((len(requests),), len(PROMPT) + index)
        for text, token in zip(texts, sample_from_logits(rows, positions, seeds, temperatures).tolist()):
            text.append(token)
    return texts


# a server of it


class Server:
    """Requests in vLLM's states, each at a place of its own, and the sampler and verification on them."""

    def __init__(self, sampling, requests, device, mode="raw_logprobs", method="standard", rates=None, **options):
        size, self.device, self.requests = len(requests) + 3, torch.device(device), requests
        self.places = np.random.default_rng(2).permutation(size)[: len(requests)].astype(np.int32)
        self.texts = [[] for _ in requests]
        number = lambda: SimpleNamespace(  # noqa: E731
            np=np.zeros(size, np.int32), gpu=torch.zeros(size, dtype=torch.int32, device=device)
        )
        self.states = SimpleNamespace(
            max_num_reqs=size, vocab_size=VOCAB, device=self.device, prompt_len=number(), prefill_len=number(),
            total_len=number(),
            all_token_ids=SimpleNamespace(gpu=torch.zeros(size, 64, dtype=torch.int32, device=device)),
        )  # fmt: skip
        kind = importlib.import_module("vllm.v1.worker.gpu.sample.sampler").Sampler
        given = {
            "vllm_config": SimpleNamespace(reasoning_config=None), "max_num_reqs": size, "vocab_size": VOCAB,
            "device": self.device, "req_states": self.states, "logprobs_mode": mode,
            "num_speculative_tokens": DRAFTS,
        }  # fmt: skip
        known = inspect.signature(kind).parameters
        made = kind(**{name: value for name, value in given.items() if name in known}, **options)
        self.is_newer = hasattr(made, "logits_processors")
        self.sampler = sampling.MatchSampler.of(made)
        assert self.sampler.sampling_states is made.sampling_states
        config = speculation(rejection_sample_method=method, synthetic_acceptance_rates=rates)
        self.verifier = sampling.MatchVerifier(self.sampler, config, self.device)

    def _write(self) -> None:
        """Writes what vLLM's states hold after these texts."""
        states = self.states
        for place, wants, text in zip(self.places.tolist(), self.requests, self.texts):
            tokens = [*PROMPT, *text]
            states.all_token_ids.gpu[place, : len(tokens)] = torch.tensor(tokens)
            for numbers, value in (
                (states.prompt_len, len(PROMPT)), (states.prefill_len, len(tokens)), (states.total_len, len(tokens)),
            ):  # fmt: skip
                numbers.np[place] = value
                numbers.gpu[place] = value
            self.sampler.add_request(place, *(() if self.is_newer else (len(PROMPT),)), wants)
        self.sampler.apply_staged_writes()
        states.prefill_len.gpu[self.places] = len(PROMPT) - 1  # all drafts come after it

    def batch(self, drafts, length_of_a_chunk=None) -> tuple[torch.Tensor, SimpleNamespace]:
        """Makes a step's logits and batch, in which each request has a row, and one more for each of its drafts."""
        self._write()
        counts = [1 + len(each) for each in drafts]
        ends = [([*PROMPT, *text])[-1] for text in self.texts]
        ids = [token for end, each in zip(ends, drafts) for token in (end, *each)]
        lengths = [len(PROMPT) + len(text) for text in self.texts]
        local = [row for count in counts for row in range(count)]
        firsts = np.repeat(lengths, counts) - 1
        on = lambda values, kind=torch.int32: torch.tensor(np.array(values)).to(self.device, kind)  # noqa: E731
        bounds = np.array([0, *np.cumsum(counts)], np.int32)
        fields = {
            # rows of the step are not at its front
            "input_ids": on([1, *ids]), "positions": on([0, *(firsts + local)], torch.int64),
            "logits_indices": on(range(1, len(ids) + 1), torch.int64), "idx_mapping": on(self.places),
            "idx_mapping_np": self.places, "expanded_idx_mapping": on(np.repeat(self.places, counts)),
            "expanded_local_pos": on(local), "cu_num_logits": on(bounds), "cu_num_logits_np": bounds,
            "seq_lens": on([length + len(each) for length, each in zip(lengths, drafts)]), "num_reqs": len(counts),
            "seq_lens_cpu_upper_bound": torch.tensor([length + len(each) for length, each in zip(lengths, drafts)]),
        }  # fmt: skip
        return TABLE[ids].to(self.device), SimpleNamespace(**fields)

    def take(self, output) -> list[int]:
        """Adds a step's tokens to the texts; returns how many."""
        counts = output.num_sampled.tolist()
        for text, tokens, count in zip(self.texts, output.sampled_token_ids.tolist(), counts):
            text += tokens[:count]
        assert output.sampled_token_ids.dtype == torch.int64
        return counts

    def decode(self):
        output = self.sampler(*self.batch([[]] * len(self.requests)))
        assert self.take(output) == [1] * len(self.requests) and output.num_rejected.eq(0).all()
        return output

    def verify(self, drafts):
        output = self.verifier(*self.batch(drafts))
        counts = self.take(output)
        assert output.num_rejected.tolist() == [1 + len(each) - count for each, count in zip(drafts, counts)]
        return counts


def drafts_of(server, ahead, coin, is_whole: bool) -> list[list[int]]:
    """Drafts of which most are what comes; any number of them, or all."""
    drafts = []
    for text, coming in zip(server.texts, ahead):
        own = (coming[len(text) :] + [0] * DRAFTS)[: DRAFTS if is_whole else int(coin.integers(DRAFTS + 1))]
        drafts.append([token if coin.random() < 0.7 else int(coin.integers(VOCAB)) for token in own])
    return drafts


@pytest.fixture(params=stub.NAMES)
def sampling(request):
    with stub.vllm(request.param):
        yield importlib.import_module("eagle_kernels.integrations.vllm.sampling")


@pytest.fixture(params=[name for name in stub.NAMES if name != "0.26"])
def newer(request):
    """On what vLLM 0.33 has and 0.26 does not."""
    with stub.vllm(request.param):
        module = importlib.import_module("eagle_kernels.integrations.vllm.sampling")
        if module.Step is SimpleNamespace:
            pytest.skip("vLLM has it from 0.31 on")
        yield module


ALL = [request(**{"seed": 100 + index} | each) for index, each in enumerate(WANTED.values())]
BATCHES = {name: [request(**each)] for name, each in WANTED.items()} | {"all": ALL, "twice": [ALL[7], ALL[7]]}
EACH = pytest.mark.parametrize("name", BATCHES)


@EACH
def test_plain_texts_are_by_vllm_s_rules(sampling, name, device):
    server = Server(sampling, BATCHES[name], device)
    for _ in range(LENGTH):
        server.decode()
    assert server.texts == written(BATCHES[name])


@EACH
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "ragged"])
def test_texts_with_drafts_are_those_without(sampling, name, is_whole, device):
    requests, coin, lengths = BATCHES[name], np.random.default_rng(11), []
    ahead, server = written(requests, LENGTH + DRAFTS + 1), Server(sampling, BATCHES[name], device)
    while min(map(len, server.texts)) < LENGTH:
        lengths += server.verify(drafts_of(server, ahead, coin, is_whole))
    for text, wanted in zip(server.texts, written(requests, max(map(len, server.texts)))):
        assert text == wanted[: len(text)]
    assert max(lengths) > 1  # drafts were accepted


FILTERS = [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.7}]


@pytest.mark.parametrize("kind", ["plain", "drafts"])
@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_min_p_comes_first(sampling, changes, kind, device):
    """What it removes counts neither for top-k nor for top-p; many seeds, so that all that is left is drawn."""
    requests = [request(**changes, min_p=0.3, temperature=2.0, seed=seed) for seed in range(150)]
    server, expected = Server(sampling, requests, device), written(requests, 2)
    if kind == "plain":
        server.decode()
    else:
        server.verify([[text[0], 0, 0] for text in expected])
    assert all(text == wanted[: len(text)] for text, wanted in zip(server.texts, expected))


def test_kernels_write_the_same_texts(sampling, backend, device):
    coin, server, ahead = np.random.default_rng(5), Server(sampling, ALL, device), written(ALL, LENGTH + DRAFTS + 1)
    for is_whole in (True, False, True):
        server.verify(drafts_of(server, ahead, coin, is_whole))
    server.decode()
    assert all(text == coming[: len(text)] for text, coming in zip(server.texts, ahead))


@pytest.mark.parametrize("count", [0, 1, DRAFTS])
def test_right_drafts_are_accepted_and_wrong_ones_are_not(sampling, count, device):
    """The first wrong draft ends what is accepted, even if those after it are right."""
    server, ahead = Server(sampling, ALL, device), written(ALL)
    drafts = [coming[:DRAFTS] for coming in ahead]
    if count < DRAFTS:
        drafts = [[*each[:count], (each[count] + 1) % VOCAB, *each[count + 1 :]] for each in drafts]
    assert server.verify(drafts) == [count + 1] * len(ALL)


def test_requests_with_one_row(sampling, device):
    """Verification of a batch without any drafts."""
    server = Server(sampling, ALL, device)
    assert server.verify([[]] * len(ALL)) == [1] * len(ALL)
    assert server.texts == written(ALL, 1)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"temperature": 1.5, "top_k": 8}], ids=str)
def test_words_are_banned_in_drafts_too(sampling, changes, device):
    """A word of three tokens that would come, and one of a single token; the draft brings the word's start."""
    (free,) = written([request(**changes)])
    requests = [request(**changes, bad_words_token_ids=[free[1:4], [free[5]]])]
    (wanted,), server = written(requests), Server(sampling, requests, device)
    assert wanted[:3] == free[:3] and wanted[3] != free[3]
    assert server.verify([free[:3]]) == [4]
    while len(server.texts[0]) < LENGTH:
        server.verify([(wanted[len(server.texts[0]) :] + [0] * DRAFTS)[:DRAFTS]])
    assert server.texts[0][:LENGTH] == wanted


def test_a_chunk_of_a_prompt_gives_no_token(sampling, device):
    server = Server(sampling, ALL[:3], device)
    for call, drafts in ((server.sampler, [[], [], []]), (server.verifier, [[], [1, 2], []])):
        logits, batch = server.batch(drafts)
        batch.seq_lens[0] = 2
        output = call(logits, batch)
        assert output.num_sampled[0] == 0 and output.num_rejected[0] == 0 and output.num_sampled[1] > 0


# log-probabilities


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "whole", "ragged"])
def test_log_probabilities(sampling, kind, mode, device):
    """In raw modes of the logits as they were given, in others after all that removes tokens; each at its own row."""
    requests = [request(**{"seed": index} | each, logprobs=index % 3) for index, each in enumerate(WANTED.values())]
    server, ahead = Server(sampling, requests, device, mode), written(requests)
    counts = [0 if kind == "plain" else DRAFTS if kind == "whole" else index % 4 for index in range(len(requests))]
    drafts = [coming[:count] for coming, count in zip(ahead, counts)]
    logits, batch = server.batch(drafts)
    given = logits.clone()
    output = (server.sampler if kind == "plain" else server.verifier)(logits, batch)
    if mode.startswith("raw"):
        assert torch.equal(logits, given)
    assert server.take(output) == [1 + count for count in counts]
    ids, scores = output.logprobs_tensors.logprob_token_ids.cpu(), output.logprobs_tensors.logprobs.cpu()
    row = 0
    for wants, text, count in zip(requests, ahead, counts):
        for index in range(count + 1):
            raw = TABLE[[*PROMPT, *text[:index]][-1]].double()
            of = raw if mode.startswith("raw") else kept(adjusted(wants, text[:index]), wants)
            of = of.log_softmax(-1) if mode.endswith("logprobs") else of
            assert ids[row, 0] == text[index]
            torch.testing.assert_close(scores[row].double(), of[ids[row].long()], rtol=0, atol=1e-4)
            row += 1


@pytest.mark.parametrize("kind", ["plain", "drafts"])
def test_without_log_probabilities_there_are_none(sampling, kind, device):
    server = Server(sampling, ALL, device, "processed_logprobs")
    logits, batch = server.batch([[]] * len(ALL) if kind == "plain" else [[1, 2, 3]] * len(ALL))
    assert (server.sampler if kind == "plain" else server.verifier)(logits, batch).logprobs_tensors is None


def test_nan_is_counted_in_logits_as_they_are(sampling, monkeypatch, device):
    if hasattr(sampling.RejectionSampler, "_verify"):
        pytest.skip("there vLLM counts them")
    monkeypatch.setattr(sampling, "get_num_nans", lambda logits: logits.clone())
    server = Server(sampling, ALL, device)
    server.sampler.compute_nans = True
    logits, batch = server.batch([[1, 2, 3]] * len(ALL))
    given = logits.clone()
    assert torch.equal(server.verifier(logits, batch).num_nans, given)


# synthetic acceptance


@pytest.mark.parametrize("rates", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)], ids=str)
@pytest.mark.parametrize("name", ["greedy", "top-p", "all"])
def test_synthetic_acceptance(sampling, name, rates, device):
    requests = BATCHES[name]
    server = Server(sampling, requests, device, method="synthetic", rates=list(rates))
    assert server.verify([[1, 2, 3]] * len(requests)) == [1 + int(sum(rates))] * len(requests)


def test_synthetic_acceptance_follows_its_rates(sampling, device):
    requests, rates = [request(seed=seed, temperature=seed % 2) for seed in range(400)], [0.75, 0.5, 0.25]
    server = Server(sampling, requests, device, method="synthetic", rates=rates)
    counts = server.verify([[1, 2, 3]] * len(requests))
    for accepted, rate in enumerate(rates, 1):
        share = sum(count > accepted for count in counts) / len(counts)
        assert abs(share - rate) < 4 * (rate * (1 - rate) / len(counts)) ** 0.5


def test_first_steps_of_synthetic_acceptance_are_vllm_s(sampling, monkeypatch, device):
    """With the logits as they are: vLLM adjusts them itself."""

    class Passed(Exception):
        pass

    def below(self, *given):
        raise Passed(*given)

    has_verify = hasattr(sampling.RejectionSampler, "_verify")
    monkeypatch.setattr(sampling.RejectionSampler, "_verify" if has_verify else "__call__", below)
    server = Server(sampling, ALL, device, method="synthetic", rates=[1.0, 1.0, 1.0])
    logits, batch = server.batch([[1, 2, 3]] * (len(ALL) - 1) + [[]])
    given = logits.clone()
    with pytest.raises(Passed) as passed:
        server.verifier(logits, batch, "of drafts")
    found, *others = passed.value.args
    assert torch.equal(found, logits) and torch.equal(logits, given)
    assert len(others) == 10 and others[0] == "of drafts" if has_verify else others == [batch, "of drafts"]


# what vLLM 0.33 has


@pytest.mark.parametrize("method", ["standard", "synthetic"])
def test_drafts_before_there_were_any_are_refused(newer, method, device):
    """Those of a prompt's last step are made up, even where they are right."""
    server, ahead = Server(newer, ALL, device, method=method, rates=[1.0, 1.0, 1.0]), written(ALL)
    logits, batch = server.batch([coming[:DRAFTS] for coming in ahead])
    server.states.prefill_len.gpu[server.places[::2]] = len(PROMPT)
    output = server.verifier(logits, batch)
    assert server.take(output) == [1 if index % 2 == 0 else 1 + DRAFTS for index in range(len(ALL))]
    assert output.sampled_token_ids[:, 0].ge(0).all()
    if method == "standard":
        assert all(text == coming[: len(text)] for text, coming in zip(server.texts, ahead))


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "ragged"])
def test_drafts_that_a_grammar_forbids_are_refused(newer, is_whole, device):
    server, ahead = Server(newer, ALL, device), written(ALL)
    drafts = [coming[:DRAFTS] for coming in ahead]
    if not is_whole:
        drafts[0] = drafts[0][:1]
    logits, batch = server.batch(drafts)
    forbidden = batch.expanded_local_pos == 2
    counts = server.take(server.verifier(logits, batch, None, forbidden))
    assert counts == [2] * len(ALL) and server.texts == [coming[:2] for coming in ahead]


def test_forbidden_drafts_of_synthetic_acceptance_are_vllm_s(newer, monkeypatch, device):
    seen = []
    below = lambda self, *given: seen.append(given) or (given[0], torch.zeros(1, 4), torch.ones(1))  # noqa: E731
    monkeypatch.setattr(newer.RejectionSampler, "_verify", below)
    server = Server(newer, ALL[:1], device, method="synthetic", rates=[1.0, 1.0, 1.0])
    logits, batch = server.batch([[1, 2, 3]])
    server.verifier(logits, batch, None, torch.zeros(4, dtype=torch.bool, device=device))
    assert len(seen) == 1 and seen[0][0].data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("most", [1, 5, 8, 50])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "ragged"])
def test_batches_in_chunks(newer, monkeypatch, is_whole, mode, most, device):
    monkeypatch.setattr(sys.modules[newer.RejectionSampler.__module__], "MAX_CHUNK_BYTES", 4 * VOCAB * most)
    requests = [request(**vars(each) | {"logprobs": 1}) for each in ALL]
    server, ahead = Server(newer, requests, device, mode), written(ALL, 2 * LENGTH)
    for _ in range(2):
        server.verify(drafts_of(server, ahead, np.random.default_rng(3), is_whole))
    assert all(text == coming[: len(text)] for text, coming in zip(server.texts, ahead))


class Booster:
    """A logits processor of a user, which takes float32 and gives a new tensor."""

    seen = None

    def add_request(self, place, params) -> bool:
        return True

    def apply_staged_writes(self) -> None:
        pass

    def apply(self, logits, step):
        self.seen = logits.dtype
        boosted = step.idx_mapping[:1].new_tensor([17]).long()
        return logits.index_add(1, boosted, logits.new_full((len(logits), 1), 100.0))


@pytest.mark.parametrize("kind", ["plain", "drafts"])
def test_processors_of_users_come_last_and_get_float32(newer, kind, device):
    booster = Booster()
    server = Server(newer, ALL[:3], device, custom_logits_processors=(booster,))
    logits, batch = server.batch([[17, 17, 17] if kind == "drafts" else []] * 3)
    server.take((server.sampler if kind == "plain" else server.verifier)(logits.half(), batch))
    assert booster.seen == torch.float32
    assert server.texts == [[17] * (4 if kind == "drafts" else 1)] * 3


def test_processors_are_left_out_where_no_request_needs_any(newer, device):
    booster = Booster()
    server = Server(newer, [request(temperature=0.0)], device, custom_logits_processors=(booster,))
    logits, batch = server.batch([[]])
    server.sampler.needs_logits_processing[:] = False
    server.sampler(logits, batch)
    assert booster.seen is None


@pytest.mark.parametrize("kind", ["plain", "drafts"])
def test_a_budget_of_thinking_is_forced_in_any_dtype(newer, kind, device):
    """Its mark is infinite in float16."""
    if stub.SITE:
        pytest.skip("the real one goes by marks in the text")
    server = Server(newer, ALL[:3], device)
    budget = server.sampler.thinking_budget_state
    budget.enabled, budget.token = True, 23
    budget.use_thinking_budget[server.places[1]] = True
    logits, batch = server.batch([[23, 23, 23] if kind == "drafts" else []] * 3)
    server.take((server.sampler if kind == "plain" else server.verifier)(logits.half(), batch))
    assert server.texts[1] == [23] * (4 if kind == "drafts" else 1) and server.texts[0][0] != 23


@pytest.mark.parametrize("kind", ["plain", "drafts"])
def test_what_the_filters_leave_is_returned_with_what_is_drawn(newer, kind, device):
    requests = [request(**vars(each) | {"logprobs": 1}) for each in ALL]
    server = Server(newer, requests, device, "processed_logprobs", return_sampling_mask=True)
    ahead = written(ALL)
    logits, batch = server.batch([coming[:DRAFTS] if kind == "drafts" else [] for coming in ahead])
    output = (server.sampler if kind == "plain" else server.verifier)(logits, batch)
    counts, wanted = server.take(output), []
    assert server.texts == [coming[:count] for coming, count in zip(ahead, counts)]
    if not stub.SITE:
        for wants, text in zip(requests, server.texts):
            rows = [kept(adjusted(wants, text[:index]), wants) for index in range(len(text))]
            wanted += [row.isfinite() for row in rows]
        assert torch.equal(output.sampling_mask_tensors.cpu(), torch.stack(wanted))


# where vLLM asks for it


@pytest.mark.parametrize("drafts", [None, DRAFTS])
def test_a_model_s_state_gives_ours(sampling, drafts, device):
    server = Server(sampling, ALL, device)
    spec = drafts and speculation(num_speculative_tokens=drafts)
    made = lambda *given: SimpleNamespace(custom_sampler=lambda sampler: None, given=given)  # noqa: E731
    config = SimpleNamespace(speculative_config=spec, additional_config={})
    state = sampling.init_model_state(made, config, "model", None, torch.device(device))
    assert state.given == (config, "model", None, torch.device(device))
    sampler, verifier = state.custom_sampler(server.sampler)
    assert type(sampler) is sampling.MatchSampler and sampler.penalties_state is server.sampler.penalties_state
    assert (verifier is None) == (drafts is None) and (verifier is None or verifier.sampler is sampler)


def test_a_model_with_a_sampler_of_its_own_keeps_it(sampling):
    state = SimpleNamespace(custom_sampler=lambda sampler: ("own", sampler))
    config = SimpleNamespace(speculative_config=None, additional_config={})
    state = sampling.init_model_state(lambda *given: state, config, "model", None, torch.device("cpu"))
    assert state.custom_sampler("vLLM's") == ("own", "vLLM's")


@pytest.mark.parametrize("kind", ["plain", "drafts"])
def test_what_is_launched_later_is_compiled_before(sampling, kind, monkeypatch, device):
    """After vLLM's own warm-up; requests that come then are what they are without one."""
    seen, order = set(), []

    def watched(name, op):
        def call(*args, **values):
            seen.add((name, *(each for each in ("top_k", "top_p", "min_p") if values.get(each) is not None)))
            return op(*args, **values)

        return call

    for name in ("sample_from_logits", "verify_tree_greedy", "verify_tree_sampled"):
        monkeypatch.setattr(sampling, name, watched(name, getattr(sampling, name)))
    server = Server(sampling, ALL, device)
    runner = SimpleNamespace(
        sampler=server.sampler, rejection_sampler=server.verifier if kind == "drafts" else None, vocab_size=VOCAB,
        num_speculative_steps=DRAFTS * (kind == "drafts"), max_num_reqs=5, dtype=torch.float32, device=server.device,
    )  # fmt: skip
    sampling.warmup_kernels(lambda *given: order.append((given, set(seen))), runner, "execute", "sample")
    assert order == [((runner, "execute", "sample"), set())]
    filters = [(), ("top_p",), ("top_k", "top_p")]
    op = "verify_tree_sampled" if kind == "drafts" else "sample_from_logits"
    wanted = {(op, *each) for each in filters} | ({("verify_tree_greedy",)} if kind == "drafts" else set())
    assert seen == wanted
    server.decode()
    fresh = Server(sampling, ALL, device)
    fresh.decode()
    assert server.texts == fresh.texts


@pytest.mark.parametrize("sampler", [None, "a model's own"])
def test_a_sampler_that_is_not_ours_is_left_alone(sampling, sampler):
    calls = []
    sampling.warmup_kernels(
        lambda *given: calls.append(given), SimpleNamespace(sampler=sampler, rejection_sampler=None), 1, 2
    )
    assert len(calls) == 1
