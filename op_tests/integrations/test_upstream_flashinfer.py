"""FlashInfer's own tests of sampling, paged attention, pages, norms, rope and activation: its cases, our code.

Mapped, from its repository (tests/)
    utils/test_sampling.py                      test_samples_*, test_renorm_*, test_shapes_of_limits, test_chains
    attention/test_batch_decode_kernels.py      test_batch_decode
    attention/test_batch_prefill_kernels.py     test_batch_prefill, test_ragged_prefill, test_custom_masks
    attention/test_page.py                      test_append_to_pages
    attention/test_rope.py                      test_rope_of_part_of_a_head, test_rope_by_tables
    utils/test_norm.py                          test_norms, test_norm_of_heads, test_rows_far_apart
    utils/test_activation.py                    test_silu_and_mul

Not mapped, and why
    softmax, top_k_mask_logits, samples by a generator or an index list: not ops here; noise has seeds and positions
    limits of one number for all rows: here they are one a row
    counts of what chain_speculative_sampling would accept token by token: our count is of the accepted path
    HND pages, caches strided within a page, head sizes of 512, ALIBI, rotary embedding within attention: not taken
    llama31 frequencies: tables are the caller's, `rope` only turns
    get_batch_indices_positions, plans, workspaces, tuples of caches: here callers give slots, and ops need no plan
    layer norm, norms and rope into 8 bits, gelu: not here
    FlashInfer's kernels among themselves, JIT, AOT, backends, MLA
"""

from __future__ import annotations

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.nn.rms_norm import Output as NormOutput
from eagle_kernels.ops.nn.rope import Output as RopeOutput


def whole(*sizes):
    return pytest.param(*sizes, marks=pytest.mark.full)


def close(actual, expected, tolerance=1e-3):
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


# sampling

SIZES = [(3, 111), whole(99, 32000), whole(989, 128256)]


def random_probs(rows, vocab_size, device):
    probs = torch.rand(rows, vocab_size, device=device)
    return probs / probs.sum(dim=-1, keepdim=True)


def kept_by_top_k(values, top_k):
    """Of the values that the op is given: in fp32 neighbouring probabilities have one logarithm."""
    edge = values.sort(dim=-1, descending=True).values.gather(1, top_k.long().clamp(max=values.shape[1])[:, None] - 1)
    return values >= edge


def kept_by_top_p(probs, top_p, slack=0.0):
    ordered, order = probs.sort(dim=-1)
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, ordered.cumsum(dim=-1) > 1 - top_p - slack)


def renormed(probs, kept):
    left = torch.where(kept, probs, 0.0)
    return left / left.sum(dim=-1, keepdim=True)


def drawn(logits, trials, **limits):
    """Tokens [rows, trials] by as many positions; limits are one a row."""
    rows = len(logits)
    places = torch.arange(trials, device=logits.device).repeat_interleave(rows)
    seeds = torch.arange(rows, device=logits.device).repeat(trials)
    order = {key: limits.pop(key) for key in ("filter_order",) if key in limits}
    limits = {name: values.repeat(trials) for name, values in limits.items()}
    ones = torch.ones(rows * trials, device=logits.device)
    tokens = eagle_kernels.sample_from_logits(logits.repeat(trials, 1), places, seeds, ones, **limits, **order)
    return tokens.view(trials, rows).t()


def assert_kept(tokens, kept):
    assert bool(((tokens >= 0) & (tokens < kept.shape[1])).all())
    assert bool(kept.gather(1, tokens).all())


@pytest.mark.parametrize("limit", [None, "top_k", "top_p", "min_p", "joint"])
@pytest.mark.parametrize(("rows", "vocab_size"), SIZES)
def test_samples_are_among_the_kept_tokens(rows, vocab_size, limit, device):
    """top_k of 10, 100 and one a row; top_p of 0.1, 0.5 and 0.9; min_p; top_k and top_p together."""
    probs = random_probs(rows, vocab_size, device)
    logits, trials = probs.log(), 40 if vocab_size < 1000 else 4
    everything = torch.ones_like(probs, dtype=torch.bool)
    if limit is None:
        assert_kept(drawn(logits, trials), everything)
    elif limit == "top_k":
        for top_k in (torch.full((rows,), 10), torch.full((rows,), 100), torch.randint(1, 101, (rows,))):
            top_k = top_k.to(device)
            assert_kept(drawn(logits, trials, top_k=top_k), kept_by_top_k(logits, top_k))
    elif limit == "top_p":
        for top_p in (0.1, 0.5, 0.9):
            tokens = drawn(logits, trials, top_p=torch.full((rows,), top_p, device=device))
            assert_kept(tokens, kept_by_top_p(probs, top_p, slack=1e-4))
    elif limit == "min_p":
        for min_p in (0.05, 0.1, 0.2, 0.7, 1.0):
            tokens = drawn(logits, trials, min_p=torch.full((rows,), min_p, device=device))
            assert_kept(tokens, probs >= 0.99999 * min_p * probs.amax(dim=-1, keepdim=True))
    else:
        for top_p, share in ((0.1, 0.5), (0.5, 0.1)):
            top_k = torch.full((rows,), int(vocab_size * share), device=device)
            limits = {"top_k": top_k, "top_p": torch.full((rows,), top_p, device=device)}
            tokens = drawn(logits, trials, **limits, filter_order="joint")
            assert_kept(tokens, kept_by_top_k(logits, top_k) & kept_by_top_p(probs, top_p, slack=1e-4))


@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_samples_of_logits_and_of_probabilities_agree(order, device):
    logits = 5 * torch.randn(4, 111, device=device)
    limits = {"top_k": torch.full((4,), 50, device=device), "top_p": torch.full((4,), 0.5, device=device)}
    tokens = [drawn(rows, 25, **limits, filter_order=order) for rows in (logits, logits.softmax(dim=-1).log())]
    assert float((tokens[0] == tokens[1]).float().mean()) >= 0.99


@pytest.mark.full
@pytest.mark.parametrize("zero_ratio", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("limit", "value"), [(None, 0), ("top_p", 0.1), ("top_p", 0.9), ("top_k", 10), ("top_k", 100)])
@pytest.mark.parametrize("spread", [1, 5])
def test_samples_follow_the_renormalised_row(spread, limit, value, zero_ratio, device):
    logits = spread * torch.randn(1, 111, device=device)
    logits[:, torch.randperm(111, device=device)[: int(111 * zero_ratio)]] = float("-inf")
    probs = logits.softmax(dim=-1)
    limits = {} if limit is None else {limit: torch.full((1,), value, device=device)}
    if limit is not None:
        probs = getattr(eagle_kernels, limit + "_renorm")(probs, limits[limit])
    tokens = drawn(logits, 200_000, **limits)
    counts = torch.bincount(tokens.flatten(), minlength=111).float()
    assert bool((counts[probs[0] == 0] == 0).all())
    assert float(torch.cosine_similarity(counts, probs[0], dim=0)) > 0.99


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("rows", "vocab_size"), SIZES)
def test_renorm_by_top_p(rows, vocab_size, top_p, device):
    probs = random_probs(rows, vocab_size, device)
    result = eagle_kernels.top_p_renorm(probs, torch.full((rows,), top_p, device=device))
    close(result, renormed(probs, kept_by_top_p(probs, top_p)))


@pytest.mark.parametrize("top_k", [10, 100, 500])
@pytest.mark.parametrize(("rows", "vocab_size"), SIZES)
def test_renorm_by_top_k(rows, vocab_size, top_k, device):
    probs, top_k = random_probs(rows, vocab_size, device), torch.full((rows,), top_k, device=device)
    close(eagle_kernels.top_k_renorm(probs, top_k), renormed(probs, kept_by_top_k(probs, top_k)))


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_shapes_of_limits(name, device, backend):
    """One number a row: no matrix, no scalar tensor, no other number of rows."""
    probs = random_probs(3, 111, device)
    dtype = torch.int32 if name == "top_k" else torch.float32
    renorm = getattr(eagle_kernels, name + "_renorm")
    assert renorm(probs, torch.ones(3, dtype=dtype, device=device)).shape == probs.shape
    for shape in ((3, 111), (), (1,)):
        with pytest.raises(ValueError, match=f"eagle_kernels.{name}_renorm: {name} must have"):
            renorm(probs, torch.ones(shape, dtype=dtype, device=device))


@pytest.mark.parametrize("is_decided", [False, True], ids=["random", "decided"])
@pytest.mark.parametrize("num_drafts", [1, 3, 5, 7])
@pytest.mark.parametrize(("rows", "vocab_size"), [(3, 111), whole(19, 500), whole(99, 32000)])
def test_chains(rows, vocab_size, num_drafts, is_decided, device, backend):
    """Drafts at random: all accepted where the target wants just them, else a token that differs ends the row."""
    draft_probs = random_probs(rows * num_drafts, vocab_size, device)
    drafts = torch.randint(vocab_size, (rows, num_drafts), device=device)
    target_probs = random_probs(rows * (num_drafts + 1), vocab_size, device)
    wanted = torch.cat([drafts, torch.randint(vocab_size, (rows, 1), device=device)], dim=1)
    if is_decided:
        target_probs = torch.zeros_like(target_probs).scatter_(1, wanted.view(-1, 1), 1.0)
    for trial in range(2):
        result = eagle_kernels.verify_chain(
            torch.cat([torch.zeros_like(drafts[:, :1]), drafts], dim=1), None, None,
            torch.arange(num_drafts + 1, device=device).repeat(rows), torch.arange(rows, device=device) + 100 * trial,
            None, target_probs=target_probs, draft_probs=draft_probs,
        )  # fmt: skip
        tokens = result.predicts.view(rows, num_drafts + 1)
        if is_decided:
            assert torch.equal(tokens.long(), wanted)
        for row, own, count in zip(tokens.tolist(), drafts.tolist(), result.accept_token_num.tolist()):
            assert row[:count] == own[:count]
            assert 0 <= row[count] < vocab_size and row[count + 1 :] == [-1] * (num_drafts - count)
            assert count == num_drafts or row[count] != own[count]


# attention


def attended(query, key, value, kept, soft_cap=None):
    """Plain attention of query [n, Hq, D] to key, value [m, Hkv, D] where kept [n, m], in fp32; and its lse [n, Hq]."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(group, dim=1) for tensor in (key, value))
    logits = torch.einsum("nhd,mhd->hnm", query.float(), key) * query.shape[-1] ** -0.5
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~kept, float("-inf"))
    return torch.einsum("hnm,mhd->nhd", logits.softmax(dim=-1), value), logits.logsumexp(dim=-1).t()


def paged(batch_size, length, page_size, num_heads, head_dim, device, is_apart=False):
    """(keys and values [B, length, Hkv, D]), (k_cache, v_cache), and the table of pages, which lie in any order.

    is_apart: keys and values share pages, so that those of one cache are apart in memory.
    """
    num_pages = -(-length // page_size)
    shape = (batch_size * num_pages, 2, page_size, num_heads, head_dim)
    cache = torch.randn(shape, device=device).half()
    caches = (cache[:, 0], cache[:, 1]) if is_apart else (cache[:, 0].contiguous(), cache[:, 1].contiguous())
    table = torch.randperm(batch_size * num_pages, device=device).view(batch_size, num_pages)
    rows = [pages[table].flatten(1, 2)[:, :length] for pages in caches]
    csr = {
        "kv_indptr": torch.arange(batch_size + 1, device=device) * num_pages,
        "kv_indices": table.flatten(),
        "last_page_len": torch.full((batch_size,), (length - 1) % page_size + 1, device=device),
    }
    return rows, caches, csr


# (batch, keys, page size, KV heads, query heads, head size)
DECODE = [(3, 54, 1, 4, 4, 32), (2, 97, 8, 4, 32, 64), (2, 54, 16, 4, 4, 128)]
DECODE += [
    whole(b, n, p, 4, h, d)
    for b, n, p in ((12, 54, 1), (17, 97, 8), (128, 2048, 16))
    for h in (4, 32)
    for d in (128, 256)
]


@pytest.mark.parametrize("is_apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize(("batch_size", "length", "page_size", "num_kv_heads", "num_heads", "head_dim"), DECODE)
def test_batch_decode(
    batch_size, length, page_size, num_kv_heads, num_heads, head_dim, soft_cap, is_apart, device, backend
):
    query = torch.randn(batch_size, num_heads, head_dim, device=device).half()
    (keys, values), caches, csr = paged(batch_size, length, page_size, num_kv_heads, head_dim, device, is_apart)
    output, lse = eagle_kernels.gqa_decode(query, *caches, **csr, soft_cap=soft_cap)
    kept = torch.ones(1, length, dtype=torch.bool, device=device)
    for request in range(batch_size):
        wanted = attended(query[request, None], keys[request], values[request], kept, soft_cap)
        close(output[request], wanted[0][0])
        close(lse[request], wanted[1][0])


# (batch, keys, queries, page size, query heads, head size)
PREFILL = [(2, 54, 37, 1, 4, 32), (2, 97, 17, 16, 8, 64)]
PREFILL += [
    whole(b, n, q, p, h, 128) for b, n, q in ((12, 54, 37), (17, 97, 17), (32, 512, 127)) for p, h in ((1, 4), (16, 32))
]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("batch_size", "length", "num_queries", "page_size", "num_heads", "head_dim"), PREFILL)
def test_batch_prefill(batch_size, length, num_queries, page_size, num_heads, head_dim, is_causal, device, backend):
    query = torch.randn(batch_size * num_queries, num_heads, head_dim, device=device).half()
    (keys, values), (k_cache, v_cache), csr = paged(batch_size, length, page_size, 4, head_dim, device)
    output, lse = eagle_kernels.prefill_attention(
        query, torch.arange(batch_size + 1, device=device) * num_queries, k_cache=k_cache, v_cache=v_cache, **csr,
        max_query=num_queries, is_causal=is_causal,
    )  # fmt: skip
    kept = torch.ones(num_queries, length, dtype=torch.bool, device=device)
    kept = kept.tril(length - num_queries) if is_causal else kept
    for request in range(batch_size):
        own = slice(request * num_queries, (request + 1) * num_queries)
        wanted = attended(query[own], keys[request], values[request], kept)
        close(output[own], wanted[0])
        close(lse[own], wanted[1])


def test_ragged_prefill(device, backend):
    """Requests of 37, 1 and 20 queries with 54, 9 and 20 keys, side by side."""
    num_queries, num_keys = [37, 1, 20], [54, 9, 20]
    query = torch.randn(58, 8, 32, device=device).half()
    key, value = torch.randn(2, 83, 4, 32, device=device).half()
    starts = [torch.tensor([0, *sizes], device=device).cumsum(0) for sizes in (num_queries, num_keys)]
    output, _ = eagle_kernels.prefill_attention(query, starts[0], key, value, starts[1], max_query=37)
    for request, (queries, keys) in enumerate(zip(num_queries, num_keys)):
        rows, slots = (slice(int(start[request]), int(start[request + 1])) for start in starts)
        kept = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        close(output[rows], attended(query[rows], key[slots], value[slots], kept)[0])


@pytest.mark.cross
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize(("batch_size", "length", "num_queries", "page_size", "num_heads", "head_dim"), PREFILL)
def test_custom_masks(batch_size, length, num_queries, page_size, num_heads, head_dim, soft_cap, device, backend):
    """A mask that says what causal attention does gives the same; a random one what plain attention does."""
    query = torch.randn(batch_size, num_queries, num_heads, head_dim, device=device).half()
    (keys, values), caches, csr = paged(batch_size, length, page_size, 4, head_dim, device)
    csr = csr | {"soft_cap": soft_cap}
    causal = torch.ones(num_queries, num_queries, dtype=torch.bool).tril()
    random = (torch.rand(num_queries, num_queries) < 0.5) | torch.eye(num_queries, dtype=torch.bool)
    outputs = []
    for mask in (causal, random):
        padded = torch.nn.functional.pad(mask, (0, -num_queries % 64)).view(num_queries, -1, 64).long()
        words = (padded << torch.arange(64)).sum(dim=-1).expand(batch_size, -1, -1).contiguous().to(device)
        outputs.append(eagle_kernels.tree_attention(query, *caches, words, **csr))
    by_rule = eagle_kernels.tree_attention(query, *caches, is_causal=True, **csr)
    close(outputs[0].output, by_rule.output)
    close(outputs[0].lse, by_rule.lse)
    prefix = torch.ones(num_queries, length - num_queries, dtype=torch.bool)
    kept = torch.cat([prefix, random], dim=1).to(device)
    for request in range(batch_size):
        wanted = attended(query[request], keys[request], values[request], kept, soft_cap)
        close(outputs[1].output[request], wanted[0])
        close(outputs[1].lse[request], wanted[1])


# pages


@pytest.mark.parametrize("is_apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize(
    ("appended", "lengths", "page_size", "num_heads", "head_dim"),
    [
        ([5, 2, 7], [5, 2, 7], 4, 2, 64), ([1, 2, 3, 4], [5, 5, 5, 5], 4, 2, 32),
        ([0, 3, 0, 5, 1], [7, 10, 2, 8, 6], 4, 2, 32),
        ([45, 8, 25, 22], [45, 8, 25, 22], 16, 2, 32), whole([45, 8, 25, 22], [45, 8, 25, 22], 16, 32, 128),
    ],
    ids=str,
)  # fmt: skip
def test_append_to_pages(appended, lengths, page_size, num_heads, head_dim, is_apart, device, backend):
    """The last tokens of every request, into pages that stand one after another; the rest of the pool stays."""
    num_tokens, num_pages = sum(appended), [-(-length // page_size) for length in lengths]
    packed = torch.randn(num_tokens, 2, num_heads, head_dim).half().to(device)
    rows = (packed[:, 0], packed[:, 1]) if is_apart else (packed[:, 0].contiguous(), packed[:, 1].contiguous())
    cache = torch.randn(sum(num_pages) + 3, 2, page_size, num_heads, head_dim).half().to(device)
    slots = [
        sum(num_pages[:request]) * page_size + position
        for request, (count, length) in enumerate(zip(appended, lengths))
        for position in range(length - count, length)
    ]
    expected = cache.clone()
    for token, slot in enumerate(slots):
        expected[slot // page_size, :, slot % page_size] = packed[token]
    eagle_kernels.write_kv(*rows, cache[:, 0], cache[:, 1], torch.tensor(slots, device=device))
    assert torch.equal(cache, expected)


# norms, rope, activation


def normed(x, weight, eps=1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


@pytest.mark.parametrize("is_apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["llama", "gemma"])
@pytest.mark.parametrize(
    ("rows", "hidden_size"),
    [(1, 111), (19, 500)] + [whole(r, h) for r in (1, 99, 989) for h in (111, 1024, 3072, 3584, 4096, 8192, 16384)],
)
def test_norms(rows, hidden_size, offset, is_apart, device, backend):
    x = torch.randn(rows, hidden_size * (1 + is_apart), device=device).half()[:, :hidden_size]
    residual, weight = torch.randn(rows, hidden_size).half().to(device), torch.randn(hidden_size).half().to(device)
    options = {"weight_offset": offset, "round_normalized": False}
    applied = weight.float() + offset
    close(eagle_kernels.rms_norm(x, weight, **options).output, normed(x, applied))
    total = x + residual
    out = NormOutput(x, residual)
    eagle_kernels.rms_norm(x, weight, residual, **options, out=out)
    close(residual, total)
    close(x, normed(total, applied))


@pytest.mark.parametrize("is_apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(19, 7, 64), whole(99, 16, 128), whole(989, 4, 512)])
def test_norm_of_heads(rows, heads, head_dim, is_apart, device, backend):
    x = torch.randn(rows, heads * (1 + is_apart), head_dim).half().to(device)[:, :heads]
    weight = torch.randn(head_dim).half().to(device)
    close(eagle_kernels.rms_norm(x, weight, round_normalized=False).output, normed(x, weight.float()))


@pytest.mark.full
@pytest.mark.gpu
def test_rows_far_apart(device):
    """A stride that does not fit 32 bits."""
    buffer = torch.randn(2**31 + 128, dtype=torch.bfloat16, device=device)
    x, weight = torch.as_strided(buffer, (2, 128), (2**31, 1)), torch.randn(128, dtype=torch.bfloat16, device=device)
    close(eagle_kernels.rms_norm(x, weight, round_normalized=False).output, normed(x, weight.float()), 1e-2)


def turned(heads, positions, angles, is_interleaved):
    """heads [T, H, D] with their first 2 * angles.shape[1] coordinates turned, in fp32."""
    size = 2 * angles.shape[1]
    part, rest = heads[..., :size].float(), heads[..., size:].float()
    first, second = (part[..., ::2], part[..., 1::2]) if is_interleaved else part.chunk(2, dim=-1)
    cos, sin = angles[positions, None].cos(), angles[positions, None].sin()
    both = [first * cos - second * sin, second * cos + first * sin]
    part = torch.stack(both, dim=-1).flatten(-2) if is_interleaved else torch.cat(both, dim=-1)
    return torch.cat([part, rest], dim=-1)


def angles_of(rotary_dim, num_positions, base, device):
    frequencies = base ** -(torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    return torch.arange(num_positions, device=device)[:, None] * frequencies


@pytest.mark.parametrize("is_interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(
    ("batch_size", "length", "heads", "offset", "head_dim"),
    [(1, 4, (8, 8), 0, 64), (2, 3, (16, 8), 15, 128), whole(19, 204, (16, 8), 99, 256), whole(989, 19, (8, 8), 15, 64)],
    ids=str,
)
def test_rope_of_part_of_a_head(batch_size, length, heads, offset, head_dim, factor, is_interleaved, device, backend):
    """Of queries and keys that one projection made, in place as well."""
    angles = angles_of(int(head_dim * factor), length + offset, 1e4, device)
    positions = (offset + torch.arange(length, device=device)).repeat(batch_size)
    packed = torch.randn(len(positions), heads[0] + 2 * heads[1], head_dim).half().to(device)
    query, key = packed[:, : heads[0]], packed[:, heads[0] : heads[0] + heads[1]]
    expected = [turned(tensor, positions, angles, is_interleaved) for tensor in (query, key)]
    values = (query, key, positions, angles.cos(), angles.sin())
    result = eagle_kernels.rope(*values, is_interleaved=is_interleaved)
    eagle_kernels.rope(*values, is_interleaved=is_interleaved, out=RopeOutput(query, key))
    for got, in_place, want in zip(result, (query, key), expected):
        close(got, want)
        assert torch.equal(got, in_place)


@pytest.mark.parametrize(
    ("head_size", "rotary_dim", "num_positions", "base", "is_neox", "batch_size", "length", "heads"),
    [
        (64, 32, 64, 8432, True, 2, 3, (4, 1)), (192, 128, 64, 9231, True, 1, 3, (3, 2)),
        (80, 64, 64, 10000, False, 2, 3, (2, 2)), (112, 64, 64, 12000, True, 2, 3, (2, 1)),
        (160, 96, 64, 10000, False, 1, 3, (6, 3)),
        whole(64, 32, 2048, 8432, True, 2, 199, (4, 1)), whole(256, 128, 4096, 9231, False, 3, 231, (4, 2)),
        whole(192, 128, 4096, 9231, True, 3, 231, (3, 2)), whole(80, 64, 1024, 10000, False, 4, 64, (2, 2)),
        whole(112, 64, 2048, 12000, True, 5, 77, (2, 1)), whole(160, 96, 8192, 10000, False, 2, 128, (6, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_rope_by_tables(
    head_size, rotary_dim, num_positions, base, is_neox, batch_size, length, heads, device, backend
):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    angles = angles_of(rotary_dim, num_positions, base, device)
    positions = torch.arange(length, device=device).repeat(batch_size)
    rows = [torch.randn(len(positions), count, head_size).to(dtype).to(device) for count in heads]
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    result = eagle_kernels.rope(*rows, positions, *table.chunk(2, dim=1), is_interleaved=not is_neox)
    for got, before in zip(result, rows):
        close(got, turned(before, positions, angles, not is_neox).to(dtype), 1e-2)


@pytest.mark.parametrize(
    ("size", "rows"), [(128, 8), (256, 3)] + [whole(d, r) for d in (2048, 11008, 16384) for r in (1, 64, 2048)]
)
def test_silu_and_mul(size, rows, device, backend):
    x = torch.randn(rows, 2 * size).half().to(device)
    close(eagle_kernels.silu_and_mul(x), x[:, size:] * torch.nn.functional.silu(x[:, :size]))
