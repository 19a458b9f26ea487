"""Sample and match in the SGLang plug-in: texts are those of SGLang's rules, with and without drafts.

A small server takes SGLang's place (sglang_server.py), whose host is as far behind as SGLang's may be.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.integrations.sglang import parts, sampling
from eagle_kernels.reference.ops.sampling.sample_from_logits import sample_from_logits
from op_tests.integrations import sglang_server as server
from op_tests.integrations import sglang_stub as stub
from op_tests.integrations.sglang_server import END, LENGTH, VOCAB, Engine, mixed, plain, request, speculative, written

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
    "grammar": {"allowed": list(range(1, VOCAB, 3))},
}


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    monkeypatch.setattr(sampling, "REQUESTS", sampling.Requests())
    monkeypatch.setattr(parts.SWITCHES, "on", {"verify", "match"})
    return stub.imported_by_steps(monkeypatch)


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
    assert_same(wanted, written(make()))
    assert {1, 2, 3, 4} <= set(lengths)


@pytest.mark.parametrize("is_drafting", [False, True])
def test_requests_come_and_go(is_drafting, device):
    """Each wants several things at once; they join a batch, leave it, are read in chunks, retracted, and read again."""
    requests = [mixed(number) for number in range(20)]
    wanted = written(requests)
    assert_same(server.serve(requests, device, wanted if is_drafting else None), wanted)


def test_requests_that_were_retracted_go_on(device):
    """After any number of tokens, in other rows of the pool, beside others, they read their own output as a prompt."""
    more = {"frequency_penalty": 1.5, "min_new_tokens": 12, "logit_bias": {END: 5.0}, "top_k": server.TOP_K_ALL}
    requests = [mixed(number, **more) for number in range(1, LENGTH)]
    wanted = written(requests)
    for number, each in enumerate(requests):
        each.output_ids = wanted[number][: number + 1]
    engine = Engine(requests, device, rows=list(range(LENGTH, 2 * LENGTH - 1)))
    while len(engine.texts[0]) < LENGTH:
        engine.step()
    for number, (text, known) in enumerate(zip(engine.texts, wanted)):
        assert known[: number + 1] + text[: LENGTH - number - 1] == known


@pytest.mark.parametrize("has_min_p", [False, True])
@pytest.mark.parametrize("has_top_p", [False, True])
@pytest.mark.parametrize("has_top_k", [False, True])
def test_filters_leave_what_sglang_s_leave(has_top_k, has_top_p, has_min_p, device):
    """With one noise, all draws are those from the server.kept tokens alone, which are enumerated in float64."""
    requests = [
        request(number, temperature=0.5 + number % 3, top_k=3 + number % 7 if has_top_k else server.TOP_K_ALL,
                top_p=0.4 + number % 5 / 10 if has_top_p else 1.0, min_p=0.1 + number % 4 / 5 if has_min_p else 0.0)
        for number in range(200)
    ]  # fmt: skip
    batch = SimpleNamespace(reqs=requests, device=device)
    info, positions = server.Info.from_schedule_batch(batch, VOCAB), torch.arange(200, device=device)
    info.eagle_kernels_seeds = torch.tensor([sampling.seed_of(each) for each in requests], device=device)
    logits = torch.randn(200, VOCAB, device=device)
    rows = torch.stack([server.kept(row.double(), each.sampling_params) for row, each in zip(logits.cpu(), requests)])
    wanted = sample_from_logits(rows, positions.cpu() + 1, info.eagle_kernels_seeds.cpu(), torch.ones(200).double())
    tokens = sampling.forward(None, None, SimpleNamespace(next_token_logits=logits), info, False, [], [], positions)
    assert tokens.tolist() == wanted.tolist()


ENDS = {
    "stop_token_ids": {11, 12}, "eos_token_ids": {13}, "additional_stop_token_ids": {14, 15}, "eos_token_id": 16,
}  # fmt: skip


@pytest.mark.parametrize("is_drafting", [False, True])
def test_nothing_ends_a_request_early(is_drafting, device):
    """Ends are what the request, its model and its tokenizer name; after min_new_tokens they come at once."""
    requests = [request(number, min_new_tokens=6 if number % 2 else 1) for number in range(len(ENDS) + 1)]
    requests[-1].tokenizer, requests[-1].eos_token_ids = None, {17}  # of a server without one
    for name, each in zip(ENDS, requests):
        for owner in (each.sampling_params, each, each.tokenizer):
            if hasattr(owner, name):
                setattr(owner, name, ENDS[name])
    for each in requests:
        each.sampling_params.logit_bias = dict.fromkeys(server.ends_of(each), 100.0)
    for each in requests:
        (text,) = speculative([each], device, [[16] * LENGTH])[0] if is_drafting else plain([each], device)
        least = each.sampling_params.min_new_tokens
        assert [token in server.ends_of(each) for token in text] == [False] * least + [True] * (len(text) - least)


def test_nothing_else_waits(device):
    """Of requests with few ends and with many, read in several batches, all other tokens may come at once."""
    requests = [request(number, min_new_tokens=6, stop_token_ids=set(range(20, 20 + number))) for number in range(5)]
    for numbers in ([1, 3], [4], [0, 2]):
        Engine([requests[number] for number in numbers], device, numbers)
    rows, none = torch.arange(5, device=device), torch.full((5, 1), -1, device=device)
    tree = (torch.zeros_like(none), rows[:, None], none, none)
    logits = sampling.REQUESTS.penalize(tree, torch.zeros(5, VOCAB, device=device), rows)
    assert [set((row == float("-inf")).nonzero()[:, 0].tolist()) for row in logits] == [
        server.ends_of(each) for each in requests
    ]


def test_greedy_requests_take_the_first_of_equal_logits(device):
    """As SGLang's argmax does, also beside a request that is sampled, which k = 1 alone would not give."""
    engine = Engine([request(0), request(1, **WANTED["greedy"])], device)
    engine.table.zero_()  # all but the first tokens are drawn from it
    for _ in range(4):
        engine.step()
    engine.verify([[], []], seed=1)
    sampled, greedy = (set(text[1:]) for text in engine.texts)
    assert greedy == {0} != sampled


@pytest.mark.parametrize("is_drafting", [False, True])
def test_requests_join_one_by_one(is_drafting, device):
    """One without penalties is first, so that all that others need is there from when they come."""
    requests = [mixed(number) for number in (1, 0, 3, 2, 4, 6, 8, 10, 12)]
    wanted = written(requests)
    running, steps = Engine(requests[:1], device, rows=[9]), 0
    while min(map(len, running.texts)) < LENGTH:
        number = len(running.texts)
        if number < len(requests):
            running.merge_batch(Engine([requests[number]], device, rows=[number]))
        steps += 1
        running.verify(wanted[: len(running.texts)], steps) if is_drafting else running.step()
    assert_same(running.texts, wanted)


def test_rows_and_counts_are_taken_over(device):
    """A request finds nothing of the one that had its row of the pool, nor of the one that had its slot of counts."""
    requests = [request(4, frequency_penalty=2.0), request(5), request(6, frequency_penalty=1.0)]
    plain([request(number, frequency_penalty=3.0, min_new_tokens=50) for number in range(4)], device)
    assert_same(plain(requests, device, rows=[1, 0, 2]), written(requests))
    assert set(sampling.REQUESTS._slots) == {1, 2, 3}


@pytest.mark.parametrize("penalty", [0.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_of_16_bits(dtype, penalty, device):
    """They are penalised and sampled in fp32."""
    requests, table = [request(number, frequency_penalty=penalty) for number in range(3)], server.TABLE.to(dtype)
    wanted = written(requests, table=table)
    assert_same(plain(requests, device, table=table), wanted)
    assert_same(speculative(requests, device, wanted, table=table)[0], wanted)


def test_requests_without_a_seed(device):
    """Each has one of its own, which is the same wherever it is served; SGLang's deterministic mode gives all 42."""
    make = lambda numbers: [request(number, sampling_seed=None) for number in numbers]  # noqa: E731
    wanted = plain(make([0, 5, 0]), device)
    assert wanted[0] == wanted[2] != wanted[1]
    assert 0 <= sampling.seed_of(make([0])[0]) < 2**63


@pytest.mark.parametrize("seed", [0, 1, 42, 2**62, 2**63 - 1, 2**63, 2**64, -1, -(2**63)])
def test_a_seed_that_is_given_is_the_seed(seed):
    """Whatever the request is called; 0 is one as well."""
    requests = [request(number, sampling_seed=seed) for number in range(3)]
    assert [sampling.seed_of(each) for each in requests] == [seed & (2**63 - 1)] * 3


# a rank of its own: its texts, and a hash of a text that other processes do not have
RANK = """
import pytest, torch
from eagle_kernels.integrations.sglang import parts, sampling
from op_tests.integrations import sglang_stub as stub
from op_tests.integrations.sglang_server import mixed, plain
stub.imported_by_steps(pytest.MonkeyPatch())
parts.turn_on({"verify", "match"})
texts = plain([mixed(number, sampling_seed=None) for number in range(6)], torch.device("cpu"))
print([hash("request 0"), texts])
"""


def test_all_ranks_write_one_text():
    """Nothing goes by what differs from process to process, such as the hash of a text."""
    told = {**os.environ, "PYTHONHASHSEED": str(1 + hash("request 0") % 1000)}
    result = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, env=told, check=True)
    other_hash, texts = eval(result.stdout)
    assert other_hash != hash("request 0")
    assert texts == plain([mixed(number, sampling_seed=None) for number in range(6)], torch.device("cpu"))


def test_seeds_of_any_size_are_served(device):
    """They are all that texts differ by, in whichever of their 63 bits they do."""
    seeds = [1, 1 + (1 << 20), 1 + (1 << 40), 1 + (1 << 62), 0, -1, -2, 1, 1 + (1 << 63)]
    texts = plain([request(0, sampling_seed=seed) for seed in seeds], device)
    assert texts[-1] == texts[-2] == texts[0]
    assert len(set(map(tuple, texts))) == len(seeds) - 2
    made = [sampling.seed_of(request(number, sampling_seed=None)) for number in range(200)]
    for bit in range(63):
        assert 50 < sum(seed >> bit & 1 for seed in made) < 150


@pytest.mark.parametrize("is_original", [False, True])
def test_log_probabilities_are_sglangs(is_original, sglang, device):
    """Of the logits as server.adjusted, divided by the temperature, unless SGLang was told to leave that out."""
    sglang["sglang.srt.layers.sampler"].SGLANG_RETURN_ORIGINAL_LOGPROB = is_original
    engine = Engine([request(0, temperature=0.5, top_k=9), request(1, temperature=2.0)], device)
    engine.wants_logprobs = True
    given = engine.table[engine.last].clone()
    engine.step()
    temperatures = torch.tensor([[1.0], [1.0]] if is_original else [[0.5], [2.0]], device=device)
    wanted = (given / temperatures).log_softmax(-1)
    ((output, found),) = engine.logprobs
    assert output is engine.output
    torch.testing.assert_close(found, wanted.gather(1, engine.last[:, None])[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_log_probabilities_of_drafts_are_of_adjusted_logits(dtype, device):
    requests, table = [mixed(number) for number in range(6)], server.TABLE.to(dtype)
    engine = Engine(requests, device, table=table)
    engine.verify([[]] * 6, seed=1)
    roots = engine.output.next_token_logits.view(6, 8, VOCAB)[:, 0].cpu()
    wanted = [server.adjusted(table[text[0]].double(), each, text[:1]) for each, text in zip(requests, engine.texts)]
    torch.testing.assert_close(roots, torch.stack(wanted).float())


def test_a_draw_is_between_what_sglang_does_before_and_after(sglang, device):
    """Before it SGLang mends logits that are no numbers, after it it lets ranks agree; both in place."""
    engine = Engine([request(0), request(1)], device)
    sampler = sglang["sglang.srt.layers.sampler"].Sampler
    sampler._preprocess_logits = lambda sampler, logits, info: logits.fill_(-9.0).index_fill_(
        1, torch.tensor(7, device=logits.device), 9.0
    )
    sampler._sync_token_ids_across_tp = lambda sampler, tokens, info: tokens.add_(20)
    engine.step()
    assert engine.last.tolist() == [27, 27]


@pytest.mark.parametrize("case", ["masks", "a batch of no request", "more options", "greedy"])
def test_what_only_sglang_samples(case, device):
    engine = Engine([request(0)], device)
    info, options = engine.forward_info(), {}
    info.eagle_kernels_seeds = engine.rows
    if case == "masks":
        info.return_sampling_masks = [True]
    elif case == "a batch of no request":
        del info.eagle_kernels_seeds
    elif case == "greedy":
        info.is_all_greedy = True
    else:
        options = {"logprob_logits": engine.table}
    output = SimpleNamespace(next_token_logits=engine.table[:1])
    given = (engine.runner.sampler, output, info, False, [0], [None], engine.position)
    assert sampling.forward(lambda *given, **more: (given, more), *given, **options) == (given, options)


def test_batches_without_requests(device):
    """They ask for nothing, and nothing keeps a batch that SGLang drops."""
    batch = server.ScheduleBatch(reqs=[], device=device)
    info = sampling.from_schedule_batch(lambda cls, batch, size: SimpleNamespace(size=size), server.Info, batch, VOCAB)
    copy = sampling.copy_for_forward(lambda info: SimpleNamespace(penalizer_orchestrator=None), info)
    assert info.size == VOCAB and info.eagle_kernels_asked is copy.eagle_kernels_asked is None
    assert not sampling.has_penalties(info) and not sampling.has_penalties(copy)
    batch.reqs = [request(0, presence_penalty=1.0)]
    assert sampling.has_penalties(info)
    del batch
    assert not sampling.has_penalties(info)


def test_other_batches_are_sglangs(device):
    engine = Engine([request(0)], device)
    original = lambda *given: given  # noqa: E731
    bare = SimpleNamespace(sampling_info=SimpleNamespace(), req_pool_indices=engine.rows)
    assert sampling.sample(original, engine.runner, "logits", bare) == (engine.runner, "logits", bare)
    engine.runner.is_draft_worker = True
    draft = SimpleNamespace(sampling_info=engine.info, req_pool_indices=engine.rows)
    assert sampling.sample(original, engine.runner, "logits", draft) == (engine.runner, "logits", draft)
