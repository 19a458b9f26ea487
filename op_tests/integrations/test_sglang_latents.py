"""Layers of latents in the attention backend of the SGLang plug-in, on made batches, beside softmax in float64."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from op_tests.integrations import sglang_stub as stub

HEADS, LATENT, ROPE, NODES, SIZE = 4, 16, 8, 7, 96
WIDTH = LATENT + ROPE
SCALING = 0.2


class LatentPool:
    """One layer's rows, as SGLang's pool of models with latents has them."""

    kv_lora_rank = LATENT

    def __init__(self, num_slots, device):
        self.rows = torch.randn(num_slots, 1, WIDTH, device=device)

    def get_kv_buffer(self, layer_id):
        return self.rows, self.rows[..., :LATENT]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v):
        self.rows[loc_info.loc] = cache_k


@pytest.fixture(params=[1, 8])
def made(request, device):
    """(the module, a runner, a backend, the layer that SGLang calls with absorbed queries)."""
    with stub.installed():
        module = importlib.import_module("eagle_kernels.integrations.sglang.attention")
        page_size, rows = request.param, 5
        pages = (torch.randperm(rows * SIZE // page_size) + 1).view(rows, -1)
        slots = (pages[..., None] * page_size + torch.arange(page_size)).view(rows, SIZE)
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=slots.to(torch.int32).to(device), size=rows),
            token_to_kv_pool=LatentPool((rows * SIZE // page_size + 1) * page_size, device), page_size=page_size,
            device=device, sliding_window_size=None, num_draft_tokens=NODES, is_draft_worker=False,
        )  # fmt: skip
        layer = stub.layer(HEADS, 1, WIDTH, v_head_dim=LATENT, tp_v_head_num=1, scaling=SCALING)
        yield module, runner, module.EagleKernelsAttnBackend(runner), layer


def batch_of(runner, mode, seq_lens, rows=(3, 0, 4), **fields):
    base = {
        "forward_mode": mode, "batch_size": len(seq_lens), "spec_info": None, "seq_lens_sum": sum(seq_lens),
        "seq_lens": torch.tensor(seq_lens, device=runner.device),
        "req_pool_indices": torch.tensor(rows[: len(seq_lens)], device=runner.device),
    }  # fmt: skip
    return SimpleNamespace(**(base | fields))


def slots_of(runner, row, *positions):
    return runner.req_to_token_pool.req_to_token[row, list(positions)].long()


def plan(backend, batch, is_graph):
    if is_graph:
        backend.init_cuda_graph_state(len(batch.seq_lens), len(batch.seq_lens) * NODES)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend.init_forward_metadata(batch)


def check(made, forward, batch, slots, seen, backend=None):
    """Holds a layer against attention over the slots that each row sees, after its own rows are written."""
    _, runner, own, layer = made
    query = torch.randn(len(seen), HEADS * WIDTH, device=runner.device)
    key = torch.randn(len(seen), 1, WIDTH, device=runner.device)
    batch.out_cache_loc = slots
    output = getattr(backend or own, forward)(query, key, key[..., :LATENT], layer, batch)
    assert output.shape == (len(seen), HEADS * LATENT)
    assert torch.equal(runner.token_to_kv_pool.rows[slots], key)
    rows = runner.token_to_kv_pool.rows[:, 0].double()
    for number, places in enumerate(seen):
        scores = query[number].view(HEADS, WIDTH).double() @ rows[places].T * SCALING
        wanted = (scores.softmax(-1) @ rows[places][:, :LATENT]).flatten()
        torch.testing.assert_close(output[number].double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("is_graph", [False, True])
def test_decode(made, is_graph):
    _, runner, backend, _ = made
    lengths, rows = [9, 1, 40], (3, 0, 4)
    batch = batch_of(runner, stub.Mode.DECODE, lengths)
    plan(backend, batch, is_graph)
    slots = torch.stack([slots_of(runner, row, length - 1)[0] for row, length in zip(rows, lengths)])
    check(made, "forward_decode", batch, slots, [slots_of(runner, row, *range(n)) for row, n in zip(rows, lengths)])


def test_prompts_after_a_cached_prefix(made):
    _, runner, backend, _ = made
    lengths, new, rows = [9, 30, 40], [4, 30, 1], (3, 0, 4)
    batch = batch_of(
        runner, stub.Mode.EXTEND, lengths, extend_seq_lens=torch.tensor(new, device=runner.device),
        extend_seq_lens_cpu=new, extend_prefix_lens_cpu=[a - b for a, b in zip(lengths, new)],
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    places = [(row, place) for row, n, count in zip(rows, lengths, new) for place in range(n - count, n)]
    slots = torch.stack([slots_of(runner, row, place)[0] for row, place in places])
    check(made, "forward_extend", batch, slots, [slots_of(runner, row, *range(p + 1)) for row, p in places])


def test_fresh_prompts_of_keys_that_are_wider_than_values(made):
    """SGLang multiplies them out, and writes their rows itself."""
    _, runner, backend, _ = made
    new, device = [5, 12], runner.device
    batch = batch_of(
        runner, stub.Mode.EXTEND, new, extend_seq_lens=torch.tensor(new, device=device), extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=[0, 0], out_cache_loc=None,
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    wide = stub.layer(HEADS, HEADS, 20, v_head_dim=12, tp_v_head_num=HEADS, scaling=SCALING)
    query, key = (torch.randn(17, HEADS, 20, device=device) for _ in range(2))
    value, before = torch.randn(17, HEADS, 12, device=device), runner.token_to_kv_pool.rows.clone()
    output = backend.forward_extend(query.flatten(1), key, value, wide, batch, save_kv_cache=False).view(17, HEADS, 12)
    assert torch.equal(before, runner.token_to_kv_pool.rows)
    for first, stop in (0, 5), (5, 17):
        for row in range(first, stop):
            scores = torch.einsum("hd,khd->hk", query[row].double(), key[first : row + 1].double()) * SCALING
            wanted = torch.einsum("hk,khd->hd", scores.softmax(-1), value[first : row + 1].double())
            torch.testing.assert_close(output[row].double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("is_graph", [False, True])
def test_trees(made, is_graph):
    _, runner, backend, _ = made
    lengths, rows, device = [9, 40], (3, 0), runner.device
    parents = [0, 0, 0, 1, 1, 2, 4]
    seen = []
    for node in range(NODES):
        path, of = [node], node
        while of:
            of = parents[of]
            path.append(of)
        seen.append(sorted(path))
    words = torch.tensor([sum(1 << place for place in path) for path in seen], device=device)
    mask = words.repeat(2, 1)[..., None].contiguous()
    positions = torch.tensor([length + len(path) - 1 for length in lengths for path in seen], device=device)
    batch = batch_of(runner, stub.Mode.TARGET_VERIFY, lengths, rows, positions=positions)
    batch.spec_info = SimpleNamespace(draft_token_num=NODES, custom_mask=mask)
    plan(backend, batch, is_graph)
    if is_graph:
        backend.verify_mask.buffer[:2] = mask
    slots = torch.cat([slots_of(runner, row, *range(n, n + NODES)) for row, n in zip(rows, lengths)])
    whole = [slots_of(runner, row, *range(n), *(n + node for node in path))
             for row, n in zip(rows, lengths) for path in seen]  # fmt: skip
    check(made, "forward_extend", batch, slots, whole)


def test_levels_of_a_draft(made):
    """Beam k has the slots k * S.. after the prefix, of which its own are seen."""
    module, runner, _, _ = made
    if runner.page_size > 1:
        pytest.skip("beams are on pages of their own")
    levels = module.DraftLevels(runner, 2, 3)
    lengths, rows = [9, 40], (3, 0)
    batch = batch_of(runner, stub.Mode.DECODE, lengths, rows, positions=None, out_cache_loc=None)
    levels.init_forward_metadata(batch)
    for step, backend in enumerate(levels.attn_backends):
        own = [[beam * 3 + earlier for earlier in range(step + 1)] for beam in range(2)]
        slots = torch.cat([slots_of(runner, row, *(n + each[-1] for each in own)) for row, n in zip(rows, lengths)])
        seen = [slots_of(runner, row, *range(n), *(n + place for place in each))
                for row, n in zip(rows, lengths) for each in own]  # fmt: skip
        check(made, "forward_decode", batch, slots, seen, backend)


def test_layers_that_ours_cannot_read(made):
    _, runner, backend, layer = made
    batch = batch_of(runner, stub.Mode.DECODE, [9])
    backend.init_forward_metadata(batch)
    query = torch.zeros(1, HEADS * WIDTH, device=runner.device)
    for changes, sinks, told in (
        ({"v_head_dim": 20}, None, "keys of 24 and values of 20 elements a head"),
        ({"v_head_dim": 32}, None, "keys of 24 and values of 32 elements a head"),
        ({"logit_cap": 5.0}, None, "sinks and soft caps of latent attention"),
        ({}, torch.zeros(HEADS), "sinks and soft caps of latent attention"),
    ):
        other = SimpleNamespace(**(vars(layer) | changes))
        if changes.get("v_head_dim") == 20:
            other.tp_k_head_num = 2
            del LatentPool.kv_lora_rank
        try:
            with pytest.raises(NotImplementedError, match=told):
                backend.forward_decode(query, None, None, other, batch, False, sinks)
        finally:
            LatentPool.kv_lora_rank = LATENT
