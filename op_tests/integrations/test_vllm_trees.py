"""Trees of drafts in the vLLM plug-in: steps of a made worker, beside its models without a cache."""

import functools
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle_kernels.integrations.vllm.trees import Trees, TreeShape
from op_tests.integrations import vllm_stub as stub
from op_tests.integrations.vllm_tree_server import PAGE, Worker

SHAPES = [TreeShape(4, 3, 8), TreeShape(1, 3, 4), TreeShape(3, 2, 12), TreeShape(8, 1, 6)]


@pytest.fixture(params=[name for name in stub.NAMES if name != "0.33"], autouse=True)
def vllm(request, monkeypatch):
    """Trees are for vLLM 0.26."""
    with stub.vllm(request.param):
        if importlib.import_module("eagle_kernels.integrations.vllm.sampling").Step is not SimpleNamespace:
            pytest.skip("there are no trees")
        if stub.SITE:
            module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.speculator")
            monkeypatch.setattr(module, "init_attn_backend", lambda *_, **__: ([], None, None))
            module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.autoregressive.speculator")
            monkeypatch.setattr(module.MULTIMODAL_REGISTRY, "supports_multimodal_inputs", lambda _: False)
        yield


@pytest.fixture
def backend(backend, device):
    if backend == "reference" and device.type != "cpu":
        pytest.skip("the reference reads addresses of the CPU alone")


@pytest.mark.parametrize("kind", ["whole", "ragged"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_texts_and_trees(shape, kind, device):
    worker = Worker(shape, device)
    worker.run(24, np.random.default_rng(4), kind)
    assert max(worker.accepted) > min(2, shape.depth) and (worker.moved > 1 or shape.topk == 1)


def test_rows_without_a_request_have_accepted_nothing(device):
    """However many requests there are in one step and in the next."""
    trees, coin = Trees(SHAPES[0], 9, 99, torch.device(device)), np.random.default_rng(3)
    sizes = [*range(9, 0, -1), *coin.integers(1, 10, 40).tolist()]
    for size in sizes:
        number = torch.from_numpy(coin.integers(0, 4, size)).to(device, torch.int32)
        trees.note(torch.zeros(size, 4, dtype=torch.int32, device=device), number)
        assert trees.num_accepted.tolist() == number.tolist() + [-1] * (9 - size)
    trees.forget()
    assert trees.num_accepted.tolist() == [-1] * 9


def test_drafts_after_rows_that_are_no_tree_s_are_refused(device):
    trees = Trees(SHAPES[0], 2, 99, torch.device(device))
    batch = SimpleNamespace(
        num_reqs=2, num_tokens=11, num_draft_tokens=5, idx_mapping=torch.arange(2, device=device),
        num_scheduled_tokens=np.array([4, 7], np.int32), num_draft_tokens_per_req=np.array([0, 5], np.int32),
        positions=torch.arange(11, device=device),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="vLLM scheduled drafts after rows that are no tree's"):
        trees.lay_out(batch)
    batch.num_scheduled_tokens[:] = [5, 6]
    trees.lay_out(batch)


@pytest.mark.parametrize("kind", ["whole", "ragged"])
def test_seeded_texts(kind, device):
    worker = Worker(SHAPES[0], device, seeds=30)
    worker.run(20, np.random.default_rng(5), kind)
    assert max(worker.accepted) > 2 and worker.moved > 1


def test_a_draft_with_a_vocabulary_of_its_own(device):
    worker = Worker(SHAPES[0], device, known=[0, 2, 3, 5, 6, 7, 9, 11, 12, 14, 17, 18, 20, 21, 23])
    worker.run(20, np.random.default_rng(5))
    assert max(worker.accepted) > 1


def test_masks_of_two_words(device):
    """Trees of more than 64 nodes, which the longest text cuts."""
    worker = Worker(TreeShape(8, 4, 70), device, 1)
    worker.run(14, np.random.default_rng(4))
    assert max(worker.accepted) > 2 and worker.moved > 1


@pytest.mark.parametrize("num_places", [1, 3])
def test_graphs_hold_more_requests_than_there_are(num_places, device):
    worker = Worker(SHAPES[0], device, num_places, padded=2)
    worker.run(30, np.random.default_rng(6))
    assert max(worker.accepted) > 2 and worker.moved > 1


def test_kernels(backend, device):
    worker = Worker(SHAPES[0], device, 2)
    worker.run(6, np.random.default_rng(7), "ragged")


def test_runs_without_requests_keep_no_trees(device):
    """Those that measure memory come before layers and trees are known, others at any time."""
    worker = Worker(SHAPES[0], device)
    worker.run(6, np.random.default_rng(4))
    before = worker.trees.state.clone()
    assert worker.dummy(3).shape == (3, 7) and torch.equal(worker.trees.state, before)
    assert (worker.trees.num_accepted == -1).all() and worker.trees.current is None
    speculator = worker.speculator
    for name in ("trees", "prefill_cudagraph_manager", "decode_cudagraph_manager", "kv_cache_config", "block_tables"):
        setattr(speculator, name, None)
    assert worker.dummy(3, skip_attn_for_dummy_run=True, is_profile=True).shape == (3, 7)


def test_what_moves_in_one_launch(monkeypatch, device, backend):
    """Layers of one layout and block table; a cache that layers of a group share once, one of two groups in each."""
    drafting = importlib.import_module("eagle_kernels.integrations.vllm.tree_drafting")
    pages, batch, nodes = 9, 2, 8
    cache = lambda heads, size: torch.rand(pages, heads, PAGE, 2 * size, device=device)  # noqa: E731
    caches = {name: cache(2, 16) for name in ("a", "b", "draft")} | {"wide": cache(2, 24)}
    caches |= {"latents": torch.rand(pages, PAGE, 48, device=device)}
    caches |= {"shared": caches["a"], "of another group": caches["a"]}
    layers = {name: SimpleNamespace(kv_cache=kv_cache, head_size=16) for name, kv_cache in caches.items()}
    layers["wide"].head_size, layers["latents"].kv_lora_rank = 24, 32
    groups = [["a", "b", "shared", "wide", "latents", "draft"], ["of another group"]]
    tables = torch.tensor([[[1, 2], [4, 5]], [[6, 3], [8, 7]]], dtype=torch.int32, device=device)
    speculator = object.__new__(drafting.TreeDrafts)
    vars(speculator).update(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names) for names in groups]),
        block_tables=SimpleNamespace(input_block_tables=tables), beam_caches={"draft": ()}, moves=None,
        target_input_buffers=SimpleNamespace(
            seq_lens=torch.tensor([13 + nodes, 5 + nodes, 0], device=device),
            query_start_loc=nodes * torch.arange(4, device=device),
        ),
        trees=SimpleNamespace(
            accept_index=torch.tensor([[0, 2, 5], [8, 14, 15]], device=device),
            num_accepted=torch.tensor([2, 1], device=device),
        ),
        shape=TreeShape(2, 2, nodes),
    )  # fmt: skip
    wanted = {name: kv_cache.clone() for name, kv_cache in caches.items()}
    wanted["of another group"] = wanted["shared"] = wanted["a"]
    for name in ("a", "b", "wide", "latents", "of another group"):
        rows = wanted[name] if name == "latents" else wanted[name].transpose(1, 2)
        for request, before, path in ((0, 13, [0, 2, 5]), (1, 5, [0, 6])):
            for depth, node in enumerate(path):
                source, target = (
                    (int(tables[int(name == "of another group"), request, slot // PAGE]), slot % PAGE)
                    for slot in (before + node, before + depth)
                )
                rows[target] = rows[source]
    calls, move = [], drafting.move_accepted_kv
    monkeypatch.setattr(
        drafting, "move_accepted_kv", lambda *given, **more: (calls.append(given), move(*given, **more))
    )
    speculator._move(batch)
    assert len(calls) == 4 and all(torch.equal(caches[name], wanted[name]) for name in caches)
    found = speculator.moves
    speculator._move(batch)
    assert speculator.moves is found and len(calls) == 8


def test_addresses_are_known_before_graphs_are_captured(monkeypatch, device):
    """And found anew where vLLM allocates caches anew."""
    worker, found = Worker(SHAPES[0], device), []
    speculator = worker.speculator
    above = importlib.import_module("vllm.v1.worker.gpu.spec_decode.autoregressive.speculator").AutoRegressiveSpeculator
    monkeypatch.setattr(above, "capture", lambda self: found.extend(self.moves), raising=False)
    speculator.capture()
    places = [worker.layers[f"target.{number}"].kv_cache.data_ptr() for number in range(2)]
    assert len(found) == 1 and found[0].addresses[0].tolist() == places and speculator.moves == found
    groups = [[SimpleNamespace(metadata_builders=[worker.builder])]]
    speculator.set_attn(
        worker.model_state, speculator.kv_cache_config, speculator.block_tables, speculator.target_input_buffers, groups
    )
    assert speculator.moves is None


def test_trees_and_rows_are_checked(monkeypatch, device):
    """With EAGLE_KERNELS_DEBUG=1."""
    worker = Worker(SHAPES[0], device)
    monkeypatch.setattr(importlib.import_module("eagle_kernels.runtime.check"), "DEBUG", True)
    worker.run(8, np.random.default_rng(4))
    place, drafted = torch.tensor([1]), worker.trees.state[:, 1:2].clone()
    for field, value, told in ((0, 0, "root"), (0, 5, "deeper"), (1, 1, "later"), (2, 0, "later"), (3, 1, "itself")):
        wrong = drafted.clone()
        wrong[field, 0, 2] = value - 2 if field == 0 else value
        with pytest.raises(RuntimeError, match=told):
            worker.trees.keep(place, wrong)
    monkeypatch.setattr(worker.trees, "lay_out", lambda batch, once=worker.trees.lay_out: (once(batch), once(batch)))
    with pytest.raises(RuntimeError, match="do not follow one another"):
        worker.run(8, np.random.default_rng(4))


# what these tests must see


def _rows(trees, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose each row of a step is, and which of its rows, up to a tree's last."""
    counts = torch.from_numpy(batch.num_scheduled_tokens).long()
    local = torch.cat([torch.arange(int(count)) for count in counts])
    return torch.arange(len(counts)).repeat_interleave(counts), local.clamp(max=trees.shape.num_nodes - 1)


def see_siblings(trees, lay_out, batch):
    lay_out(batch)
    trees.row_mask[: batch.num_tokens] = trees.chain[3:, 0].T[_rows(trees, batch)[1]]


def stand_by_index(trees, lay_out, batch):
    lay_out(batch)
    if trees.current is not None:
        batch.positions[: batch.num_tokens] -= trees.current[0][_rows(trees, batch)]


def see_as_the_request_before(trees, lay_out, batch):
    lay_out(batch)
    trees.row_mask[: batch.num_tokens] = trees.row_mask[: batch.num_tokens].roll(trees.shape.num_nodes, 0)


def keep_elsewhere(trees, keep, places, drafted):
    keep(places.roll(1), drafted)


def move_the_row_after(drafting, move, keys, values, table, before, path, count, **sizes):
    move(keys, values, table, before, path + (path % sizes["num_verify_tokens"] > 0), count, **sizes)


def move_nothing(*_, **__):
    pass


def leave_hidden_states(speculator, bring_to_front, *sizes):
    before = speculator.hidden_states.clone()
    bring_to_front(*sizes)
    speculator.hidden_states.copy_(before)


MUTANTS = (
    ("trees", "lay_out", see_siblings), ("trees", "lay_out", stand_by_index),
    ("trees", "lay_out", see_as_the_request_before), ("trees", "keep", keep_elsewhere),
    ("drafting", "move_accepted_kv", move_the_row_after), ("drafting", "move_accepted_kv", move_nothing),
    ("speculator", "_bring_to_front", move_nothing), ("speculator", "_bring_to_front", leave_hidden_states),
)  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "change"), MUTANTS, ids=[f"{name}-{f.__name__}" for _, name, f in MUTANTS])
def test_faults_are_seen(monkeypatch, owner, name, change, device):
    worker = Worker(SHAPES[0], device)
    owner = getattr(worker, owner)
    monkeypatch.setattr(owner, name, functools.partial(change, owner, getattr(owner, name)))
    with pytest.raises(AssertionError):
        worker.run(24, np.random.default_rng(4))


def test_a_draft_that_reads_trees_is_seen(device):
    """Its first pass has accepted tokens alone."""
    worker = Worker(SHAPES[0], device)
    worker.layers["draft"].impl.reads_trees = True
    with pytest.raises(AssertionError):
        worker.run(24, np.random.default_rng(4))
