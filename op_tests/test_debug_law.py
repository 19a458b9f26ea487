"""With EAGLE_KERNELS_DEBUG=1 a call is refused if, and only if, its results depend on what is not there.

Sound calls are drawn, then one number of a table, of rows or of lengths is drawn anew, near its limits. What is not
there, a page past the pool or a column past the table, is put there twice, with other contents: where that changes a
result it was read, and the call has to be refused, in the name of the argument at fault; else it has to pass.
"""

import random

import pytest
import torch

import eagle_kernels
from eagle_kernels.runtime import check
from op_tests.harness.cases import contracted, copied, refusal

CALLS = 100
ROWS, LISTED = ("req_pool_indices", "req_to_token"), 4000
INTS = torch.tensor


def rows(coin: random.Random, batch_size: int, columns: int) -> dict:
    """A table in which every slot is another one."""
    num_rows = batch_size + coin.choice((0, 1, 2))
    return {
        "req_pool_indices": torch.randperm(num_rows)[:batch_size],
        "req_to_token": torch.randperm(num_rows * columns).view(num_rows, columns),
    }


def ranges(coin: random.Random, batch_size: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where ranges of columns begin and end."""
    pairs = [sorted(coin.choices((0, columns, coin.randint(0, columns)), k=2)) for _ in range(batch_size)]
    return INTS([begin for begin, _ in pairs]), INTS([end for _, end in pairs])


def kv_indices(coin, batch_size, columns):
    starts, ends = ranges(coin, batch_size, columns)
    values = rows(coin, batch_size, columns) | {"capacity": LISTED, "page_size": coin.choice((1, 1, 2, 4))}
    return values | ({"seq_lens": ends} if coin.random() < 0.5 else {"starts": starts, "seq_lens": ends - starts})


def chain_kv_indices(coin, batch_size, columns):
    _, ends = ranges(coin, batch_size, columns)
    num_tokens = coin.choice((1, 2, 5))
    return rows(coin, batch_size, columns) | {"kv_lens": ends, "num_verify_tokens": num_tokens, "capacity": LISTED}


def drafts(coin, batch_size, columns):
    """Drafts in a table that is just wide enough for one of the requests, or wider."""
    topk, num_steps, page_size = coin.choice((1, 2, 3)), coin.choice((1, 2, 5)), coin.choice((1, 2, 4))
    seq_lens = torch.randint(1, columns, (batch_size,))
    room = num_steps if 1 in (topk, page_size) else None
    ends = [
        length + (topk - 1) * (room or -(-(length % page_size + num_steps) // page_size) * page_size) + num_steps
        for length in seq_lens.tolist()
    ]
    sizes = {"topk": topk, "num_steps": num_steps, "page_size": page_size, "seq_lens": seq_lens}
    return rows(coin, batch_size, max(ends) + coin.choice((0, 0, 3))) | sizes


def draft_cache_locs(coin, batch_size, columns):
    return drafts(coin, batch_size, columns)


def draft_kv_indices(coin, batch_size, columns):
    values = drafts(coin, batch_size, columns) | {"capacity": LISTED}
    if coin.random() < 0.5:
        values |= {"window_size": coin.choice((1, 2, 5)), "sink_size": coin.choice((0, 1, 3)),
                   "window_counts_drafts": coin.random() < 0.5}  # fmt: skip
    return values


def extend_cache_locs(coin, batch_size, columns):
    starts, ends = ranges(coin, batch_size, columns)
    values = rows(coin, batch_size, columns) | {"starts": starts}
    if coin.random() < 0.5:
        return values | {"ends": ends, "capacity": LISTED}
    return values | {"num_tokens": columns - int(starts.max())}


def assign_req_to_token(coin, batch_size, columns):
    starts, ends = ranges(coin, batch_size, columns)
    num_slots = int((ends - starts).sum()) + coin.choice((0, 0, 2))
    return rows(coin, batch_size, columns) | {"starts": starts, "ends": ends, "cache_locs": torch.arange(num_slots)}


def pages(coin, batch_size, lengths, page_size) -> dict:
    """A pool, and a page table of either form, for requests of these filled slots; the last page is in no table."""
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + batch_size * 3 + 1
    values = {name: torch.randn(num_pages, page_size, 1, 4) for name in ("k_cache", "v_cache")}
    order = torch.randperm(num_pages - 1)
    if coin.random() < 0.5:
        width = max(1, *counts) + coin.choice((0, 0, 1))
        table = order[: batch_size * width].view(batch_size, width) if batch_size * width < num_pages else None
        if table is not None:
            return values | {"block_table": table, "seq_lens": INTS(lengths)}
    return values | {
        "kv_indptr": INTS([0, *counts]).cumsum(0), "kv_indices": order[: sum(counts) + coin.choice((0, 2))],
        "last_page_len": INTS([(length - 1) % page_size + 1 for length in lengths]),
    }  # fmt: skip


def window(coin) -> dict:
    return {"window": coin.choice((1, 2, 5))} if coin.random() < 0.4 else {}


def gqa_decode(coin, batch_size, columns):
    lengths = [coin.randint(0, columns) for _ in range(batch_size)]
    paged = pages(coin, batch_size, lengths, coin.choice((1, 4)))
    return {"query": torch.randn(batch_size, 1, 4)} | paged | window(coin)


def prefill_attention(coin, batch_size, columns):
    lengths = [coin.randint(0, columns) for _ in range(batch_size)]
    counts = [coin.randint(0, min(3, length)) for length in lengths]
    values = {"query": torch.randn(sum(counts), 1, 4), "qo_indptr": INTS([0, *counts]).cumsum(0), "max_query": 3}
    values |= {"is_causal": coin.random() < 0.6}
    return values | pages(coin, batch_size, lengths, coin.choice((1, 4))) | window(coin)


def tree_attention(coin, batch_size, columns):
    num_nodes, is_ragged = coin.choice((1, 2, 3)), coin.random() < 0.5
    prefixes = [coin.randint(1, columns) for _ in range(batch_size)]
    counts = [coin.randint(1, 3) if is_ragged else num_nodes for _ in range(batch_size)]
    filled = [prefix + count for prefix, count in zip(prefixes, counts)]
    values = pages(coin, batch_size, filled, coin.choice((1, 4))) | {"is_causal": True} | window(coin)
    if "seq_lens" in values:
        values["seq_lens"] = INTS(prefixes)
    if is_ragged:
        shape, sizes = (sum(counts),), {"qo_indptr": INTS([0, *counts]).cumsum(0), "max_query": 3}
    else:
        shape, sizes = (batch_size, num_nodes), {}
    if coin.random() < 0.4:
        values |= {name: torch.randn(*shape, 1, 4) for name in ("draft_key", "draft_value")}
        if "last_page_len" in values:  # the pages hold the prefix alone
            return tree_attention(coin, batch_size, columns)
    return values | sizes | {"query": torch.randn(*shape, 1, 4)}


FUNCTIONS = {
    "kv": [assign_req_to_token, chain_kv_indices, draft_cache_locs, draft_kv_indices, extend_cache_locs, kv_indices],
    "attention": [gqa_decode, prefill_attention, tree_attention],
}
CASES = {f"{family}.{each.__name__}": each for family, functions in FUNCTIONS.items() for each in functions}
LENGTHS = ("seq_lens", "kv_lens", "starts", "ends")


def changed(coin: random.Random, values: dict) -> tuple[str, dict]:
    """(the argument of which one number is another, near a limit; the arguments)."""
    names = [name for name in (*LENGTHS, *ROWS, "block_table", "kv_indices") if name in values and values[name].numel()]
    if not names:  # no request has a page
        return "", values
    name = coin.choice(names)
    tensor = values[name].clone()
    if name == "req_to_token" and "cache_locs" in values:  # which is written, not read
        return "ends", values | {"cache_locs": values["cache_locs"][:-1]}
    if name == "req_to_token":
        number = -coin.choice((1, 7))
    elif name == "req_pool_indices":
        number = coin.choice((-1, len(values["req_to_token"])))
    elif name in LENGTHS:
        limit = columns_of(values)
        place = coin.randrange(len(tensor))
        number = coin.choice((-1, limit - 1, limit, limit + 1, limit + 2, int(tensor[place]) + 1, 2**40))
        tensor[place] = number
        return name, values | {name: tensor}
    else:
        number = coin.choice((-2, len(values["k_cache"])))  # a row of -1 alone pads the batch
    tensor.view(-1)[coin.randrange(tensor.numel())] = number
    return name, values | {name: tensor}


def columns_of(values: dict) -> int:
    if "req_to_token" in values:
        return values["req_to_token"].shape[1]
    return values["block_table"].shape[1] * values["k_cache"].shape[1]


FAR = 40


def completed(values: dict, filler: int) -> dict:
    """The arguments with what is not there: it holds another number for each filler, and lengths end in it."""
    values = copied(values)
    for name in LENGTHS:
        if name in values:
            values[name] = values[name].clamp(max=columns_of(values) + 9)
    if "req_to_token" in values:
        table, chosen = values["req_to_token"], values["req_pool_indices"]
        table = torch.where(table < 0, filler, table)
        values["req_pool_indices"] = torch.where((chosen < 0) | (chosen >= len(table)), len(table), chosen)
        values["req_to_token"] = torch.nn.functional.pad(table, (0, FAR, 0, 1), value=filler)
        if "cache_locs" in values:
            values["cache_locs"] = torch.nn.functional.pad(values["cache_locs"], (0, FAR), value=filler + 1)
        return values
    num_pages = len(values["k_cache"])
    for name in ("k_cache", "v_cache"):
        page = torch.full_like(values[name][:1], filler / 1e6)
        values[name] = torch.cat([values[name], page])
    for name in ("block_table", "kv_indices"):
        if name in values:
            table = values[name]
            table = torch.where((table < 0) | (table >= num_pages), num_pages, table)
            values[name] = torch.nn.functional.pad(table, (0, FAR), value=num_pages) if name == "block_table" else table
    return values


def depends(op: str, values: dict) -> bool:
    """Tells whether a result depends on what is not there, or is written there."""
    found = []
    for filler in (10**6, 2 * 10**6):
        given = completed(values, filler)
        result = getattr(eagle_kernels, op).reference(**given)
        if result is None:
            table, (num_rows, num_columns) = given["req_to_token"], values["req_to_token"].shape
            if bool((table[num_rows:] != filler).any() or (table[:, num_columns:] != filler).any()):
                return True
            result = [table[:num_rows, :num_columns]]
        found.append([result] if isinstance(result, torch.Tensor) else result)
    return not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*found))


def is_unsound(op: str, values: dict) -> bool:
    """Tells whether a call reads what is not there, or has a negative length; a page is read as far as its tokens."""
    if any(bool((values[name] < 0).any()) for name in LENGTHS if name in values):
        return True
    if op == "assign_req_to_token" and any(int(values[name].max()) > columns_of(values) for name in ("starts", "ends")):
        return True
    if "block_table" in values and int(values["seq_lens"].max()) > columns_of(values):
        return True
    if op != "kv_indices" or values["page_size"] == 1:
        return depends(op, values)
    sound = values | {"req_to_token": values["req_to_token"].abs()}
    return depends(op, values) or depends(op, sound | {"page_size": 1})


@pytest.mark.parametrize("path", CASES)
def test_refused_is_what_depends_on_what_is_not_there(path, monkeypatch):
    monkeypatch.setattr(check, "DEBUG", True)
    op, seen = path.rpartition(".")[2], set()
    for number in range(CALLS):
        coin = random.Random(f"{path} {number}")
        torch.manual_seed(number)
        values = CASES[path](coin, coin.choice((1, 2, 3)), coin.choice((3, 6, 9)))
        assert not refusal(contracted, path, values), (number, values)
        name, given = changed(coin, values)
        said = refusal(contracted, path, given)
        assert bool(said) == is_unsound(op, given), (number, name, said, given)
        blamed = LENGTHS if name in LENGTHS else (name,)  # a range is where both of its numbers say
        assert not said or said.removeprefix(f"eagle_kernels.{op}: ").startswith(blamed), (number, name, said)
        seen.add((name, bool(said)))
    assert {is_refused for _, is_refused in seen} == {False, True}


def read_entries(op: str, values: dict, name: str) -> torch.Tensor:
    """Which entries of a table results depend on: listed slots are looked for, of pages another one is tried."""
    if name == "req_to_token":
        values = values | {name: (values[name] + 10**5) * values.get("page_size", 1)}
        listed = getattr(eagle_kernels, op).reference(**values)
        named = values[name] // (values["page_size"] if op == "kv_indices" else 1)
        return torch.isin(named, torch.cat([tensor.flatten().long() for tensor in listed]))
    values = values | {cache: torch.cat([values[cache], values[cache][-1:] + 9]) for cache in ("k_cache", "v_cache")}
    table, found = values[name].flatten(), []
    for place in range(len(table)):
        pair = []
        for page in (-2, -1):
            other = table.clone()
            other[place] = len(values["k_cache"]) + page
            pair.append(getattr(eagle_kernels, op).reference(**values | {name: other.view_as(values[name])}))
        found.append(not torch.equal(pair[0].lse.nan_to_num(), pair[1].lse.nan_to_num()))
    return INTS(found, dtype=torch.bool).view_as(values[name])


@pytest.mark.parametrize("path", [path for path in CASES if path != "kv.assign_req_to_token"])
def test_entries_that_are_refused_are_those_that_are_read(path, monkeypatch):
    """Each entry of the tables of a few calls in turn."""
    monkeypatch.setattr(check, "DEBUG", True)
    op, counts = path.rpartition(".")[2], [0, 0]
    for number in range(CALLS // 4):
        coin = random.Random(f"{path} entries {number}")
        torch.manual_seed(number)
        values = CASES[path](coin, coin.choice((1, 2, 3)), coin.choice((3, 6, 9)))
        name = next(name for name in ("req_to_token", "block_table", "kv_indices") if name in values)
        for place, is_read in enumerate(read_entries(op, values, name).flatten().tolist()):
            table = values[name].clone()
            table.view(-1)[place] = -2
            assert bool(refusal(contracted, path, values | {name: table})) == is_read, (number, place, values)
            counts[is_read] += 1
    assert min(counts) > 20, counts
