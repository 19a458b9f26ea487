"""The attention backend of the SGLang plug-in on made batches, beside plain softmax attention over listed slots."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from op_tests.integrations import sglang_stub as stub

TOPK, STEPS, NODES = 3, 3, 7


@pytest.fixture
def attention():
    with stub.installed():
        yield importlib.import_module("eagle_kernels.integrations.sglang.attention")


def make_runner(device, *, page_size=1, dtype=torch.float32, heads=(4, 2, 16), window=None, is_draft=False, size=128):
    """A pool whose requests' rows are shuffled pages, and everything around it that the backend reads."""
    rows, num_pages = 5, 5 * size // page_size
    pages = (torch.randperm(num_pages) + 1).view(rows, -1)
    slots = (pages[..., None] * page_size + torch.arange(page_size)).view(rows, size)
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=slots.to(torch.int32).to(device), size=rows),
        token_to_kv_pool=stub.Pool((num_pages + 1) * page_size, heads[1], heads[2], dtype, device),
        page_size=page_size, device=device, sliding_window_size=window, num_draft_tokens=NODES,
        is_draft_worker=is_draft,
    )  # fmt: skip


def make_batch(runner, mode, seq_lens, rows=(3, 0, 4), **fields):
    device = runner.device
    return SimpleNamespace(
        forward_mode=mode, batch_size=len(seq_lens), seq_lens=torch.tensor(seq_lens, device=device),
        req_pool_indices=torch.tensor(rows[: len(seq_lens)], device=device), seq_lens_sum=sum(seq_lens),
        spec_info=None, **fields,
    )  # fmt: skip


def expected(runner, layer, query, seen, scale=1.0):
    """Softmax attention in float64 of each row of query [T, Hq, D] over the slots that it sees."""
    k, v = (buffer.double() * scale for buffer in runner.token_to_kv_pool.get_kv_buffer(0))
    group = layer.tp_q_head_num // layer.tp_k_head_num
    result = []
    for row, slots in zip(query.double(), seen):
        keys, values = k[slots].repeat_interleave(group, 1), v[slots].repeat_interleave(group, 1)
        logits = torch.einsum("hd,shd->hs", row, keys) * layer.scaling
        if layer.logit_cap > 0:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        result.append(torch.einsum("hs,shd->hd", logits.softmax(-1), values))
    return torch.stack(result)


def run(backend, batch, layer, runner, forward, *, num_rows, out_cache_loc, save=True, dtype=None):
    """Calls a layer on random rows; returns the query and the output as [T, Hq, D]."""
    device, dtype = runner.device, dtype or runner.token_to_kv_pool.k.dtype
    make = lambda heads: torch.randn(num_rows, heads * layer.qk_head_dim, device=device).to(dtype)  # noqa: E731
    q = make(layer.tp_q_head_num)
    k, v = (make(layer.tp_k_head_num).view(num_rows, layer.tp_k_head_num, -1) for _ in range(2))
    batch.out_cache_loc = out_cache_loc
    output = getattr(backend, forward)(q, k, v, layer, batch, save_kv_cache=save)
    assert output.shape == q.shape
    return q.view(num_rows, -1, layer.qk_head_dim), output.view(num_rows, -1, layer.qk_head_dim)


def slots_of(runner, row, *positions):
    return runner.req_to_token_pool.req_to_token[row, list(positions)].long()


def close(actual, wanted, tolerance=2e-5):
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("changes", [{}, {"logit_cap": 2.0}, {"sliding_window_size": 4}], ids=str)
def test_decode(attention, page_size, is_graph, changes, device):
    runner, layer = make_runner(device, page_size=page_size), stub.layer(4, 2, 16, **changes)
    backend = attention.EagleKernelsAttnBackend(runner)
    lengths, rows = [9, 1, 40], (3, 0, 4)
    batch = make_batch(runner, stub.Mode.DECODE, lengths)
    plan(backend, batch, is_graph)
    slots = torch.stack([slots_of(runner, row, length - 1)[0] for row, length in zip(rows, lengths)])
    query, output = run(backend, batch, layer, runner, "forward_decode", num_rows=3, out_cache_loc=slots)
    window = changes.get("sliding_window_size", 1000) + 1
    seen = [slots_of(runner, row, *range(max(0, n - window), n)) for row, n in zip(rows, lengths)]
    close(output, expected(runner, layer, query, seen))


def plan(backend, batch, is_graph):
    if is_graph:
        backend.init_cuda_graph_state(4, 4 * NODES)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("window", [-1, 4])
def test_a_graph_plans_once_for_all_layers_without_a_window(attention, window, monkeypatch, device):
    given, gqa_decode = [], attention.gqa_decode
    monkeypatch.setattr(attention, "gqa_decode", lambda *args, **more: given.append(more) or gqa_decode(*args, **more))
    runner, layer = make_runner(device), stub.layer(4, 2, 16, sliding_window_size=window)
    backend, lengths = attention.EagleKernelsAttnBackend(runner), [9, 1, 70]
    batch = make_batch(runner, stub.Mode.DECODE, lengths)
    for is_graph in (True, False):
        plan(backend, batch, is_graph)
        for _ in range(2):
            slots = torch.stack([slots_of(runner, row, n - 1)[0] for row, n in zip((3, 0, 4), lengths)])
            run(backend, batch, layer, runner, "forward_decode", num_rows=3, out_cache_loc=slots)
    plans = [each["plan"] for each in given]
    assert plans[2:] == [None, None]
    if window < 0:
        assert plans[0] is plans[1] and plans[0].tolist() == [0, 1, 2, 5]  # blocks of 32 slots
    else:
        assert plans[:2] == [None, None]


PARENTS = [-1, 0, 0, 1, 1, 2, 3]


def ancestors(node):
    return [] if node < 0 else [*ancestors(PARENTS[node]), node]


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("window", [-1, 1, 3])
def test_trees(attention, page_size, is_graph, window, device):
    runner, layer = make_runner(device, page_size=page_size), stub.layer(4, 2, 16, sliding_window_size=window)
    backend = attention.EagleKernelsAttnBackend(runner)
    lengths, rows = [9, 2, 40], (3, 0, 4)
    words = torch.tensor([sum(1 << node for node in ancestors(last)) for last in range(NODES)], device=device)
    depths = [len(ancestors(node)) - 1 for node in range(NODES)]
    positions = torch.tensor([n + depth for n in lengths for depth in depths], device=device)
    batch = make_batch(runner, stub.Mode.TARGET_VERIFY, lengths, positions=positions)
    mask = words.view(1, NODES, 1).repeat(3, 1, 1)
    batch.spec_info = SimpleNamespace(draft_token_num=NODES, custom_mask=mask)
    plan(backend, batch, is_graph)
    if is_graph:
        assert backend.verify_mask.fits(3) and not backend.verify_mask.fits(5)
        backend.verify_mask.buffer[:3] = mask
    places = torch.cat([slots_of(runner, row, *range(n, n + NODES)) for row, n in zip(rows, lengths)])
    query, output = run(backend, batch, layer, runner, "forward_extend", num_rows=3 * NODES, out_cache_loc=places)
    seen = []
    for row, n in zip(rows, lengths):
        for node in range(NODES):
            cells = [(t, t) for t in range(n)] + [(n + other, n + depths[other]) for other in ancestors(node)]
            first = n + depths[node] - window if window >= 0 else 0
            seen.append(slots_of(runner, row, *[slot for slot, position in cells if position >= first]))
    close(output, expected(runner, layer, query, seen))


@pytest.mark.parametrize("prefixes", [[0, 0, 0], [5, 0, 17]], ids=str)
@pytest.mark.parametrize("page_size", [1, 8])
def test_prompts_and_chunks(attention, prefixes, page_size, device):
    runner, layer = make_runner(device, page_size=page_size), stub.layer(4, 2, 16)
    backend = attention.EagleKernelsAttnBackend(runner)
    new, rows = [4, 1, 6], (3, 0, 4)
    lengths = [prefix + count for prefix, count in zip(prefixes, new)]
    batch = make_batch(
        runner, stub.Mode.EXTEND, lengths, extend_seq_lens=torch.tensor(new, dtype=torch.int32, device=device),
        extend_seq_lens_cpu=new, extend_prefix_lens_cpu=prefixes,
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    spans = list(zip(rows, prefixes, lengths))
    places = torch.cat([slots_of(runner, row, *range(first, last)) for row, first, last in spans])
    query, output = run(backend, batch, layer, runner, "forward_extend", num_rows=sum(new), out_cache_loc=places)
    seen = [slots_of(runner, row, *range(t + 1)) for row, first, last in spans for t in range(first, last)]
    close(output, expected(runner, layer, query, seen))


@pytest.mark.parametrize("page_size", [1, 8])
def test_draft_extend_in_a_graph(attention, page_size, device):
    runner = make_runner(device, page_size=page_size, is_draft=True)
    layer, backend = stub.layer(4, 2, 16), attention.EagleKernelsAttnBackend(runner)
    assert backend.verify_mask is None
    lengths, rows = [9 + NODES, 2 + NODES, 1], (3, 0, 4)  # the last one is padding
    batch = make_batch(runner, stub.Mode.DRAFT_EXTEND_V2, lengths)
    plan(backend, batch, True)
    places = torch.cat([slots_of(runner, row, *range(n - NODES, n)) for row, n in zip(rows[:2], lengths)])
    places = torch.cat([places, torch.zeros(NODES, dtype=torch.int64, device=device)])
    query, output = run(backend, batch, layer, runner, "forward_extend", num_rows=3 * NODES, out_cache_loc=places)
    seen = [slots_of(runner, row, *range(t + 1)) for row, n in zip(rows[:2], lengths) for t in range(n - NODES, n)]
    close(output[: 2 * NODES], expected(runner, layer, query[: 2 * NODES], seen))
    assert output[2 * NODES :].isfinite().all()


def draft_column(prefix, beam, step, topk, page_size):
    """Where SGLang puts a draft: see `draft_kv_indices`."""
    if page_size == 1 or topk == 1:
        return prefix + beam * STEPS + step
    own = -(-(prefix % page_size + STEPS) // page_size) * page_size
    return prefix // page_size * page_size + beam * own + prefix % page_size + step


@pytest.mark.parametrize("topk", [1, TOPK])
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 1, 3])
def test_draft_levels(attention, topk, page_size, is_graph, window, device):
    """Also with windows that end within the drafts."""
    runner = make_runner(device, page_size=page_size, is_draft=True, window=None if window < 0 else window)
    layer = stub.layer(4, 2, 16, sliding_window_size=window)
    levels = attention.DraftLevels(runner, topk, STEPS)
    assert len(levels.attn_backends) == STEPS - 1
    lengths, rows = [9, 2, 40], (3, 0, 4)
    column = lambda *place: draft_column(*place, topk, page_size)  # noqa: E731
    columns = [[[column(n, beam, step) for step in range(STEPS)] for beam in range(topk)] for n in lengths]
    places = [torch.stack([slots_of(runner, row, *beam) for beam in own]) for row, own in zip(rows, columns)]
    places = torch.stack(places)
    batch = make_batch(runner, stub.Mode.DECODE, lengths, out_cache_loc=places.flatten())
    plan(levels, batch, is_graph)
    for step, backend in enumerate(levels.attn_backends):
        batch.positions = torch.tensor(lengths, device=device).repeat_interleave(topk) + step
        own = places[..., step].flatten()
        query, output = run(backend, batch, layer, runner, "forward_decode", num_rows=3 * topk, out_cache_loc=own)
        seen = []
        for row, n, own in zip(rows, lengths, columns):
            for beam in range(topk):
                cells = [(t, t) for t in range(n)] + [(own[beam][j], n + j) for j in range(step + 1)]
                first = n + step - window if window >= 0 else 0
                seen.append(slots_of(runner, row, *[slot for slot, position in cells if position >= first]))
        close(output, expected(runner, layer, query, seen))
