"""A random call of each op of the families tree and kv, and of what writes latents: sizes, flags, values, limits.

Among them are three and more blocks of a loop, the last one full or not; requests in any order of lengths, empty ones
too; flags alone and together; tables with holes; lists that do not fit.
"""

import random

import torch

from eagle_kernels.runtime.check import FLOAT
from op_tests.harness.pools import ORDERS, ORDERS_OF_LAYERS, with_pools
from op_tests.ops.tree.cases import make_block, make_parents, make_scored, make_tree, make_words
from op_tests.ops.tree.masks import MODES, in_layout, random_parents, visible_from

SIZES = (0, 1, 2, 3, 5, 8, 9)


def is_drawn(coin: random.Random, chance: float = 0.5) -> bool:
    return coin.random() < chance


def integers(coin: random.Random, count: int, low: int, high: int) -> torch.Tensor:
    """Numbers in low..high, the ends more often than others, and at times one that lies far away."""
    ends = [low, high, *([2**40, -(2**40)] if is_drawn(coin, 0.1) else [])]
    numbers = [coin.choice(ends) if is_drawn(coin, 0.2) else coin.randint(low, high) for _ in range(count)]
    return torch.tensor(numbers, dtype=torch.int64)


def table(coin: random.Random, batch_size: int, columns: int) -> dict:
    """Rows of slots, some missing, and requests of them, some with a row that there is not."""
    num_rows = batch_size + coin.choice((1, 2))
    slots = torch.randperm(num_rows * columns).view(num_rows, columns)
    if is_drawn(coin):
        slots[torch.rand(slots.shape) < 0.1] = -coin.randint(1, 9)
    rows = torch.randperm(num_rows)[:batch_size]
    if batch_size and is_drawn(coin, 0.2):
        rows[coin.randrange(batch_size)] = coin.choice((-1, num_rows))
    return {"req_pool_indices": rows, "req_to_token": slots}


def sizes(coin: random.Random) -> tuple[int, int]:
    """Requests, and columns of a row."""
    return coin.choice(SIZES), coin.choice((0, 1, 4, 8, 17, 32, 40))


def accepted_cache_locs(coin):
    batch_size, num_nodes, width = coin.choice(SIZES), coin.choice((1, 3, 4, 8, 13)), coin.choice((1, 2, 4, 9))
    slots = torch.randperm(batch_size * num_nodes)
    slots[torch.rand(len(slots)) < coin.choice((0.0, 0.2))] = -3
    values = {"cache_locs": slots, "num_verify_tokens": num_nodes, "page_size": coin.choice((1, 2, 3, 8))}
    has_path, has_counts = coin.choice(((True, True), (True, False), (False, True)))
    if has_path:
        path = torch.rand(batch_size, num_nodes).argsort(1)[:, :width]
        width = path.shape[1]
        if is_drawn(coin):
            path = path.sort(1).values
        path = path + torch.arange(batch_size)[:, None] * num_nodes
        values["accept_index"] = torch.where(torch.rand(path.shape) < 0.2, coin.choice((-1, 0, 999)), path)
    if has_counts:
        values["accept_token_num"] = integers(coin, batch_size, -1, num_nodes)
        if is_drawn(coin):
            values["seq_lens"] = integers(coin, batch_size, -1, 30)
    if "seq_lens" not in values and is_drawn(coin):
        values["free_token_num"] = integers(coin, batch_size, -1, num_nodes + 1)
    for name in ("capacity", "free_capacity"):
        if is_drawn(coin):
            values[name] = coin.randint(0, batch_size * num_nodes + 9)
    return values | {"keep_unused": is_drawn(coin)}


def align_evict_mask_to_page_size(coin):
    batch_size, num_drafts = coin.choice(SIZES), coin.choice((0, 1, 4, 8, 21, 40))
    mask = torch.rand(batch_size, num_drafts) < coin.choice((0.2, 0.8, 1.1))
    return {"seq_lens": integers(coin, batch_size, -1, 30), "evict_mask": mask, "page_size": coin.choice((1, 2, 7, 30))}


def assign_req_to_token(coin):
    batch_size, columns = sizes(coin)
    values = table(coin, batch_size, columns)  # no two requests have one row: which of them wins nobody promises
    starts = integers(coin, batch_size, -1, columns)
    ends = starts.clamp(0, columns) + integers(coin, batch_size, -2, columns)
    wanted = int((ends.clamp(0, columns) - starts.clamp(0, columns)).clamp(min=0).sum())
    slots = 1000 + torch.arange(max(0, wanted + coin.choice((0, 0, -3, 5))))
    return values | {"starts": starts, "ends": ends, "cache_locs": slots}


def chain_kv_indices(coin):
    batch_size, columns = sizes(coin)
    num_tokens = coin.choice((1, 2, 3, 7))
    return table(coin, batch_size, columns) | {
        "kv_lens": integers(coin, batch_size, -1, columns + 2), "num_verify_tokens": num_tokens,
        "capacity": coin.randint(0, num_tokens * batch_size * columns + 9), "keep_unused": is_drawn(coin),
    }  # fmt: skip


def drafts(coin):
    batch_size, columns = sizes(coin)
    longest = max(1, columns // coin.choice((1, 2, 4)))
    return table(coin, batch_size, columns) | {
        "seq_lens": integers(coin, batch_size, -1, longest), "topk": coin.choice((1, 2, 3, 5)),
        "num_steps": coin.choice((1, 2, 3, 6)), "page_size": coin.choice((1, 2, 3, 8)),
    }  # fmt: skip


def draft_cache_locs(coin):
    values = drafts(coin)
    values["capacity"] = None
    if is_drawn(coin) or values["page_size"] > 100:
        values["capacity"] = coin.randint(0, len(values["seq_lens"]) * values["topk"] * values["page_size"] + 5)
    return values | {"is_step_major": is_drawn(coin)}


def draft_kv_indices(coin):
    values = drafts(coin)
    batch_size, columns = len(values["seq_lens"]), values["req_to_token"].shape[1]
    if is_drawn(coin):
        values |= {"window_size": coin.choice((1, 2, 5, 9, 40)), "sink_size": coin.choice((0, 0, 1, 4, 50)),
                   "window_counts_drafts": is_drawn(coin)}  # fmt: skip
    most = batch_size * values["topk"] * (columns + values["num_steps"])
    return values | {"capacity": coin.randint(0, most + 9), "keep_unused": is_drawn(coin)}


def extend_cache_locs(coin):
    batch_size, columns = sizes(coin)
    starts = integers(coin, batch_size, -1, columns)
    values = table(coin, batch_size, columns) | {"starts": starts, "keep_unused": is_drawn(coin)}
    if is_drawn(coin, 0.4):
        return values | {"num_tokens": coin.choice((0, 1, 2, 8, 19))}
    ends = starts.clamp(0, columns) + integers(coin, batch_size, -2, columns)
    return values | {"ends": ends, "capacity": coin.randint(0, batch_size * columns + 9)}


def find_slots(coin):
    batch_size, num_pages, page_size = coin.choice(SIZES), coin.choice((1, 2, 5, 9)), coin.choice((1, 2, 3, 8))
    pages = torch.randint(-1, 99, (batch_size, num_pages))
    return {
        "block_table": pages, "first": integers(coin, batch_size, -5, num_pages * page_size),
        "count": coin.choice((0, 1, 2, 7, 8, 30)), "page_size": page_size,
        "max_length": coin.choice((None, 1, 10, num_pages * page_size)),
    }  # fmt: skip


def kv_indices(coin):
    batch_size, columns = sizes(coin)
    values = table(coin, batch_size, columns) | {"seq_lens": integers(coin, batch_size, -1, columns + 2)}
    if is_drawn(coin):
        values["starts"] = integers(coin, batch_size, -1, columns)
    return values | {
        "capacity": coin.randint(0, batch_size * columns + 9), "page_size": coin.choice((1, 1, 2, 3, 8)),
        "keep_unused": is_drawn(coin),
    }  # fmt: skip


def pool(coin, *shape: int, dtype=None) -> torch.Tensor:
    dtype = dtype or coin.choice((torch.float32, torch.float16, torch.bfloat16, torch.uint8))
    return torch.randint(0, 100, shape).to(dtype)


def move_accepted_kv(coin):
    batch_size, page_size, num_nodes = coin.choice(SIZES), coin.choice((1, 2, 3, 8)), coin.choice((1, 4, 9))
    max_pages, width = coin.choice((1, 3, 6)), coin.choice((1, 2, 5))
    num_pages, shape = batch_size * max_pages + 1, (coin.choice((1, 3)), coin.choice((1, 2)), coin.choice((1, 3, 40)))
    cache = pool(coin, shape[0], num_pages, page_size, *shape[1:])
    pages = torch.randperm(num_pages)[: batch_size * max_pages].view(batch_size, max_pages)
    pages[torch.rand(pages.shape) < 0.1] = coin.choice((-1, num_pages))
    path = torch.rand(batch_size, max(width, num_nodes)).argsort(1)[:, :width]
    path = path.sort(1).values if is_drawn(coin) else path
    path = torch.where(torch.rand(path.shape) < 0.1, -1, path + torch.arange(batch_size)[:, None] * num_nodes)
    values = {
        "k_cache": cache, "v_cache": cache.flip(1).clone(), "block_table": pages, "accept_index": path,
        "seq_lens": integers(coin, batch_size, -1, max_pages * page_size), "num_verify_tokens": num_nodes,
        "accept_token_num": integers(coin, batch_size, -1, width),
    }  # fmt: skip
    return with_pools(values, coin.choice(ORDERS_OF_LAYERS)) if is_drawn(coin, 0.6) else values


def write_kv(coin):
    """Slots of which no two tokens have the same, some of them in no page."""
    num_tokens, page_size, num_pages = coin.choice(SIZES), coin.choice((1, 2, 3, 8)), coin.choice((1, 3, 9))
    num_heads, head_dim, dtype = coin.choice((1, 2, 5)), coin.choice((1, 2, 6, 40)), coin.choice(FLOAT)
    heads = lambda count: torch.randint(-9, 9, (num_tokens, count, head_dim)).to(dtype)  # noqa: E731
    slots = torch.randperm(max(num_pages * page_size, num_tokens))[:num_tokens]
    slots[torch.rand(num_tokens) < 0.1] = coin.choice((-1, 2**40))
    cache = pool(coin, num_pages, page_size, num_heads, head_dim, dtype=dtype)
    values = {"key": heads(num_heads), "value": heads(num_heads), "k_cache": cache, "v_cache": cache.flip(0).clone(),
              "slots": slots}  # fmt: skip
    if head_dim > 1 and dtype != torch.bfloat16 and is_drawn(coin):  # the interpreter rounds bfloat16 its own way
        angles = torch.rand(7, coin.randint(1, head_dim // 2))
        values |= {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype), "is_interleaved": is_drawn(coin),
                   "positions": integers(coin, num_tokens, -1, 7)}  # fmt: skip
        if is_drawn(coin):
            values["query"] = heads(coin.choice((1, 4)))
    if is_drawn(coin, 0.3):  # a row of a fused projection, as a server's linear layer returns it
        fused = heads(2 * num_heads + 3)
        values |= {"key": fused[:, 1 : num_heads + 1], "value": fused[:, num_heads + 1 : -2]}
    return with_pools(values, coin.choice(ORDERS)) if is_drawn(coin, 0.6) else values


def write_latent_kv(coin):
    """As write_kv, with a latent that does not turn beside each key."""
    values = write_kv(coin)
    latent_dim, width = coin.choice((1, 2, 8, 12)), values["key"].shape[2]
    num_pages, page_size = values["k_cache"].shape[:2]
    row = latent_dim + width
    cache = torch.randint(-9, 9, (num_pages, 2, page_size, row)).to(values["key"].dtype)
    rows = torch.randint(-9, 9, (len(values["slots"]), row)).to(cache.dtype)
    kept = ("slots", "query", "positions", "cos", "sin", "is_interleaved")
    return {name: values[name] for name in kept if name in values} | {
        "latent": rows[:, :latent_dim].contiguous(), "rope_key": rows[:, latent_dim:].contiguous(),
        "latent_cache": cache[:, 0] if is_drawn(coin) else cache[:, 0].contiguous(),
    }  # fmt: skip


def modes(coin, num_nodes: int) -> str:
    return coin.choice(MODES if num_nodes <= 32 else MODES[:3])


def nodes(coin) -> int:
    return coin.choice((1, 2, 7, 8, 20, 33, 64, 65, 130, 193))


def batch(coin) -> int:
    return coin.choice((0, 1, 2, 3, 4))


def full_mask(coin, values: dict) -> dict:
    """A sum of lengths that is at times too small, so that the mask does not fit."""
    if values.get("seq_lens_sum"):
        values["seq_lens_sum"] = max(0, values["seq_lens_sum"] + coin.choice((0, 0, -7)))
    return values


def spoil(coin, tensor: torch.Tensor, low: int, high: int) -> None:
    """Replaces some of its numbers by any, in half of all calls."""
    if is_drawn(coin):
        tensor[torch.rand(tensor.shape) < coin.choice((0.1, 0.6))] = coin.randint(low, high)


def build_tree(coin):
    topk, spec_steps = coin.choice(((1, 1), (1, 6), (2, 3), (4, 3), (8, 4), (10, 3)))
    num_nodes = min(nodes(coin), 1 + topk + (spec_steps - 1) * topk * topk)
    values = make_tree(batch(coin), topk, spec_steps, num_nodes, mode=modes(coin, num_nodes))
    spoil(coin, values["parent_list"], -2, topk * topk * spec_steps)
    spoil(coin, values["top_scores_index"], -1, topk * topk * spec_steps)
    return full_mask(coin, values) | {"any_order": is_drawn(coin, 0.3)}


def build_tree_from_scores(coin):
    topk, spec_steps = coin.choice(((1, 1), (1, 6), (2, 3), (4, 3), (8, 4), (10, 3)))
    num_nodes = min(nodes(coin), 1 + topk + (spec_steps - 1) * topk * topk)
    mode, is_tied = modes(coin, num_nodes), is_drawn(coin)
    values = make_scored(batch(coin), topk, spec_steps, num_nodes, mode=mode, is_tied=is_tied)
    spoil(coin, values["parent_list"], -2, topk * topk * spec_steps)
    spoil(coin, values["candidate_scores"], -3, 0)
    return full_mask(coin, values)


def tree_from_parents(coin):
    num_nodes = nodes(coin)
    values = make_parents(batch(coin), num_nodes, mode=modes(coin, num_nodes))
    spoil(coin, values["parents"], -2, num_nodes + 1)
    spoil(coin, values["draft_tokens"], -2, 9)
    return full_mask(coin, values)


def any_mask(coin, num_rows: int, num_keys: int, mode: str) -> dict:
    batch_size = batch(coin)
    lengths = torch.randint(0, coin.choice((1, 20, 70)), (batch_size,))
    visible = torch.rand(batch_size, num_rows, num_keys) < coin.choice((0.1, 0.5, 0.9))
    if is_drawn(coin) and num_rows == num_keys:
        visible = visible_from(random_parents(batch_size, num_keys))
    mask = in_layout(visible, lengths, mode)
    if mode == "full_mask" and is_drawn(coin, 0.3):
        mask = mask[: -coin.randint(1, 9)] if len(mask) > 9 else mask
    return {"tree_mask": mask, "seq_lens": lengths, "tree_mask_mode": mode, "num_verify_tokens": num_keys}


def tree_from_mask(coin):
    num_nodes = nodes(coin)
    return any_mask(coin, num_nodes, num_nodes, modes(coin, num_nodes))


def pack_tree_mask(coin):
    num_keys = nodes(coin)
    mode = modes(coin, num_keys)
    is_square = mode in ("full_mask", "qlen_only_bitpacking")
    return any_mask(coin, num_keys if is_square else nodes(coin), num_keys, mode)


def unpack_tree_mask(coin):
    num_nodes = nodes(coin)
    mode = modes(coin, num_nodes)
    if mode == "full_mask" and num_nodes > 33:
        num_nodes = 33
    return full_mask(coin, make_words(batch(coin), num_nodes, mode=mode, longest=coin.choice((1, 20, 70))))


def links(coin):
    batch_size, num_nodes = batch(coin), nodes(coin)
    parents = random_parents(batch_size, num_nodes)
    children = parents[:, None, :] == torch.arange(num_nodes)[None, :, None]  # [B, parent, child]
    first = torch.where(children.any(2), children.int().argmax(2), -1)
    after = (parents[:, :, None] == parents[:, None, :]).triu(1) & (parents >= 0)[:, :, None]
    return first, torch.where(after.any(2), after.int().argmax(2), -1)


def compute_tree_statistics(coin):
    child, sibling = links(coin)
    num_nodes = child.shape[1]
    spoil(coin, child, -1, num_nodes)
    spoil(coin, sibling, -1, num_nodes)
    return {"retrieve_next_token": child, "retrieve_next_sibling": sibling, "spec_steps": coin.choice((0, 1, 7, 8, 30))}


def organize_draft_results(coin):
    batch_size, num_candidates = batch(coin), coin.choice((1, 2, 15, 16, 17, 100, 300))
    scores = -torch.randint(0, coin.choice((1, 8, 2**20)), (batch_size, num_candidates)) / 4.0
    scores[torch.rand(scores.shape) < 0.1] = coin.choice((float("nan"), float("-inf"), float("inf"), -0.0))
    return {
        "candidate_scores": scores, "candidate_tokens": torch.randint(0, 999, scores.shape),
        "num_verify_tokens": coin.randint(1, num_candidates + 1),
    }  # fmt: skip


def prune_trees(coin):
    batch_size, num_nodes = coin.choice(SIZES), nodes(coin)
    lengths, visible = torch.zeros(batch_size), visible_from(random_parents(batch_size, num_nodes))
    scores = -torch.randint(0, coin.choice((1, 5, 99)), (batch_size, num_nodes - 1)) / 4.0
    scores[torch.rand(scores.shape) < 0.1] = coin.choice((float("nan"), float("-inf"), -0.0, 3.0))
    values = {
        "draft_tokens": torch.randint(0, 999, (batch_size, num_nodes)), "scores": scores,
        "tree_mask": in_layout(visible, lengths, "packed"), "max_rows": batch_size + coin.randint(0, 99),
    }  # fmt: skip
    spoil(coin, values["tree_mask"], -9, 99)
    if is_drawn(coin):
        values["max_drafts"] = integers(coin, 1, -1, 99)
    return values


def select_top_k_tokens(coin):
    topk, level = coin.choice((1, 2, 3, 8, 13, 16)), coin.choice((0, 0, 1, 2, 8, 9, 17, 23))
    batch_size, vocab_size = coin.choice((0, 1, 2, 3)), coin.choice((16, 33, 100, 1025, 2100))
    batch_size = min(batch_size, 1) if topk > 8 and vocab_size > 1000 else batch_size
    logits = torch.randint(-8, 8, (batch_size * (topk if level else 1), vocab_size)).float()
    logits = logits.to(coin.choice((torch.float32, torch.float16, torch.bfloat16)))
    values = {"logits": logits, "topk": topk, "level": level}
    if level:
        least, most = -(-level * topk // 64), -(-(level + 1) * topk // 64)
        values["scores"] = -torch.rand(batch_size, topk)
        values["ancestors"] = torch.randint(-(2**63), 2**63 - 1, (batch_size, topk, coin.randint(least, most)))
    if is_drawn(coin):
        values["draft_to_target"] = torch.randint(0, 3, (vocab_size,)).cumsum(0)
    return values


def select_from_head(coin):
    values = select_top_k_tokens(coin)
    rows, vocab_size = values.pop("logits").shape
    num_columns, dtype = coin.choice((1, 16, 70, 300)), coin.choice((torch.float16, torch.bfloat16))
    return values | {
        "hidden": torch.randint(-2, 3, (rows, num_columns)).to(dtype),
        "weight": torch.randint(-2, 3, (vocab_size, num_columns)).to(dtype),
        "prefetch_weight": is_drawn(coin),
    }


def build_tree_from_blocks(coin):
    depth, topk, num_nodes = coin.choice((1, 2, 3, 7, 20)), coin.choice((1, 2, 3, 7, 8, 13)), nodes(coin)
    sizes = {"mode": modes(coin, num_nodes), "grain": coin.choice((1, 4, 64)), "has_budget": is_drawn(coin)}
    values = make_block(batch(coin), depth, topk, num_nodes, has_transitions=is_drawn(coin), **sizes)
    scores = values["candidate_scores"]
    scores[torch.rand(scores.shape) < 0.1] = coin.choice((float("nan"), float("-inf"), -0.0, 3.0))
    if "num_nodes" in values:
        spoil(coin, values["num_nodes"], -9, 99)
    return full_mask(coin, values)


CALLS = {
    f"{family}.{function.__name__}": function
    for family, functions in {
        "kv": [accepted_cache_locs, align_evict_mask_to_page_size, assign_req_to_token, chain_kv_indices,
               draft_cache_locs, draft_kv_indices, extend_cache_locs, find_slots, kv_indices, move_accepted_kv,
               write_kv],
         "latent": [write_latent_kv],
        "tree": [build_tree, build_tree_from_blocks, build_tree_from_scores, compute_tree_statistics,
                 organize_draft_results, pack_tree_mask, prune_trees, select_from_head,
                 select_top_k_tokens, tree_from_mask,
                 tree_from_parents, unpack_tree_mask],
    }.items()
    for function in functions
}  # fmt: skip


def drawn_call(path: str, number: int) -> tuple[dict, random.Random]:
    """The arguments of a call, and what to go on drawing with."""
    coin = random.Random(f"{path} {number}")
    torch.manual_seed(number)
    return CALLS[path](coin), coin
