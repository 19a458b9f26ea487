"""What is masked, rejected or alone allowed on the first and the last lane of every tile of the vocabulary.

A kernel reads a row tile by tile, and what it leaves out of a tile is found by comparing ids with the tile's ends. Rows
are so made that an edge which is lost, or kept where it must go, decides the token, which is known. Sizes are those of
the tuning tables, a few tokens past two tiles, so that the last tile is cut off as well.
"""

import pytest
import torch

from eagle_kernels.ops.registry import OPS
from eagle_kernels.ops.rejection import sample_children, verify_tree_rejection, verify_tree_traversal
from eagle_kernels.ops.rejection.shared import prepare_pair
from eagle_kernels.ops.sampling import penalize_logits
from eagle_kernels.ops.sampling.shared import renorm_steps, sampling
from eagle_kernels.ops.sampling.shared.row_summary import CHUNK_SIZE
from eagle_kernels.ops.verify import verify_tree_coins, verify_tree_greedy, verify_tree_typical
from eagle_kernels.reference import random
from eagle_kernels.runtime import tuning
from op_tests.harness import check_operation, to_device
from op_tests.harness.retune import retune
from op_tests.harness.trees import stars

# of the interpreter, in lanes that are masked
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")

INFINITY = float("inf")
LAST_COIN = 1.0 - 2.0**-24
SMALL = 2.0**-12
PAST = 5
POSITION = 7


def tile_of(table: dict, device, name: str = "BLOCK_VOCAB") -> int:
    return tuning.row(table, device)[name]


def edges(size: int, *tiles: int) -> list[int]:
    """The first and last token of every tile."""
    firsts = {first for tile in tiles for first in range(0, size, tile)}
    return sorted(firsts | {first - 1 for first in firsts if first} | {size - 1})


def edges_of(table: dict, device) -> tuple[int, int, list[int]]:
    """A table's tile, a vocabulary of two tiles and a few tokens, and the first and last token of every tile."""
    tile = tile_of(table, device)
    return tile, 2 * tile + PAST, edges(2 * tile + PAST, tile)


def rows_of(weights: list[dict[int, float]], size: int, rest: float = 0.0) -> torch.Tensor:
    """[R, size] of what is given for tokens."""
    rows = torch.full((len(weights), size), rest)
    for row, given in zip(rows, weights):
        row[list(given)] = torch.tensor(list(given.values()))
    return rows


def seed_with_coin(low: float, high: float, draw: int) -> int:
    """A request whose coin at `draw` lies between."""
    coins = random.uniform(torch.arange(200), torch.full((200,), POSITION + 1), random.STREAM_ACCEPT, draw)
    return int(((coins > low) & (coins < high)).nonzero()[0])


def draws(num_rows: int) -> dict:
    """A request in each row, of its own seed, all at one position."""
    positions = torch.full((num_rows,), POSITION)
    return {"positions": positions, "seeds": torch.arange(num_rows), "temperature": torch.ones(num_rows)}


def beside(edge: int, size: int) -> list[int]:
    """Its neighbours, -1 for one that there is not."""
    return [edge - 1, edge + 1 if edge + 1 < size else -1]


def run(path: str, values: dict, device, **options):
    return check_operation(path, to_device(values, device), **options)[0]


def test_coins(device):
    """Most of the mass on an edge between two that are rejected; a trace between rejected ones at a group's ends."""
    tile, size, at_edges = edges_of(verify_tree_coins.MASS_TUNING, device)
    group = tile_of(verify_tree_coins.MASS_TUNING, device, "BLOCK_GROUP")
    # children, what is left, final coin, token
    cases = [(beside(edge, size), {edge: 0.25, tile // 2: SMALL}, 0.5, edge) for edge in at_edges]
    for first in (0, tile - group, tile, 2 * tile - group, 2 * tile):
        last = min(first + group, size) - 1
        cases += [([first, last], {first + 2: SMALL}, coin, first + 2) for coin in (0.0, LAST_COIN)]
    children, left, final_coins, expected = zip(*cases)
    rejected = [dict.fromkeys((token for token in tokens if token >= 0), 0.25) for tokens in children]
    probs = rows_of([gone | kept for gone, kept in zip(rejected, left)], size)
    values = stars(list(children)) | {
        "target_probs": probs[:, None].expand(-1, 3, -1).contiguous(), "spec_steps": 1,
        "uniform_samples": torch.full((len(cases), 3), LAST_COIN),
        "uniform_samples_for_final_sampling": torch.tensor(final_coins),
    }  # fmt: skip
    output = run("verify.verify_tree_coins", values, device)
    assert output.predicts.view(-1, 3)[:, 0].tolist() == list(expected)


def pair_of(target: torch.Tensor, draft: torch.Tensor, kind: str) -> dict:
    """Probabilities as they are; as logits, of which every tile has its part in the sum; without the draft's token 3,
    so that all ids after it are other ones in the draft."""
    none = dict.fromkeys(("target_logits", "draft_logits", "target_probs", "draft_probs"))
    if kind == "logits":
        return none | {"target_logits": target.log(), "draft_logits": draft.log()}
    if kind == "probs":
        return none | {"target_probs": target, "draft_probs": draft}
    known = torch.arange(target.shape[1] - 1)
    known += known >= 3
    d2t = known - torch.arange(len(known))
    return none | {"target_probs": target, "draft_probs": draft[:, known].contiguous(), "d2t": d2t}


KINDS = pytest.mark.parametrize("kind", ["probs", "logits", "reduced"])


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("op", [verify_tree_rejection, verify_tree_traversal], ids=lambda op: op.__name__[-9:])
def test_rejected_children(op, kind, device):
    """The first child had nearly all of q, the coin of the second one is above its p / q, if that is of what is left.

    It would be accepted if the first one, on an edge, did not lose its q, or if an edge lost its part of p.
    """
    tile, size, at_edges = edges_of(op.TUNING, device)
    inner, other = tile // 2, tile + tile // 3
    # first child, target, rest of the draft, token
    cases = [(edge, {inner: 0.25, other: 0.75}, [inner, other], other) for edge in at_edges]
    cases += [(other, {inner: 0.5, edge: 0.5}, [inner], edge) for edge in at_edges]
    first, target, rest, expected = zip(*cases)
    draft = [{edge: 1 - len(others) / 64} | dict.fromkeys(others, 1 / 64) for edge, others in zip(first, rest)]
    second = 2 if op is verify_tree_rejection else 65536 + 2
    rows = [rows_of(list(weights), size).repeat_interleave(3, 0) for weights in (target, draft)]
    values = stars([[edge, inner] for edge in first]) | pair_of(*rows, kind) | {
        "positions": torch.tensor([POSITION] + [POSITION + 1] * 2).repeat(len(cases)),
        "seeds": torch.full((len(cases),), seed_with_coin(0.6, 0.9, second)),
        "temperature": torch.ones(len(cases)), "spec_steps": 1,
    }  # fmt: skip
    output = run(OPS[op.__name__.rpartition(".")[2]], values, device)
    assert output.accept_token_num.sum() == 0
    assert output.predicts.view(-1, 3)[:, 0].tolist() == list(expected)


@pytest.mark.cross
@KINDS
@pytest.mark.parametrize("method", ["standard", "block"])
def test_chain(method, kind, device):
    """A draft on an edge, of p = 0.9 and q = 1. Rejected, it leaves another token. Accepted, what p says next is on the
    edge alone, which for block verification is all of the mass that lets it accept."""
    tile, size, at_edges = edges_of(prepare_pair.SLICE_TUNING, device)
    inner = tile // 2
    seeds = [seed_with_coin(0.91, 1.0, 0), seed_with_coin(0.1, 0.4, 0)]
    target, draft = [], []
    for edge in at_edges:
        target += [{edge: 0.9, inner: 0.1}, {edge: 1.0}, {0: 1.0}]
        draft += [{edge: 1.0}, {inner: 1.0}]
    rows = [rows_of(weights, size).repeat(2, 1) for weights in (target, draft)]
    values = pair_of(*rows, kind) | {
        "candidates": torch.tensor([[0, edge, inner] for edge in at_edges]).repeat(2, 1),
        "positions": (POSITION + torch.arange(3)).repeat(2 * len(at_edges)),
        "seeds": torch.tensor(seeds).repeat_interleave(len(at_edges)),
        "temperature": torch.ones(2 * len(at_edges)), "method": method,
    }  # fmt: skip
    output = run("rejection.verify_chain", values, device)
    assert output.predicts.view(-1, 3)[:, :2].tolist() == [[inner, -1] for _ in at_edges] + [[e, e] for e in at_edges]


def allowed_tokens(rows: list[list[int]], size: int) -> torch.Tensor:
    """int32 words of which the bits of these tokens are set."""
    is_allowed = torch.zeros(len(rows), -(-size // 32) * 32, dtype=torch.int64)
    for row, tokens in zip(is_allowed, rows):
        row[tokens] = 1
    words = (is_allowed.view(len(rows), -1, 32) << torch.arange(32)).sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32)


FILTERS = {"plain": {}, "filters": {"top_k": 40, "top_p": 0.999, "min_p": 1e-6}}


@pytest.mark.cross
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("op", ["sample_from_logits", "verify_tree_sampled"])
def test_what_a_grammar_allows(op, filters, device):
    """Rows of which an edge alone may be drawn, and one, of large logits there, of which no edge may."""
    given = dict.fromkeys(("top_k", "top_p", "min_p")) | FILTERS[filters]
    tile = CHUNK_SIZE * sampling.scan_tuning(given, device)["BLOCK_CHUNK"]
    size = 2 * tile + PAST
    at_edges = edges(size, tile, CHUNK_SIZE)
    rest = sorted(set(range(size)) - set(at_edges))
    num_rows = len(at_edges) + 1
    logits = rows_of([dict.fromkeys(beside(edge, size), 30.0) | {edge: -30.0} for edge in at_edges], size)
    logits = torch.cat([logits, rows_of([dict.fromkeys(at_edges, 90.0)], size)])
    values = draws(num_rows) | {"token_bitmask": allowed_tokens([[edge] for edge in at_edges] + [rest], size)}
    for name, value in FILTERS[filters].items():
        values[name] = torch.full((num_rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
    if op == "sample_from_logits":
        tokens = run("sampling.sample_from_logits", values | {"logits": logits}, device)
    else:
        values |= stars([[]] * num_rows) | {"target_logits": logits, "spec_steps": 0}
        tokens = run("sampling.verify_tree_sampled", values, device, skip=("logprobs", "raw_logprobs")).predicts
    assert tokens[:-1].tolist() == at_edges and tokens[-1] not in at_edges


def test_drawn_children(device):
    """Of the edges alone, each by itself and all of them; everything else cannot be drawn."""
    _, size, at_edges = edges_of(sample_children.TUNING, device)
    rows = [{edge: -30.0} for edge in at_edges] + [dict.fromkeys(at_edges, 1.0)]
    logits = rows_of(rows, size, rest=-INFINITY)
    values = draws(len(rows)) | {"draft_logits": logits, "num_children": len(at_edges) + 1}
    tokens = run("rejection.sample_children", values, device, close=("logprobs",)).tokens
    assert tokens[:-1, 0].tolist() == at_edges and (tokens[:-1, 1:] == -1).all()
    assert sorted(tokens[-1].tolist()) == [-1, *at_edges]


@pytest.mark.cross
@pytest.mark.parametrize(("name", "value"), {"top_k": 1, "top_p": 0.4, "min_p": 0.9}.items())
def test_renorms(name, value, device):
    """The likeliest token on every edge in turn, the next ones on the others: it alone stays."""
    tables = (renorm_steps.SCAN_TUNING, renorm_steps.COLLECT_TUNING, renorm_steps.WRITE_TUNING)
    tiles = [tile_of(table, device) for table in tables]
    size = 2 * max(tiles) + PAST
    at_edges = edges(size, *tiles)
    probs = rows_of([dict.fromkeys(at_edges, 2.0**-6) | {edge: 0.5} for edge in at_edges], size)
    dtype = torch.int32 if name == "top_k" else torch.float32
    values = {"probs": probs, name: torch.full((len(at_edges),), value, dtype=dtype)}
    output = run(f"sampling.{name}_renorm", values, device)
    assert torch.equal(output.cpu(), rows_of([{edge: 1.0} for edge in at_edges], size))


def test_penalties(device):
    """What is asked for the edges changes their logits and no others: at all nodes, and for drafts each at its own."""
    _, size, at_edges = edges_of(penalize_logits.TUNING, device)
    listed = torch.tensor([at_edges])
    tree = stars([at_edges])
    num_nodes = 1 + len(at_edges)
    logits = torch.full((num_nodes, size), 4.0)
    counts = torch.zeros(1, size, dtype=torch.int32).scatter_(1, listed, 3)
    one, rest = torch.ones(1), sorted(set(range(size)) - set(at_edges))
    changes = {
        "bad": {"bad_token_ids": listed},
        "ends": {"end_token_ids": listed, "min_tokens": torch.tensor([9]), "num_output_tokens": torch.tensor([1])},
        "prompt": {"prompt_mask": allowed_tokens([at_edges], size), "repetition_penalty": 2 * one},
        "output": {"output_counts": counts, "frequency_penalty": one, "presence_penalty": one},
        "bias": {"logit_bias": torch.zeros(1, size).scatter_(1, listed, -2.0)},
        "grammar": {"token_bitmask": allowed_tokens([rest] * num_nodes, size)},
    }
    for name, change in changes.items():
        output = run("sampling.penalize_logits", tree | {"target_logits": logits} | change, device, case=name)
        assert (output != 4.0).nonzero()[:, 1].view(num_nodes, -1).tolist() == [at_edges] * num_nodes
    # one draft in a tree, and so in its tile
    num_trees = len(at_edges)
    values = stars([[edge] for edge in at_edges]) | {
        "target_logits": logits[:1].repeat(2 * num_trees, 1),
        "frequency_penalty": one.repeat(num_trees),
    }
    output = run("sampling.penalize_logits", values, device)
    assert (output != 4.0).nonzero().tolist() == [[2 * tree + 1, edge] for tree, edge in enumerate(at_edges)]


@pytest.mark.parametrize("table", ["ROWS_TUNING", "LEVEL_TUNING"])
def test_argmax(table, device, monkeypatch):
    """Whichever way the rows are read."""
    retune(monkeypatch, verify_tree_greedy.CHOICE_TUNING, level_bytes=2**40 * (table == "ROWS_TUNING"))
    _, size, at_edges = edges_of(getattr(verify_tree_greedy, table), device)
    logits = rows_of([{edge: 1.0, min(edge + 1, size - 1): 1.0} for edge in at_edges], size)
    values = stars([[edge] for edge in at_edges]) | {"target_logits": logits.repeat_interleave(2, 0), "spec_steps": 1}
    output = run("verify.verify_tree_greedy", values, device)
    assert output.predicts.view(-1, 2).tolist() == [[edge, edge] for edge in at_edges]


def test_typical(device):
    _, size, at_edges = edges_of(verify_tree_typical.SCAN_TUNING, device)
    count = len(at_edges)
    logits = rows_of([{edge: -30.0} for edge in at_edges], size, rest=-INFINITY).repeat_interleave(2, 0)
    values = stars([[edge] for edge in at_edges]) | draws(count) | {
        "target_logits": logits, "positions": torch.tensor([POSITION, POSITION + 1]).repeat(count),
        "epsilon": torch.full((count,), 0.9), "delta": torch.full((count,), 0.9), "spec_steps": 1,
    }  # fmt: skip
    output = run("verify.verify_tree_typical", values, device)
    assert output.predicts.view(-1, 2).tolist() == [[edge, edge] for edge in at_edges]
