"""One seed, one text in the vLLM plug-in: requests by themselves, in batches, with drafts, against vLLM's rules."""

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from op_tests.integrations import vllm_stub as stub
from op_tests.integrations.vllm_server import (
    ALL,
    DRAFTS,
    LENGTH,
    MODES,
    PROMPT,
    SINGLE,
    TABLE,
    VOCAB,
    WANTED,
    Server,
    Watch,
    adjusted,
    kept,
    padded,
    request,
    runner_of,
    speculation,
    written,
)


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
    below = lambda self, *given: seen.append(given) or (  # noqa: E731
        given[0], torch.zeros(1, 4, device=device), torch.ones(1, device=device)
    )  # fmt: skip
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
    model_state = importlib.import_module("eagle_kernels.integrations.vllm.model_state")
    state = model_state.init_model_state(made, config, "model", None, torch.device(device))
    assert state.given == (config, "model", None, torch.device(device))
    sampler, verifier = state.custom_sampler(server.sampler)
    assert type(sampler) is sampling.MatchSampler and sampler.penalties_state is server.sampler.penalties_state
    assert (verifier is None) == (drafts is None) and (verifier is None or verifier.sampler is sampler)


def test_a_model_with_a_sampler_of_its_own_keeps_it(sampling):
    state = SimpleNamespace(custom_sampler=lambda sampler: ("own", sampler))
    config = SimpleNamespace(speculative_config=None, additional_config={})
    model_state = importlib.import_module("eagle_kernels.integrations.vllm.model_state")
    state = model_state.init_model_state(lambda *given: state, config, "model", None, torch.device("cpu"))
    assert state.custom_sampler("vLLM's") == ("own", "vLLM's")


@pytest.mark.parametrize("kind", ["plain", "drafts"])
def test_what_is_launched_later_is_compiled_before(sampling, kind, monkeypatch, device):
    """After vLLM's own warm-up, for rows as they lie in its steps, in its stream; requests that come then are what they
    are without one."""
    order, watch, is_gpu = [], Watch(monkeypatch, sampling), torch.device(device).type == "cuda"
    stream = torch.cuda.Stream() if is_gpu else None

    def vllm_s_own(*given):
        order.append((given, set(watch.seen)))
        logits, batch = server.batch([[]] * len(ALL))
        server.sampler(padded(logits), batch)
        watch.seen.clear()
        watch.streams.clear()

    server = Server(sampling, ALL, device)
    runner = runner_of(server, DRAFTS * (kind == "drafts"))
    with torch.cuda.stream(stream):
        sampling.warmup_kernels(vllm_s_own, runner, "execute", "sample")
    assert order == [((runner, "execute", "sample"), set())] and watch.streams == {stream}
    compiled, ops = set(watch.seen), {name for name, *_ in watch.seen}
    assert ops == (set(watch.OPS) if kind == "drafts" else {"sample_from_logits"})
    coin = np.random.default_rng(4)
    for single in SINGLE:
        requests = [request(**single, seed=seed) for seed in range(3)]
        later, ahead = Server(sampling, requests, device), written(requests, LENGTH + DRAFTS)
        later.sampler(*padded_batch(later, [[]] * 3))
        for is_whole in (True, False) if kind == "drafts" else ():
            later.verifier(*padded_batch(later, drafts_of(later, ahead, coin, is_whole)))
    assert watch.seen == compiled
    server.decode()
    fresh = Server(sampling, ALL, device)
    fresh.decode()
    assert server.texts == fresh.texts


def padded_batch(server, drafts):
    logits, batch = server.batch(drafts)
    return padded(logits), batch


def test_large_steps_are_warmed_up_without_their_memory(sampling, device):
    """As many rows as a step can have, of which none has room of its own."""
    server = Server(sampling, ALL, device)
    sizes, verify, count = set(), server.verifier.verify_whole, 5 * (DRAFTS + 1)

    def verify_whole(parameters, drafts, pos):
        rows = parameters["logits"]
        assert rows.untyped_storage().nbytes() <= 4 * (count * 32 + VOCAB)
        sizes.add(len(rows))
        return verify(parameters, drafts, pos)

    server.verifier.verify_whole = verify_whole
    runner = runner_of(server, DRAFTS, max_num_reqs=10**6, max_num_tokens=count + 1)
    sampling.warmup_kernels(lambda *given: None, runner, "execute", "sample")
    assert sizes == {count, DRAFTS + 1}


def test_links_of_chains_stay_where_they_are(sampling, monkeypatch, device):
    """Several threads compile at once, and kernels may still read the links of a smaller batch."""
    verifier, places = Server(sampling, ALL, device).verifier, set()
    monkeypatch.setattr(
        sampling, "verify_tree_greedy",
        lambda drafts, *links, **values: places.add(tuple(each.data_ptr() for each in links)) or verify(drafts, *links),
    )  # fmt: skip

    def verify(drafts, index, child, sibling):
        size, num_nodes = drafts.shape
        rows = torch.arange(size * num_nodes, device=device).view(size, num_nodes)
        assert index.equal(rows) and sibling.eq(-1).all() and index.is_contiguous() and child.is_contiguous()
        assert child.tolist() == [[*range(1, num_nodes), -1]] * size
        return SimpleNamespace(predicts=drafts.flatten(), accept_token_num=drafts[:, 0])

    for size in (1, 3, len(ALL), 2):
        rows = torch.zeros(size * (DRAFTS + 1), dtype=torch.int64, device=device)
        verifier.verify_whole({"logits": torch.zeros(len(rows), VOCAB, device=device)}, rows, rows)
    assert len(places) == 1


@pytest.mark.parametrize("sampler", [None, "a model's own"])
def test_a_sampler_that_is_not_ours_is_left_alone(sampling, sampler):
    calls = []
    sampling.warmup_kernels(
        lambda *given: calls.append(given), SimpleNamespace(sampler=sampler, rejection_sampler=None), 1, 2
    )
    assert len(calls) == 1
