"""The attention backend of the SGLang plug-in on made batches, beside plain softmax attention over listed slots."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from op_tests.integrations import sglang_stub as stub
from op_tests.ops.attention.cases import fp8_of

NODES = 7


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
    base = {
        "forward_mode": mode, "batch_size": len(seq_lens), "seq_lens": torch.tensor(seq_lens, device=device),
        "req_pool_indices": torch.tensor(rows[: len(seq_lens)], device=device), "seq_lens_sum": sum(seq_lens),
        "spec_info": None,
    }  # fmt: skip
    return SimpleNamespace(**(base | fields))


# of a layer: what all of them may have, each alone and in the place of the other
FEATURES = [
    {}, {"sliding_window_size": 1}, {"sliding_window_size": 3}, {"logit_cap": 2.0}, {"scaling": 0.4, "sinks": True},
    {"k_scale": 0.5, "v_scale": 0.25},
]  # fmt: skip
# with short requests, and with requests that fill their rows of the pool
CASES = pytest.mark.parametrize(("features", "is_full"), [*((each, False) for each in FEATURES), ({}, True)], ids=str)


def make_case(device, features, **options):
    """A runner, and a layer with these features; scales make its pool one of fp8."""
    features = dict(features)
    sinks = torch.linspace(-1, 2, 4, device=device) if features.pop("sinks", False) else None
    scales = {name: torch.tensor(value, device=device) for name, value in features.items() if name[1:] == "_scale"}
    if scales:
        options["dtype"] = fp8_of(device)
    layer = stub.layer(4, 2, 16, **(features | scales))
    layer.sinks = sinks
    return make_runner(device, **options), layer


def first_seen(layer, position: int) -> int:
    """The first position that a row sees; SGLang's window counts those before it."""
    return 0 if layer.sliding_window_size < 0 else max(0, position - layer.sliding_window_size)


def expected(runner, layer, query, seen):
    scales = (1.0 if scale is None else scale.double() for scale in (layer.k_scale, layer.v_scale))
    return runner.token_to_kv_pool.attend(layer, query, seen, layer.sinks, scales)


def run(backend, batch, layer, runner, forward, *, num_rows, out_cache_loc, save=True):
    """Calls a layer on random rows; returns the query and the output as [T, Hq, D], and checks what was written.

    save: False for keys that are in the pool already, None for a layer that has none of its own.
    """
    device, pool = runner.device, runner.token_to_kv_pool
    dtype = pool.k.dtype if pool.k.dtype.itemsize > 1 else torch.float16
    make = lambda heads: torch.randn(num_rows, heads * layer.qk_head_dim, device=device).to(dtype)  # noqa: E731
    q = make(layer.tp_q_head_num)
    k, v = (make(layer.tp_k_head_num).view(num_rows, layer.tp_k_head_num, -1) for _ in range(2))
    batch.out_cache_loc = out_cache_loc
    wanted = [buffer.float() for buffer in (pool.k, pool.v)]
    for buffer, new, scale in zip(wanted, (k, v), (layer.k_scale, layer.v_scale)):
        if save:
            buffer[out_cache_loc] = (new if scale is None else new / scale).to(pool.k.dtype).float()
    options = {} if layer.sinks is None else {"sinks": layer.sinks}
    given = (q, None, None) if save is None else (q, k, v)
    output = getattr(backend, forward)(*given, layer, batch, save_kv_cache=save is not False, **options)
    assert output.shape == q.shape
    for buffer, kept in zip((pool.k, pool.v), wanted):
        assert torch.equal(buffer.float()[1:], kept[1:])  # slot 0 is for padding
    return q.view(num_rows, -1, layer.qk_head_dim), output.view(num_rows, -1, layer.qk_head_dim)


def check(backend, batch, layer, runner, forward, places, seen, saves):
    """Holds a layer, once for each way of `run` to save its keys, against attention over the slots that rows see."""
    for save in saves:
        query, output = run(
            backend, batch, layer, runner, forward, num_rows=len(seen), out_cache_loc=places, save=save
        )  # fmt: skip
        close(output, expected(runner, layer, query, seen))


def slots_of(runner, row, *positions):
    return runner.req_to_token_pool.req_to_token[row, list(positions)].long()


def close(actual, wanted):
    tolerance = 2e-5 if actual.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("is_graph", [False, True])
@CASES
def test_decode(attention, page_size, is_graph, features, is_full, device):
    runner, layer = make_case(device, features, page_size=page_size)
    backend = attention.EagleKernelsAttnBackend(runner)
    lengths, rows = [128, 128, 127] if is_full else [9, 1, 40], (3, 0, 4)
    batch = make_batch(runner, stub.Mode.DECODE, lengths)
    plan(backend, batch, is_graph)
    slots = torch.stack([slots_of(runner, row, length - 1)[0] for row, length in zip(rows, lengths)])
    seen = [slots_of(runner, row, *range(first_seen(layer, n - 1), n)) for row, n in zip(rows, lengths)]
    # also of layers that read what another one wrote
    check(backend, batch, layer, runner, "forward_decode", slots, seen, (True, False))


def plan(backend, batch, is_graph):
    if is_graph:
        backend.init_cuda_graph_state(len(batch.seq_lens), len(batch.seq_lens) * NODES)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("window", [-1, 4])
def test_a_graph_plans_once_for_all_layers_without_a_window(attention, window, monkeypatch, device):
    given, gqa_decode = [], attention.gqa_decode
    monkeypatch.setattr(attention, "gqa_decode", lambda *args, **more: given.append(more) or gqa_decode(*args, **more))
    runner, layer = make_case(device, {"sliding_window_size": window})
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
@CASES
def test_trees(attention, page_size, is_graph, features, is_full, device):
    runner, layer = make_case(device, features, page_size=page_size)
    backend = attention.EagleKernelsAttnBackend(runner)
    lengths, rows = [128 - NODES, 128 - NODES, 120 - NODES] if is_full else [9, 2, 40], (3, 0, 4)
    words = torch.tensor([sum(1 << node for node in ancestors(last)) for last in range(NODES)], device=device)
    depths = [len(ancestors(node)) - 1 for node in range(NODES)]
    positions = torch.tensor([n + depth for n in lengths for depth in depths], device=device)
    batch = make_batch(runner, stub.Mode.TARGET_VERIFY, lengths, positions=positions)
    mask = words.view(1, NODES, 1).repeat(3, 1, 1)
    batch.spec_info = SimpleNamespace(draft_token_num=NODES, custom_mask=mask)
    plan(backend, batch, is_graph)
    if is_graph:
        assert backend.verify_mask.fits(3) and not backend.verify_mask.fits(5)
        backend.verify_mask.buffer[:3], batch.spec_info.custom_mask = mask, torch.ones_like(mask)
    places = torch.cat([slots_of(runner, row, *range(n, n + NODES)) for row, n in zip(rows, lengths)])
    seen = []
    for row, n in zip(rows, lengths):
        for node in range(NODES):
            cells = [(t, t) for t in range(n)] + [(n + other, n + depths[other]) for other in ancestors(node)]
            first = first_seen(layer, n + depths[node])
            seen.append(slots_of(runner, row, *[slot for slot, position in cells if position >= first]))
    check(backend, batch, layer, runner, "forward_extend", places, seen, (True, False, None))


@pytest.mark.parametrize(("prefixes", "is_told"), [([0, 0, 0], True), ([5, 0, 17], True), ([5, 0, 17], False)], ids=str)
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_prompts_and_chunks(attention, prefixes, is_told, page_size, features, device):
    """The host may not know how long prefixes and chunks are, nor their sum."""
    runner, layer = make_case(device, features, page_size=page_size)
    backend = attention.EagleKernelsAttnBackend(runner)
    new, rows = [4, 1, 6], (3, 0, 4)
    lengths = [prefix + count for prefix, count in zip(prefixes, new)]
    batch = make_batch(
        runner, stub.Mode.EXTEND, lengths, extend_seq_lens=torch.tensor(new, dtype=torch.int32, device=device),
        extend_seq_lens_cpu=new if is_told else None, extend_prefix_lens_cpu=prefixes if is_told else None,
        seq_lens_sum=sum(lengths) if is_told else None,
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    spans = list(zip(rows, prefixes, lengths))
    places = torch.cat([slots_of(runner, row, *range(first, last)) for row, first, last in spans])
    seen = [
        slots_of(runner, row, *range(first_seen(layer, t), t + 1))
        for row, first, last in spans
        for t in range(first, last)
    ]
    check(backend, batch, layer, runner, "forward_extend", places, seen, (True, None))


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_draft_extend_in_a_graph(attention, page_size, features, device):
    runner, layer = make_case(device, features, page_size=page_size, is_draft=True)
    backend = attention.EagleKernelsAttnBackend(runner)
    assert backend.verify_mask is None
    lengths, rows = [9 + NODES, 2 + NODES, 1], (3, 0, 4)  # the last one is padding
    batch = make_batch(runner, stub.Mode.DRAFT_EXTEND_V2, lengths)
    plan(backend, batch, True)
    places = torch.cat([slots_of(runner, row, *range(n - NODES, n)) for row, n in zip(rows[:2], lengths)])
    places = torch.cat([places, torch.zeros(NODES, dtype=torch.int64, device=device)])
    query, output = run(backend, batch, layer, runner, "forward_extend", num_rows=3 * NODES, out_cache_loc=places)
    seen = [
        slots_of(runner, row, *range(first_seen(layer, t), t + 1))
        for row, n in zip(rows[:2], lengths)
        for t in range(n - NODES, n)
    ]
    close(output[: 2 * NODES], expected(runner, layer, query[: 2 * NODES], seen))
    assert output[2 * NODES :].isfinite().all()


def draft_column(prefix, beam, step, topk, num_steps, page_size):
    """Where SGLang puts a draft: see `draft_kv_indices`."""
    if page_size == 1 or topk == 1:
        return prefix + beam * num_steps + step
    own = -(-(prefix % page_size + num_steps) // page_size) * page_size
    return prefix // page_size * page_size + beam * own + prefix % page_size + step


@pytest.mark.parametrize(
    ("topk", "num_steps", "features", "is_full"),
    [
        (1, 3, {}, False),
        (16, 5, {}, False),
        (1, 3, {}, True),
        (2, 3, {}, True),
        *((2, 3, features, False) for features in (*FEATURES, {"sliding_window_size": 0})),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("is_graph", [False, True])
def test_draft_levels(attention, topk, num_steps, page_size, is_graph, features, is_full, device):
    """Also with windows that end within the drafts, and where drafts on pages of their own reach past the row."""
    runner, layer = make_case(device, features, page_size=page_size, is_draft=True, size=320)
    runner.sliding_window_size = None if layer.sliding_window_size < 0 else layer.sliding_window_size
    levels = attention.DraftLevels(runner, topk, num_steps)
    assert len(levels.attn_backends) == num_steps - 1
    lengths, rows = [9, 2, 40], (3, 0, 4)
    steps, beams = range(num_steps), range(topk)
    if is_full and levels.is_scattered:  # some drafts lie in pages that the row has no columns for
        lengths, places = [318, 318, 317], slots_of(runner, 1, *range(3 * levels.num_keys)).view(3, topk, num_steps)
    else:
        lengths = [320 - levels.num_keys] * 3 if is_full else lengths
        columns = [
            [draft_column(n, beam, step, topk, num_steps, page_size) for beam in beams for step in steps]
            for n in lengths
        ]
        places = torch.stack([slots_of(runner, row, *own).view(topk, -1) for row, own in zip(rows, columns)])
    batch = make_batch(runner, stub.Mode.DECODE, lengths, out_cache_loc=places.flatten())
    plan(levels, batch, is_graph)
    for step, backend in enumerate(levels.attn_backends):
        batch.positions = torch.tensor(lengths, device=device).repeat_interleave(topk) + step
        own = places[..., step].flatten()
        seen = []
        for row, n, drafted in zip(rows, lengths, places):
            first = first_seen(layer, n + step)
            prefix, drafts = slots_of(runner, row, *range(first, n)), slice(max(0, first - n), step + 1)
            seen += [torch.cat([prefix, drafted[beam, drafts]]) for beam in beams]
        check(backend, batch, layer, runner, "forward_decode", own, seen, (True,))
