"""Trees of drafts in the vLLM plug-in: rows laid out, verified, and their texts beside those without drafts."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle_kernels.integrations.vllm.trees import Trees, TreeShape
from op_tests.integrations import vllm_stub as stub
from op_tests.integrations.vllm_server import (
    ALL,
    LENGTH,
    MODES,
    SINGLE,
    WANTED,
    Server,
    Tree,
    Watch,
    padded,
    request,
    runner_of,
    written,
)

SHAPES = [TreeShape(3, 2, 6), TreeShape(4, 3, 8), TreeShape(1, 3, 4), TreeShape(8, 5, 70)]
BANNED = {"bad_words_token_ids": [[3], [11, 4], [7, 9, 20], [7, 9, 21], [5, 9, 2, 31, 8]]}
HARD = [*ALL, *(request(**{"seed": 40 + index} | each | BANNED) for index, each in enumerate(WANTED.values()))]


@pytest.fixture(params=[name for name in stub.NAMES if name != "0.33"])
def sampling(request):
    """Trees are for vLLM 0.26."""
    with stub.vllm(request.param):
        module = importlib.import_module("eagle_kernels.integrations.vllm.sampling")
        if module.Step is not SimpleNamespace:
            pytest.skip("there are no trees")
        yield module


class TreeServer(Server):
    """A server whose drafts are trees."""

    def __init__(self, sampling, requests, device, shape, mode="raw_logprobs", **options):
        super().__init__(sampling, requests, device, mode)
        self.shape, places = shape, len(requests) + 3
        kind = importlib.import_module("eagle_kernels.integrations.vllm.tree_verification").TreeVerifier
        spec = {"num_speculative_tokens": shape.num_nodes - 1, "rejection_sample_method": "standard",
                "synthetic_acceptance_rates": None} | options  # fmt: skip
        self.trees = Trees(shape, places, places * shape.num_nodes, self.device)
        self.verifier = kind(self.sampler, SimpleNamespace(**spec), self.device, self.trees)

    def batch(self, drafts: list[Tree], counts=None):
        """Makes a step of trees, of which so many nodes are left."""
        counts = counts or [self.shape.num_nodes] * len(drafts)
        logits, batch = super().batch([tree.tokens[1:count] for tree, count in zip(drafts, counts)])
        for tree, place in zip(drafts, self.places.tolist()):
            self.trees.state[:, place] = tree.state(self.shape).to(self.device)
        batch.input_ids, batch.positions = batch.input_ids[1:].clone(), batch.positions[1:].clone()
        batch.logits_indices = batch.logits_indices - 1
        batch.num_draft_tokens_per_req = np.array(counts, np.int32) - 1
        batch.num_draft_tokens, batch.num_tokens = sum(counts) - len(counts), sum(counts)
        batch.num_scheduled_tokens, batch.query_start_loc_np = np.array(counts, np.int32), batch.cu_num_logits_np
        batch.req_ids = [str(index) for index in range(len(counts))]
        self.trees.lay_out(batch)
        return logits, batch

    def step(self, drafts: list[Tree], counts=None, **changes):
        """Verifies trees; returns the output, and the nodes that were accepted."""
        logits, batch = self.batch(drafts, counts)
        vars(batch).update(changes)
        output = self.verifier(logits, batch)
        found = self.take(output)
        given = counts or [self.shape.num_nodes] * len(drafts)
        assert output.num_rejected.tolist() == [count - taken for count, taken in zip(given, found)]
        accepted = self.trees.num_accepted.tolist()
        assert accepted == [count - 1 for count in found] + [-1] * (len(accepted) - len(found))
        nodes = self.trees.accept_index[: len(found)].tolist()
        for index, (row, count, tree) in enumerate(zip(nodes, found, drafts)):
            path = [node - index * self.shape.num_nodes for node in row[:count]]
            assert self.verifier.rates is not None or path == tree.path(path[-1])
        return output


def counts_of(kind: str, shape: TreeShape, num_requests: int, coin) -> list[int] | None:
    if kind == "whole":
        return None
    counts = coin.integers(1, shape.num_nodes + 1, num_requests).tolist()
    return [max(2, counts[0]), *counts[1:]]  # without any drafts vLLM calls its sampler


KINDS = pytest.mark.parametrize("kind", ["whole", "ragged"])


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_texts_with_trees_are_those_without(sampling, shape, kind, device):
    """Greedy and seeded, with filters, penalties, biases and banned words, all in one batch, and each alone."""
    coin = np.random.default_rng(3)
    for requests in (HARD, *([each] for each in HARD[:: 1 if shape == SHAPES[0] else 9])):
        ahead, server, lengths = written(requests, LENGTH + 8), TreeServer(sampling, requests, device, shape), []
        while min(map(len, server.texts)) < (LENGTH if len(requests) > 1 else 4):
            before = [len(text) for text in server.texts]
            drafts = [Tree.random(shape, coming[size:] + [0] * 9, coin) for coming, size in zip(ahead, before)]
            server.step(drafts, counts_of(kind, shape, len(requests), coin))
            lengths += [len(text) - size for text, size in zip(server.texts, before)]
        for text, wanted in zip(server.texts, written(requests, max(map(len, server.texts)))):
            assert text == wanted[: len(text)]
        assert max(lengths) > 1 or len(requests) == 1


@pytest.mark.parametrize("shape", [SHAPES[1], TreeShape(1, 4, 5)], ids=str)
def test_what_is_launched_later_is_compiled_before(sampling, shape, monkeypatch, device):
    """Trees, cut ones and prompts, by every kind of sampling that is foreseen."""
    coin, watch = np.random.default_rng(3), Watch(monkeypatch, sampling)
    server = TreeServer(sampling, ALL, device, shape)

    def vllm_s_own(*given):
        logits, batch = Server.batch(server, [[]] * len(ALL))
        server.sampler(padded(logits), batch)
        watch.seen.clear()

    sampling.warmup_kernels(vllm_s_own, runner_of(server, shape.num_nodes - 1), "execute", "sample")
    compiled = set(watch.seen)
    for single in SINGLE:
        requests = [request(**single, seed=seed) for seed in range(3)]
        later, ahead = TreeServer(sampling, requests, device, shape), written(requests, LENGTH + 8)
        logits, plain = Server.batch(later, [[]] * 3)
        later.sampler(padded(logits), plain)
        for kind in ("whole", "ragged"):
            drafts = [Tree.random(shape, each, coin) for each in ahead]
            logits, batch = later.batch(drafts, counts_of(kind, shape, 3, coin))
            later.verifier(padded(logits), batch)
    assert watch.seen <= compiled and len({name for name, *_ in compiled}) == 3


@KINDS
def test_kernels_verify_trees(sampling, kind, backend, device):
    requests = HARD[len(ALL) :]
    shape, coin, ahead = SHAPES[1], np.random.default_rng(3), written(requests, LENGTH + 8)
    server = TreeServer(sampling, requests, device, shape)
    for _ in range(2):
        drafts = [Tree.random(shape, each[len(text) :], coin) for each, text in zip(ahead, server.texts)]
        server.step(drafts, counts_of(kind, shape, len(requests), coin))
    assert all(text == coming[: len(text)] for text, coming in zip(server.texts, ahead))


@KINDS
@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_are_those_without_drafts(sampling, mode, kind, device):
    requests = [request(**{"seed": 9} | each, logprobs=index % 3) for index, each in enumerate(WANTED.values())]
    shape, coin = SHAPES[1], np.random.default_rng(8)
    ahead, server = written(requests), TreeServer(sampling, requests, device, shape, mode)
    drafts = [Tree.random(shape, coming, coin) for coming in ahead]
    counts = counts_of(kind, shape, len(requests), coin)
    found = server.step(drafts, counts).logprobs_tensors
    plain = Server(sampling, requests, device, mode)
    wanted = [plain.decode().logprobs_tensors for _ in range(max(map(len, server.texts)))]
    first = 0
    for index, text in enumerate(server.texts):
        for place in range(len(text)):
            for name in ("logprob_token_ids", "logprobs"):
                theirs, ours = getattr(wanted[place], name)[index], getattr(found, name)[first + place]
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        first += (counts or [shape.num_nodes] * len(requests))[index]
    assert max(map(len, server.texts)) > 1


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_has_its_rates(sampling, temperature, kind, device):
    """Whatever the tree's depth; the nodes stand apart, so that keys and values move."""
    shape, rates = TreeShape(4, 3, 8), [0.8, 0.5, 0.3] + [0.1] * 4
    requests = [request(temperature=temperature, seed=seed) for seed in range(600)]
    options = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    server = TreeServer(sampling, requests, device, shape, **options)
    flat = Tree([-1, *range(1, 8)], [-1] + [0] * 7)
    counts = None if kind == "whole" else [8] * 599 + [3]
    server.step([flat] * 600, counts)
    lengths = torch.tensor([len(text) for text in server.texts])
    for accepted, rate in enumerate(rates[:3], 1):
        assert abs((lengths > accepted).double().mean() - rate) < 0.08
    assert (lengths <= 4).all() and (server.trees.accept_index[:600][lengths == 4] % 8).tolist()[0] == [0, 2, 4, 6]


def test_drafts_that_a_grammar_did_not_know_are_not_accepted(sampling, device):
    """Their masks after the first are empty."""
    shape, requests = SHAPES[1], ALL[:3]
    ahead, server = written(requests), TreeServer(sampling, requests, device, shape)
    drafts = [Tree([-1, *coming[:3], 1, 2, 3, 4], [-1, 0, 1, 2, 0, 0, 0, 0]) for coming in ahead]
    server.step(drafts, eagle_kernels_unknown={"1"})
    assert [len(text) for text in server.texts] == [4, 1, 4]
    assert all(text == coming[: len(text)] for text, coming in zip(server.texts, ahead))
