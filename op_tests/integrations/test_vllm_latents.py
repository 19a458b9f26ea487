"""The attention over latents of the vLLM plug-in on made batches, beside plain softmax attention in float64."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from op_tests.integrations import stand_in
from op_tests.integrations import vllm_stub as stub
from op_tests.integrations.vllm_stub_latents import MODULES, MLAAttention

HEADS, LATENT, ROPE, NOPE, VALUE, PAGE, MOST, DRAFTS = 4, 16, 8, 6, 5, 16, 8, 3
SCALE = 0.2


@pytest.fixture(params=["", "ours"], ids=["prompts are vLLM's", "prompts are ours"])
def prompts(request, monkeypatch):
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_PROMPTS", request.param)
    return request.param


@pytest.fixture
def latent(prompts):
    with stand_in.installed(stub.MODULES | MODULES, *stub.OURS):
        yield importlib.import_module("eagle_kernels.integrations.vllm.latent")


def impl_of(latent, **changes):
    sizes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE} | changes
    return latent.LatentImpl(HEADS, LATENT + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None, **sizes)


def builder_of(latent, device):
    config = SimpleNamespace(num_speculative_tokens=DRAFTS, scheduler_config=SimpleNamespace(max_num_seqs=MOST))
    return latent.LatentBuilder(None, ["layer"], config, torch.device(device))


class Cache:
    """A layer's pages [pages, page_size, D]."""

    def __init__(self, device, longest=96):
        num_pages = MOST * longest // PAGE
        self.pages = torch.randn(num_pages, PAGE, LATENT + ROPE, device=device)
        self.table = torch.randperm(num_pages).view(MOST, -1).to(device, torch.int32)
        self.layer = SimpleNamespace(_k_scale=torch.tensor(1.0, device=device))

    def rows_of(self, request: int) -> torch.Tensor:
        return self.pages[self.table[request].long()].flatten(0, 1).double()

    def common(self, rows, lengths, **changes):
        bounds = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
        device = self.pages.device
        return stub.CommonAttentionMetadata(**{
            "query_start_loc": bounds.to(device), "query_start_loc_cpu": bounds, "num_reqs": len(rows),
            "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device), "num_actual_tokens": sum(rows),
            "max_query_len": max(rows), "max_seq_len": max(lengths), "block_table_tensor": self.table[: len(rows)],
            "slot_mapping": None,
        } | changes)  # fmt: skip


def attended(query, rows) -> torch.Tensor:
    """What a query [Hq, D] makes of rows [C, D]: latents [Hq, L]."""
    return (query.double() @ rows.T * SCALE).softmax(-1) @ rows[:, :LATENT]


STEPS = {
    "plain": ([1, 1, 1], [7, 33, 64]),
    "chains": ([4, 4, 4], [9, 40, 70]),
    "fewer drafts": ([4, 1, 3, 2], [20, 1, 64, 5]),
    "with prompts": ([1, 4, 20, 33], [30, 41, 20, 64]),
    "prompts alone": ([40, 9], [40, 60]),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("is_joined", [False, True])
def test_rows_see_what_is_before_them(latent, prompts, name, is_joined, device):
    (rows, lengths), cache, impl = STEPS[name], Cache(device), impl_of(latent)
    metadata = builder_of(latent, device).build(0, cache.common(rows, lengths))
    count = sum(rows) if prompts else sum(row for row in rows if row <= 1 + DRAFTS)
    assert metadata.num_decode_tokens == count
    if count == 0:  # vLLM calls nothing of ours
        return
    query = torch.randn(count, HEADS, LATENT + ROPE, device=device)
    given = query if is_joined else query.split([LATENT, ROPE], dim=-1)
    output, lse = impl.forward_mqa(given, cache.pages, metadata, cache.layer)
    assert output.shape == (count, HEADS, LATENT) and lse.shape == (count, HEADS)
    place = 0
    for request, (number, length) in enumerate(zip(rows, lengths)):
        for stop in range(length - number + 1, length + 1) if place < count else ():
            wanted = attended(query[place], cache.rows_of(request)[:stop])
            torch.testing.assert_close(output[place].double(), wanted, rtol=0, atol=2e-5)
            place += 1
    assert place == count


def test_rows_of_trees_see_their_paths(latent, device):
    """In layers of the target; those of a draft read accepted tokens."""
    cache, impl, builder = Cache(device), impl_of(latent), builder_of(latent, device)
    words = torch.tensor([1, 3, 5, 11, 1, 3, 5, 13], device=device)[:, None]  # the last node below the second child
    builder.trees = SimpleNamespace(row_mask=words, current=words)
    metadata = builder.build(0, cache.common([4, 4], [20, 37]))
    query = torch.randn(8, HEADS, LATENT + ROPE, device=device)
    for reads_trees in (True, False):
        impl.reads_trees = reads_trees
        output, _ = impl.forward_mqa(query, cache.pages, metadata, cache.layer)
        for row in range(8):
            request, node = divmod(row, 4)
            prefix, rows = (16, 33)[request], cache.rows_of(request)
            seen = [bit for bit in range(4) if words[row, 0] >> bit & 1] if reads_trees else range(node + 1)
            listed = torch.cat([rows[:prefix], rows[[prefix + bit for bit in seen]]])
            torch.testing.assert_close(output[row].double(), attended(query[row], listed), rtol=0, atol=2e-5)


@pytest.mark.parametrize("prefix_lens", [(30, 7), (0, 64)])
def test_beams_of_a_draft_see_the_prefix_and_their_ancestors(latent, device, prefix_lens):
    """Their rows are beside the cache, level after level."""
    cache, impl, generator = Cache(device), impl_of(latent), torch.Generator().manual_seed(0)
    layer, topk, levels = MLAAttention(impl, NOPE, VALUE), 2, 3
    for name in ("W_UK_T", "W_UV", "_k_scale"):
        setattr(layer, name, getattr(layer, name).to(device))
    kept = torch.zeros(4, topk * levels, LATENT + ROPE, device=device)
    parents = torch.tensor([[1, 0], [0, 0]])  # of the beams of the levels below the first
    for number in range(1, levels + 1):
        q, c, r = (torch.randn(2 * topk, *shape, generator=generator).to(device)
                   for shape in ((HEADS, NOPE + ROPE), (LATENT,), (1, ROPE)))  # fmt: skip
        ancestors = torch.zeros(2, topk, 1, dtype=torch.int64, device=device)
        seen: dict[tuple[int, int], list[int]] = {}
        for request in range(2):
            for beam in range(topk):
                path, of = [(number - 1) * topk + beam], beam
                for level in range(number - 2, -1, -1):
                    of = int(parents[request][of])
                    path.append(level * topk + of)
                seen[request, beam] = path
                ancestors[request, beam, 0] = sum(1 << place for place in path)
        lens = torch.tensor(prefix_lens, dtype=torch.int32, device=device)
        level = latent.Level(number, kept, None, cache.table[:2], lens, ancestors)
        output = torch.full((2 * topk + 1, HEADS * VALUE), 7.0, device=device)
        latent.forward_impl(MLAAttention.forward_impl, layer, q, c, r, cache.pages, level, output)
        assert (output[-1] == 7).all()
        for (request, beam), path in seen.items():
            row = request * topk + beam
            own = kept[request, path].double()
            torch.testing.assert_close(own[0], torch.cat([c[row], r[row, 0]]).double())
            rows = torch.cat([cache.rows_of(request)[: prefix_lens[request]], own])
            absorbed = torch.einsum("hn,hnl->hl", q[row, :, :NOPE].double(), layer.W_UK_T.double())
            latents = attended(torch.cat([absorbed, q[row, :, NOPE:].double()], -1), rows)
            wanted = torch.einsum("hl,hlv->hv", latents, layer.W_UV.double()).flatten()
            torch.testing.assert_close(output[row].double(), wanted, rtol=1e-4, atol=1e-4)
    rest = latent.forward_impl(MLAAttention.forward_impl, layer, q, c, r, cache.pages, object(), output)
    assert rest == "vLLM's"


def test_what_ours_cannot_read(latent, device):
    with pytest.raises(ValueError, match="kv_lora_rank of this model must be at most 512, got 513"):
        impl_of(latent, kv_lora_rank=513)
    with pytest.raises(ValueError, match="qk_rope_head_dim of this model must be at most 128, got 130"):
        impl_of(latent, qk_rope_head_dim=130)
    cache, impl = Cache(device), impl_of(latent)
    builder = builder_of(latent, device)
    metadata = builder.build(0, cache.common([1], [5], causal=False))
    with pytest.raises(RuntimeError, match="rows of latents that are not causal, or have a shared prefix"):
        impl.forward_mqa(torch.zeros(1, HEADS, LATENT + ROPE, device=device), cache.pages, metadata, cache.layer)
    words = torch.ones(1, 1, dtype=torch.int64, device=device)
    builder.trees = SimpleNamespace(row_mask=words, current=words)
    with pytest.raises(RuntimeError, match="a step with trees holds rows that are not causal"):
        builder.build(0, cache.common([1], [5], causal=False))
    impl.kv_cache_dtype = "fp8"
    with pytest.raises(RuntimeError, match="trees of drafts are not supported in layer of.name: its cache is fp8"):
        impl.check_trees("of.name")


def test_one_name_stands_for_two_backends(latent):
    from collections import namedtuple

    from eagle_kernels.integrations.vllm.selection import choose_backend

    asked = namedtuple("Asked", "use_mla use_sparse dtype")
    original, ours = MODULES["vllm.v1.attention.selector"]["_cached_get_attn_backend"], SimpleNamespace(name="CUSTOM")
    given = asked(True, False, torch.bfloat16)
    stub.MODULES["vllm.platforms"]["current_platform"].get_device_capability = lambda: (9, 0)
    assert choose_backend(original, ours, given) is latent.LatentBackend
    assert choose_backend(original, SimpleNamespace(name="TRITON_MLA"), given) == "vLLM's"
    assert choose_backend(original, None, given) == choose_backend(original, ours, given._replace(use_mla=False))
    with pytest.raises(ValueError, match="the attention over latents does not support sparse not supported"):
        choose_backend(original, ours, given._replace(use_sparse=True))
    assert latent.LatentBackend.get_supported_kernel_block_sizes() == [16, 32, 64, 128, 256]
