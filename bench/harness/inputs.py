"""Inputs that several benchmarks share: trees as drafting makes them, logits with a known path, paged KV caches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from eagle_kernels import reference
from eagle_kernels.raw import plan_attention
from eagle_kernels.runtime.language import is_interpreting

VOCABULARY = 128256
# Qwen's
LARGE_VOCABULARY = 151936

# of a batch that is no power of two, as servers have them
ODD_BATCH = 12


class Tree(NamedTuple):
    topk: int
    spec_steps: int
    num_nodes: int

    def __str__(self) -> str:
        return "K/S/N=" + "/".join(map(str, self))


# that servers run: SGLang's default, a wide one, EAGLE's own default
TREES = [Tree(4, 3, 8), Tree(8, 5, 64), Tree(10, 8, 60)]


def of_vocabulary(vocab_size: int) -> str:
    """What the name of a case says of the size of its vocabulary, if it is the large one."""
    return f" V={vocab_size}" if vocab_size == LARGE_VOCABULARY else ""


def drafts(device, batch_size: int, tree: Tree, vocab_size: int = VOCABULARY) -> dict:
    """Arguments of build_tree: a random draft whose kept candidates are the best by score, siblings distinct."""
    topk, spec_steps, num_nodes = tree
    num_candidates = topk + (spec_steps - 1) * topk * topk
    scores = torch.rand(batch_size, topk).log().sort(descending=True).values
    all_scores, parent_list = [scores], [torch.full((batch_size, 1), -1)]
    kept = torch.arange(topk).expand(batch_size, topk)
    for level in range(1, spec_steps):
        parent_list.append(kept)
        proposed = torch.rand(batch_size, topk, topk).log().sort(descending=True).values
        proposed = (scores[:, :, None] + proposed).flatten(1)
        all_scores.append(proposed)
        scores, kept = proposed.sort(descending=True, stable=True)
        scores, kept = scores[:, :topk], kept[:, :topk] + topk + topk * topk * (level - 1)
    candidate = torch.arange(num_candidates).expand(batch_size, num_candidates)
    # candidates of one beam are neighbours: consecutive tokens keep them distinct
    tokens = (torch.randint(vocab_size, (batch_size, num_candidates // topk)).repeat_interleave(topk, 1)
              + candidate % topk) % vocab_size  # fmt: skip
    top_scores_index, draft_tokens = reference.ops.tree.organize_draft_results.organize_draft_results(
        torch.cat(all_scores, dim=1), tokens, num_verify_tokens=num_nodes
    )
    values = {
        "verified_id": torch.randint(vocab_size, (batch_size,)),
        "parent_list": torch.cat(parent_list, dim=1),
        "top_scores_index": top_scores_index,
        "draft_tokens": draft_tokens,
        "seq_lens": torch.full((batch_size,), 1024),
    }
    values = {name: value.to(device) for name, value in values.items()}
    return values | {"topk": topk, "spec_steps": spec_steps, "num_verify_tokens": num_nodes}


def built_tree(batch_size: int, tree: Tree, vocab_size: int = VOCABULARY, **mask):
    """What build_tree makes of `drafts`, on the CPU. mask: its `tree_mask_mode`."""
    return reference.ops.tree.build_tree.build_tree(**drafts("cpu", batch_size, tree, vocab_size), **mask)


def accepted_tree(device, batch_size: int, tree: Tree, vocab_size: int) -> dict:
    """Tree arguments of the verify ops, positions, and target tokens `target_predict` that accept a deepest path."""
    built, shape = built_tree(batch_size, tree, vocab_size, tree_mask_mode="qlen_only"), (batch_size, tree.num_nodes)
    candidates = built.draft_tokens.view(shape)
    target_predict = torch.randint(vocab_size, shape)
    parent = parents(built._asdict())
    deepest = built.positions.view(shape).argmax(1)
    for request, node in enumerate(deepest.tolist()):
        while node > 0:
            target_predict[request, parent[request, node]] = candidates[request, node]
            node = int(parent[request, node])
    links = {name: getattr(built, name) for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")}
    tensors = {"candidates": candidates, **links, "positions": built.positions, "target_predict": target_predict}
    return {name: value.to(device) for name, value in tensors.items()}


def ends_after(tree: dict, accepted: int, vocab_size: int) -> torch.Tensor:
    """The target's tokens of an `accepted_tree`, [B, N], changed so that its path ends `accepted` drafts deep.

    From there on they are no node's, so that the walk does not go on beside the path either.
    """
    candidates, wanted = tree["candidates"], tree["target_predict"].clone()
    depth = tree["positions"].view(candidates.shape) - tree["positions"].view(candidates.shape)[:, :1]
    strange = torch.randint(vocab_size, candidates.shape).to(candidates.device)
    for _ in range(candidates.shape[1]):  # more tokens than nodes: after the last step none is a node's
        is_node = (strange[:, :, None] == candidates[:, None, :]).any(-1)
        strange = torch.where(is_node, (strange + 1) % vocab_size, strange)
    return torch.where(depth < accepted, wanted, strange)


def edges(values: dict) -> Iterator[tuple[int, int, int]]:
    """(request, parent, child) of every edge, from the links; children of a node in their order."""
    links = (values[name].tolist() for name in ("retrieve_next_token", "retrieve_next_sibling"))
    for request, (children, siblings) in enumerate(zip(*links)):
        for node, child in enumerate(children):
            while child >= 0:
                yield request, node, child
                child = siblings[child]


def parents(values: dict) -> torch.Tensor:
    """The parent of every node from the links, -1 for the root."""
    parent = torch.full_like(values["retrieve_next_token"], -1)
    for request, node, child in edges(values):
        parent[request, child] = node
    return parent


# The lead at which a token has more than 0.999 of the probability among 128k normal logits, while noise can still lift
# others above it: a kernel cannot skip what it reads.
NARROW_LEAD = 22.0


def decisive_logits(winners: torch.Tensor, vocab_size: int, lead: float = 64.0) -> torch.Tensor:
    """Random bf16 logits [rows, vocab_size] whose `winners`, at `lead`, have all but no competition.

    Ties are the rule among 128k bf16 values, and draws of different generators differ: only a decided outcome can be
    compared across providers. No provider is faster for it.
    """
    logits = torch.empty(len(winners), vocab_size, dtype=torch.bfloat16, device=winners.device).normal_()
    return logits.scatter_(1, winners[:, None], lead)


class Heads(NamedTuple):
    query: int
    kv: int
    size: int

    def __str__(self) -> str:
        return "/".join(map(str, self))


# Llama-3.1-8B, Llama-3.1-70B, Qwen2.5-7B, Qwen3-0.6B, one without groups, and large heads, as Qwen3-Next has them
HEADS = [
    Heads(32, 8, 128), Heads(64, 8, 128), Heads(28, 4, 128), Heads(16, 8, 128), Heads(32, 32, 64), Heads(16, 2, 256)
]  # fmt: skip
SMALL_HEADS = Heads(4, 2, 32)
# of draws: Qwen2.5-7B, Llama-3.1-8B, gpt-oss, Qwen3-Next, Qwen3-14B, Gemma 4's global layers
DRAWN_HEADS = [
    Heads(28, 4, 128), Heads(32, 8, 128), Heads(64, 8, 64), Heads(16, 2, 256), Heads(40, 8, 128), Heads(8, 1, 512)
]  # fmt: skip


def draw_batch(coin: random.Random) -> dict:
    """Returns a batch as servers have them: requests, tokens of the longest, how lengths spread, heads, page size."""
    spread = coin.choice(("one long", "ragged", "equal"))
    longest = coin.randrange(8 << 10, 30 << 10) if spread == "one long" else coin.randrange(200, 8 << 10)
    batch_size = coin.choice((1, 3, 5, 7, 12, 24, 48))
    return {
        "shape": (batch_size, longest), "spread": spread, "heads": coin.choice(DRAWN_HEADS),
        "page_size": coin.choice((1, 16, 64)),
    }  # fmt: skip


# of a batch in which nearly all requests are short, and one is long
SHORT = (50, 600)


def lengths(batch_size: int, longest: int, spread: str) -> torch.Tensor:
    """Lengths [B] int32 of the requests of a batch, the longest one among them; the same at every call.

    spread: "equal"; "ragged", evenly from a tenth of the longest on; "long tail", an eighth of it at most but for one;
    "one long", lengths within SHORT but for one.
    """
    if spread == "equal":
        return torch.full((batch_size,), longest, dtype=torch.int32)
    if spread == "one long":
        values = torch.linspace(*SHORT, batch_size, dtype=torch.float64).round().to(torch.int32)
        values[-1] = longest
        return values[torch.randperm(batch_size, generator=torch.Generator().manual_seed(0))]
    others = {"ragged": (0.1, 1.0), "long tail": (1 / 64, 1 / 8)}[spread]
    values = (torch.linspace(*others, batch_size, dtype=torch.float64) * longest).ceil().to(torch.int32)
    values[-1] = longest
    return values[torch.randperm(batch_size, generator=torch.Generator().manual_seed(0))]


def half_dtype(device) -> torch.dtype:
    """bf16, also where kernels are compiled for a GPU that is not here; fp16 in Triton's interpreter, which neither
    multiplies bf16 matrices nor rounds to bf16."""
    is_run = torch.device(device).type == "cuda" or not is_interpreting()
    return torch.bfloat16 if is_run else torch.float16


def rotary_tables(device, num_positions: int, rotary_dim: int) -> dict:
    """cos and sin [num_positions, rotary_dim / 2] in the dtype of `half_dtype`, as Hugging Face's models use them."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] / 10000.0**exponents
    return {"cos": angles.cos().to(device, half_dtype(device)), "sin": angles.sin().to(device, half_dtype(device))}


def paged_cache(
    device, batch_size: int, capacity: int | torch.Tensor, page_size: int, num_heads: int, head_dim: int, layers=(),
    layout: str = "",
) -> dict:  # fmt: skip
    """k_cache, v_cache and block_table, pages in random order, -1 where a request has none.

    capacity: the tokens of every request, or [B] int32, those of each.
    layout: "packed", a head's value after its key, as vLLM has them; "HND", heads before the slots of a page.
    """
    dtype = half_dtype(device)
    counts = -(-torch.as_tensor(capacity).expand(batch_size) // page_size)
    is_page = torch.arange(int(counts.max())) < counts[:, None]
    shape = (*layers, int(counts.sum()), page_size, num_heads, head_dim)
    table = torch.full(is_page.shape, -1, dtype=torch.int32, device=device)
    table[is_page.to(device)] = torch.randperm(shape[-4], device=device).to(torch.int32)
    if layout == "packed":
        caches = torch.randn(*shape[:-1], 2 * head_dim, dtype=dtype, device=device).split(head_dim, dim=-1)
    elif layout == "HND":
        shape = (*layers, shape[-4], num_heads, page_size, head_dim)
        caches = [torch.randn(shape, dtype=dtype, device=device).transpose(-3, -2) for _ in range(2)]
    else:
        caches = [torch.randn(shape, dtype=dtype, device=device) for _ in range(2)]
    return {"k_cache": caches[0], "v_cache": caches[1], "block_table": table}


def token_table(device, batch_size: int, columns: int) -> dict:
    """req_pool_indices and req_to_token [batch_size, columns], as SGLang keeps the slots of requests."""
    slots = torch.randperm(batch_size * columns, device=device).to(torch.int32)
    return {
        "req_pool_indices": torch.randperm(batch_size, device=device),
        "req_to_token": slots.view(batch_size, columns),
    }


def contiguous_cache(values: dict, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys and values of each request as [B, Hkv, length, D]: what a cache without pages holds.

    Past the end of a shorter request they are some page's.
    """
    return tuple(
        cache[values["block_table"].long()].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
        for cache in (values["k_cache"], values["v_cache"])
    )


def planned(launcher: Callable, values: dict, num_drafts: int) -> Callable:
    """A call of attention whose chunks were planned before, as servers plan once a step for all layers."""
    plan = plan_attention(values["seq_lens"], num_drafts=num_drafts)
    values = {**values, "plan": plan}
    values["out"] = launcher(**values)
    return lambda: launcher(**values)


def visible_drafts(values: dict) -> torch.Tensor:
    """What each draft sees of the others, bool [B, N, N]: tree_mask [B, N, W], or all before it."""
    if values.get("is_causal"):
        batch_size, num_nodes = values["query"].shape[:2]
        return torch.ones(batch_size, num_nodes, num_nodes, dtype=torch.bool, device=values["query"].device).tril()
    node = torch.arange(values["query"].shape[1], device=values["query"].device)
    return ((values["tree_mask"][:, :, node // 64] >> (node % 64)) & 1).bool()


def is_chain(visible: torch.Tensor) -> bool:
    """Whether every node of `visible_drafts` sees the nodes up to itself."""
    return torch.equal(visible, torch.ones_like(visible).tril())


def prefixed_masks(values: dict) -> list[torch.Tensor]:
    """`visible_drafts` of each request, flat, with its prefix before every row."""
    masks = zip(visible_drafts(values), values["seq_lens"].tolist())
    return [torch.nn.functional.pad(visible, (prefix, 0), value=True).flatten() for visible, prefix in masks]
