"""Trees that share a budget of rows: texts are those of plain decoding, and sure requests get more of a step."""

from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams, ops
from eagle_kernels.engine.drafters import model_drafter
from eagle_kernels.engine.drafters.protocol import Proposal
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.step import packed_rows
from op_tests.engine.engines import PARAMS, make, prompt_of
from op_tests.engine.toys import DEVICE, ToyModel, WalkerModules, random_head, random_llama
from op_tests.engine.view import View

TREE = {"topk": 3, "num_steps": 3, "num_draft_tokens": 12}


@pytest.fixture(scope="module", params=["stranger", "itself", "head"])
def draft(request, target):
    if request.param == "itself":
        return target
    if request.param == "head":
        return random_head(target, aux_layers=(0, 1, 2))
    return random_llama(hidden_size=16, num_layers=1, seed=1, device=DEVICE)


@pytest.mark.slow
def test_plans_of_many_layers(lag, monkeypatch):
    """Made once a step, for trees of different sizes and for prompts beside them."""
    monkeypatch.setattr("eagle_kernels.engine.batch.kv_pool._LEAST_PLANNED_LAYERS", 1)
    model = random_llama(device=DEVICE)
    engine = make(model, model, max_batch=3, mean_draft_tokens=3, **TREE)
    want = run(make(model, model, max_batch=7), range(5))
    assert [request.output_ids for request in run(engine, range(5))] == [request.output_ids for request in want]


def run(engine, order=range(7)) -> list:
    requests = [engine.submit(prompt_of(number), PARAMS[number]) for number in order]
    engine.collect()
    return requests


@pytest.mark.cross
@pytest.mark.parametrize("mean", [1, 2, 5, 12])
def test_texts_are_those_of_plain_decoding(target, draft, lag, mean):
    """Greedy, sampled, filtered, penalized and with log-probabilities, in one batch."""
    engine = make(draft, target, max_batch=7, mean_draft_tokens=mean, **TREE)
    plain = make(draft, target, max_batch=7)
    plain.is_speculating = False
    for got, want in zip(run(engine), run(plain)):
        assert got.output_ids == want.output_ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("is_live", "num_nodes"),
    [([1, 0, 0], [2, 1, 1]), ([0, 1, 1], [1, 3, 1]), ([1, 1, 1], [4, 1, 1]), ([0] * 3, [1] * 3)],
)
def test_dead_rows_have_no_part_of_the_budget(is_live, num_nodes):
    """Two nodes for each live row in the mean, of chains of four; dead rows keep their root."""
    none, chain = torch.zeros(3, 4, dtype=torch.int64), torch.tensor([[[1], [3], [7], [15]]] * 3)
    tree = ops.BuildTreeOutput(chain, none, none, none, none, torch.arange(12))
    batch = SimpleNamespace(is_live=torch.tensor(is_live, dtype=torch.int32), lengths=torch.full((3,), 9))
    proposal = Proposal(tree, path_probs=lambda: torch.full((3, 3), 0.5))
    assert packed_rows.prune(batch, proposal, 2).num_nodes.tolist() == num_nodes


def test_sure_requests_get_more_rows(target, monkeypatch):
    """Of two alike but for how sure the draft is: what the draft finds likely decides, in the whole batch."""
    engine = make(target, target, max_batch=2, mean_draft_tokens=4, cuda_graph=False, **TREE)
    probs = model_drafter.Candidates.path_probs
    factors = torch.tensor([[1.0], [1e-3]], device=DEVICE)
    monkeypatch.setattr(model_drafter.Candidates, "path_probs", lambda *a: probs(*a) * factors[: len(a[1])])
    counts, prune = [], ops.prune_trees

    def noting(*arguments, **options):
        pruned = prune(*arguments, **options)
        counts.append(pruned.num_nodes.tolist())
        return pruned

    monkeypatch.setattr(packed_rows.ops, "prune_trees", noting)
    requests = [engine.submit(prompt_of(4), SamplingParams(max_new_tokens=20)) for _ in range(2)]
    for _ in range(3):
        engine.step()
    if DEVICE == "cpu":
        assert counts[-1] == [7, 1]
    engine.collect()
    assert requests[0].output_ids == requests[1].output_ids


@pytest.mark.gpu
def test_deterministic_bits(target):
    """In bf16: a request's log-probabilities are those of plain decoding, whatever rows it was given."""
    model = random_llama(device=DEVICE).to(torch.bfloat16)
    engine = make(model, model, max_batch=7, mean_draft_tokens=3, deterministic=True, **TREE)
    requests = [engine.submit(prompt_of(n), SamplingParams(max_new_tokens=20, logprobs=True)) for n in range(7)]
    engine.collect()
    for number, request in enumerate(requests):
        stream = engine.stream(prompt_of(number), 20, speculative=False, logprobs=True)
        assert request.output_ids == [event.token_id for event in stream]
        assert request.logprobs == stream.requests[0].logprobs


def test_a_target_that_takes_no_rows_is_named():
    config = EAGLEConfig(topk=2, num_steps=2, mean_draft_tokens=2, method="draft_model")
    engine = EAGLEInference(ToyModel(seed=1), ToyModel(), config)
    with pytest.raises(ModelError, match="mean_draft_tokens must be None for a target whose forward does not take"):
        engine.generate([1, 2, 3], 4)


def test_a_choice_does_without_rows_that_a_target_does_not_take():
    """And without trees wider than one's own: modules draft chains alone."""
    for draft, config, nodes in (
        (ToyModel(seed=1), EAGLEConfig.tree(4, 3, 12, adaptive="auto", method="draft_model"), [1, 2, 4, 8, 12]),
        (WalkerModules(8), EAGLEConfig.chain(8, adaptive="auto"), [1, 2, 4, 9]),
    ):
        engine = EAGLEInference(draft, ToyModel(), config)
        assert engine.generate([1, 2, 3], 9)[0] == engine.generate([1, 2, 3], 9, speculative=False)[0]
        engine.warmup(most_requests=1)
        assert View(engine).nodes == nodes
