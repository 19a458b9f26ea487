"""What a step leaves to the next one is what the models would have after reading all committed tokens anew.

Text alone does not tell: with wrong keys, features or logits of the draft it stays right, and is only slower.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.reference.causal_attend import causal_attend, rotate
from op_tests.engine.toys import DEVICE, random_eagle1_head, random_head, random_llama
from op_tests.engine.view import View

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [4]]
LENGTHS = [30, 21, 14]
# acceptance to order: a random head would have next to none, and a path of a root alone moves nothing
POLICIES = {
    "normal": {},
    "accept_all": {"accept_policy": "accept_all"},
    "simulate": {"accept_policy": "simulate", "simulated_accept_rates": (0.8, 0.5, 0.3)},
}


# an EAGLE-3 head reads three streams of the target, an EAGLE-1 head with biases the last one
HEADS = {"EAGLE-3": random_head, "EAGLE-1": random_eagle1_head}


@pytest.fixture(scope="module")
def models(request):
    """A head, and a target of eight layers."""
    device = DEVICE
    # small weights: with larger ones softmax is so steep that eight layers lift float32 rounding above the tolerances
    target = random_llama(num_layers=8, std=0.15, device=device)
    return HEADS[getattr(request, "param", "EAGLE-3")](target), target


class Anew(NamedTuple):
    """Keys and values [L, T, Hkv, D] of all layers, and what comes out behind them."""

    keys: Tensor
    values: Tensor
    output: tuple


def run_anew(forward, *inputs, **options) -> Anew:
    """`forward` over one whole sequence, without a pool."""
    kept = []

    def attend(layer, query, key, value, window=None, *, angles):
        query, key = rotate(query, key, angles)
        kept.append((key[0], value[0]))
        return causal_attend(layer, query, key, value, window)

    output = forward(*inputs, attend, **options)
    return Anew(*(torch.stack(tensors) for tensors in zip(*kept)), output)


@torch.inference_mode()
def check_row(models, state, row, tokens):
    """tokens: all committed ones of the row's request, its root last."""
    head, target = models
    count = len(tokens) - 1
    assert state.lengths[row] == count and state.roots[row] == tokens[-1] and state.is_live[row] == 1
    ids = torch.tensor([tokens], device=target.device)
    positions = torch.arange(count, device=target.device)[None]
    read = run_anew(target.forward, ids[:, :-1], positions, capture=head.aux_layers)
    # the row of a token carries the feature of the one before it, so the first token has none
    drafted = run_anew(head.forward, ids[:, 1:], read.output.features, positions, from_target=True)
    page_size = state.target_pool.page_size
    for pool, anew in ((state.target_pool, read), (state.draft_pool, drafted)):
        pages, places = state.block_table[row].long()[positions[0] // page_size], positions[0] % page_size
        assert (pages >= 0).all()
        torch.testing.assert_close(pool.k_cache[:, pages, places], anew.keys, rtol=1e-4, atol=5e-5)
        torch.testing.assert_close(pool.v_cache[:, pages, places], anew.values, rtol=1e-4, atol=5e-5)
    torch.testing.assert_close(state.draft_logits[row], drafted.output.logits[0, -1], rtol=1e-4, atol=5e-5)
    torch.testing.assert_close(state.draft_hidden[row], drafted.output.hidden[0, -1], rtol=1e-4, atol=5e-5)


def check_steps(models, *, policy, switches=None, temperature=0.0, **config):
    """Checks the rows of three requests of different lengths after every step; the counts of accepted drafts.

    switches: whether to speculate, of one step after another; a draft that rests is behind until it has caught up.
    """
    config = EAGLEConfig(num_steps=3, max_batch=3, **config, **POLICIES[policy])
    engine = EAGLEInference(*models, config)
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=count, temperature=temperature, seed=count))
        for prompt, count in zip(PROMPTS, LENGTHS)
    ]
    num_checked, has_rested = 0, switches is not None
    view, num_caught_up = View(engine), 0
    plain = view.runners[0]
    catch_up = plain.catch_up

    def check_rows():
        nonlocal num_checked
        for row in view.rows:
            if row.is_running:
                check_row(models, view.state, row.index, row.request.prompt + row.request.output_ids)
                num_checked += not switches

    def caught_up(num_rows, is_wanted):
        nonlocal num_caught_up
        catch_up(num_rows, is_wanted)
        if is_wanted:  # the step that follows would write over what it leaves
            check_rows()
            num_caught_up += 1

    plain.catch_up = caught_up
    while engine.has_work:
        engine.is_speculating = switches.pop(0) if switches else True
        engine.step()
        if engine.is_speculating:
            check_rows()
    assert num_checked > 0 and num_caught_up == has_rested
    assert [len(request.output_ids) for request in requests] == LENGTHS
    return [count for request in requests for count in request.accepted]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """The host must know the tokens of a step to say what the step should have left."""
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: 0)


in_graphs_too = pytest.mark.parametrize("cuda_graph", [False, pytest.param(True, marks=pytest.mark.gpu)])


@pytest.mark.slow
@in_graphs_too
@pytest.mark.parametrize(
    ("policy", "topk", "page_size"),
    [("normal", 4, 16), ("accept_all", 1, 16), ("accept_all", 4, 1)]
    + [("simulate", topk, page_size) for topk in (1, 4) for page_size in (1, 16)],
)
def test_after_every_step(models, policy, topk, page_size, cuda_graph):
    counts = check_steps(models, policy=policy, topk=topk, page_size=page_size, cuda_graph=cuda_graph)
    if policy == "accept_all":
        assert max(counts) == 3 and (topk > 1 or set(counts) == {3})
    if policy == "simulate":
        assert set(counts) == {0, 1, 2, 3}


@pytest.mark.cross
@in_graphs_too
@pytest.mark.parametrize("models", HEADS, indirect=True)
@pytest.mark.parametrize("topk", [1, 4])
def test_after_steps_that_sample(models, topk, cuda_graph):
    """Prompts are read in parts here."""
    options = {"temperature": 0.8, "prefill_chunk": 5, "cuda_graph": cuda_graph}
    counts = check_steps(models, policy="simulate", topk=topk, **options)
    assert set(counts) >= {0, 1, 2}


@pytest.mark.slow
@in_graphs_too
def test_after_steps_whose_drafts_are_drawn(models, cuda_graph):
    """Nothing is left of drafts that were not accepted: later drafts are drawn with the noise of some of them."""
    options = {"verify_strategy": "rejection", "temperature": 2.0, "cuda_graph": cuda_graph}
    assert set(check_steps(models, policy="normal", topk=4, **options)) >= {0, 1, 2}


@pytest.mark.slow
@in_graphs_too
@pytest.mark.parametrize("models", HEADS, indirect=True)
@pytest.mark.parametrize("topk", [1, 4])
def test_after_plain_steps_that_the_draft_has_missed(models, topk, cuda_graph):
    """It reads them before it drafts again: a few, and more than are kept for it at once."""
    for pause in (5, 18):
        switches = [True] * 2 + [False] * pause + [True]
        check_steps(models, policy="normal", topk=topk, switches=switches, cuda_graph=cuda_graph)
