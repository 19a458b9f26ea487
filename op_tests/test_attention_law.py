"""Attention is PyTorch's own: four tokens at a text's end, by each op that attends, in kernel and reference.

What the ops leave to a default, or count (a scale, a window, the base of a logarithm, a head's group, a sink), kernel
and reference may get wrong alike.
"""

import math

import pytest
import torch

import eagle_kernels

LENGTH, ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 40, 4, 4, 2, 32, 8


def wanted(query, key, value, sees, sinks, soft_cap):
    """output [ROWS, HEADS, HEAD_DIM] and lse [ROWS, HEADS] of rows that see these keys; a sink is a key of value 0."""
    key, value = (tensor.transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0).double() for tensor in (key, value))
    scores = query.transpose(0, 1).double() @ key.mT / math.sqrt(HEAD_DIM)
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    scores = torch.where(sees, scores, -math.inf)
    if sinks is None:
        attend = torch.nn.functional.scaled_dot_product_attention
        output = attend(query.transpose(0, 1).double()[None], key[None], value[None], attn_mask=sees)[0]
    else:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, ROWS, 1)], -1)
        output = torch.softmax(scores, -1)[..., :-1] @ value
    return output.transpose(0, 1), scores.logsumexp(-1).T


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("window", "has_sinks", "soft_cap"), [(None, False, None), (1, False, None), (7, False, None), (39, True, 0.5)]
)
def test_all_ops_attend_as_pytorch_does(window, has_sinks, soft_cap, deterministic, device):
    query, keys = torch.randn(ROWS, HEADS, HEAD_DIM), torch.randn(2, LENGTH, KV_HEADS, HEAD_DIM)
    sinks = torch.randn(HEADS) if has_sinks else None
    positions = LENGTH - ROWS + torch.arange(ROWS)
    distance = positions[:, None] - torch.arange(LENGTH)
    sees = (distance >= 0) & (distance < (window or LENGTH))
    output, lse = wanted(query, *keys, sees, sinks, soft_cap)

    on = lambda tensor: tensor.to(device)  # noqa: E731
    pages = dict(zip(("k_cache", "v_cache"), on(keys.unflatten(1, (-1, PAGE_SIZE)))))
    table = on(torch.arange(LENGTH // PAGE_SIZE, dtype=torch.int32))[None]
    options = {"window": window, "soft_cap": soft_cap, "sinks": None if sinks is None else on(sinks)}
    chain = {"num_draft_keys": ROWS, "tree_mask": on(torch.tensor([[[1], [3], [7], [15]]])), "positions": on(positions)}
    options_of = {
        "gqa_decode": {"block_table": table.repeat(ROWS, 1), "seq_lens": on(positions + 1).int(), "query": on(query)},
        "tree_attention": {"block_table": table, "seq_lens": on(positions[:1]).int(), "query": on(query)[None]} | chain,
        "prefill_attention": {
            "block_table": table, "seq_lens": on(positions[-1:] + 1).int(), "query": on(query),
            "qo_indptr": on(torch.tensor([0, ROWS], dtype=torch.int32)), "max_query": ROWS,
        },
    }  # fmt: skip
    for op, arguments in options_of.items():
        if op != "prefill_attention":
            arguments = arguments | {"deterministic": deterministic}
        elif deterministic:
            continue
        for ops in (eagle_kernels.raw, eagle_kernels):
            result = getattr(ops, op)(**arguments, **pages, **options)
            torch.testing.assert_close(result.output.cpu().view(output.shape), output.float(), msg=op)
            torch.testing.assert_close(result.lse.cpu().view(lse.shape), lse.float(), msg=op)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_all_ops_attend_to_latents_as_pytorch_does(window, deterministic, device):
    """A row of the cache is the key of all heads, its first elements are their value; the scale is the caller's."""
    latent_dim, scale = 24, 0.3
    query, rows = torch.randn(ROWS, HEADS, HEAD_DIM), torch.randn(LENGTH, HEAD_DIM)
    positions = LENGTH - ROWS + torch.arange(ROWS)
    distance = positions[:, None] - torch.arange(LENGTH)
    sees = (distance >= 0) & (distance < (window or LENGTH))
    scores = torch.where(sees, query.transpose(0, 1).double() @ rows.double().T * scale, -math.inf)
    output = (scores.softmax(-1) @ rows[:, :latent_dim].double()).transpose(0, 1)

    on = lambda tensor: tensor.to(device)  # noqa: E731
    table = on(torch.arange(LENGTH // PAGE_SIZE, dtype=torch.int32))[None]
    options = {"latent_cache": on(rows.unflatten(0, (-1, PAGE_SIZE))), "latent_dim": latent_dim, "sm_scale": scale,
               "window": window}  # fmt: skip
    chain = {"tree_mask": on(torch.tensor([[[1], [3], [7], [15]]])), "positions": on(positions)}
    prompt = {"qo_indptr": on(torch.tensor([0, ROWS], dtype=torch.int32)), "max_query": ROWS}
    ordered = {"deterministic": deterministic}
    calls = {
        "mla_decode": (query, table.repeat(ROWS, 1), positions + 1, ordered),
        "mla_tree_attention": (query[None], table, positions[:1], chain | ordered),
        "mla_prefill": (query, table, positions[-1:] + 1, prompt),
    }
    for op, (rows_of_op, pages, lengths, others) in calls.items():
        arguments = {"query": on(rows_of_op), "block_table": pages, "seq_lens": on(lengths).int()} | others | options
        for ops in (eagle_kernels.raw, eagle_kernels):
            result = getattr(ops, op)(**arguments)
            torch.testing.assert_close(result.output.cpu().view(output.shape), output.float(), msg=op)
            torch.testing.assert_close(result.lse.cpu().view(ROWS, HEADS), scores.logsumexp(-1).T.float(), msg=op)
