"""verify_tree_topp against its reference, and on chains against the rule of FastDeploy in a few lines."""

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.verify import verify_tree_topp as op
from op_tests.harness import check_operation, sweep, to_device
from op_tests.harness.trees import trees_of
from op_tests.ops.verify.cases import make_tree

PATH = "verify.verify_tree_topp"
SHAPES = [(2, 1, 1, 1), (6, 1, 4, 5), (2, 8, 1, 9), (6, 4, 3, 8), (4, 8, 5, 32)]


def make(batch_size, topk, spec_steps, num_nodes, *, num_candidates=4, window=2, vocab_size=7, device="cpu",
         dtype=torch.int64):  # fmt: skip
    """Few tokens, so that memberships and windows are common; lengths 0 (top-p out of reach) .. more than there are."""
    links, _ = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=max(vocab_size, topk), dtype=dtype)
    rows = batch_size * num_nodes
    ids = torch.stack([torch.randperm(max(vocab_size, num_candidates))[:num_candidates] for _ in range(rows)])
    # lean towards the first child's token, so that walks get somewhere
    first = links["retrieve_next_token"].flatten()
    request = torch.arange(rows) // num_nodes
    child_token = links["candidates"].flatten()[request * num_nodes + first.clamp(min=0)]
    wins = (first >= 0) & (torch.rand(rows) < 0.8)
    ids[:, 0] = torch.where(wins, child_token, ids[:, 0])
    values = {
        **links,
        "candidate_ids": ids.to(dtype),
        "candidate_lens": torch.randint(0, num_candidates + 2, (rows,)).clamp(max=num_candidates + 1).to(dtype),
        "target_predict": ids[:, 0].clone().view(batch_size, num_nodes).to(dtype),
        "spec_steps": spec_steps,
        "verify_window": window,
    }
    return to_device(values, device)


def ahead_of_time_cases():
    yield "int64", make(2, 8, 5, 64, num_candidates=10)
    yield "int32", make(2, 8, 5, 64, num_candidates=5, dtype=torch.int32)
    yield "one candidate", make(2, 1, 4, 5, num_candidates=1)
    yield "S=0 N=1", make(2, 1, 1, 1, num_candidates=1) | {"spec_steps": 0}


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 3, 8))


@pytest.mark.parametrize("num_candidates", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, num_candidates, device):
    output, _ = check_operation(PATH, make(*shape, num_candidates=num_candidates, device=device), case=str(shape))
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


def emit(drafts: list[int], ids: list[list[int]], lengths: list[int], window: int) -> int:
    """How many drafts FastDeploy's rule takes from a chain: drafts[i] is judged by row i."""
    top = [row[0] for row in ids]
    member = [draft in row[: max(0, length)] for draft, row, length in zip(drafts, ids, lengths)]
    count = 0
    while count < len(drafts):
        ahead = range(count + 1, count + 1 + window)
        if member[count]:
            count += 1
        elif (
            len(ids[0]) > 1
            and ids[count][1] == drafts[count]
            and ahead.stop <= len(drafts)
            and all(top[row] == drafts[row] for row in ahead)
        ):
            count += 1 + window
        else:
            break
    return count


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("num_candidates", [1, 3])
def test_chains_are_fastdeploys(window, num_candidates, device):
    lanes, steps = 150, 6
    values = make(lanes, 1, steps, steps + 1, num_candidates=num_candidates, window=window, vocab_size=4)
    tokens = values["candidates"]
    # lists that end at once are where the window can help
    values["candidate_lens"] *= torch.rand(values["candidate_lens"].shape) < 0.5
    ids = values["candidate_ids"].view(lanes, steps + 1, num_candidates)
    if num_candidates > 1:
        swapped = torch.rand(lanes, steps) < 0.3
        ids[:, :-1, 1] = torch.where(swapped, tokens[:, 1:], ids[:, :-1, 1])
        values["candidate_lens"].view(lanes, -1)[:, :-1][swapped] = 0
    public = eagle_kernels.verify_tree_topp(**values)
    lengths = values["candidate_lens"].view(lanes, -1)
    want = [emit(*row, window) for row in zip(tokens[:, 1:].tolist(), ids.tolist(), lengths.tolist())]
    assert public.accept_token_num.tolist() == want and len(set(want)) > 3
    for lane in range(0, lanes, 7):
        path = public.accept_index[lane, : want[lane] + 1].long()
        assert path.tolist() == [lane * (steps + 1) + depth for depth in range(want[lane] + 1)]
        emitted = public.predicts[path].tolist()
        assert emitted[:-1] == tokens[lane, 1 : want[lane] + 1].tolist()
        assert emitted[-1] == values["target_predict"][lane, want[lane]]
    without = eagle_kernels.verify_tree_topp(**{**values, "verify_window": steps})
    if num_candidates > 1 and window < 2:
        assert public.accept_token_num.sum() > without.accept_token_num.sum(), "no window was taken"
    few = {name: value[: len(value) // 10] if torch.is_tensor(value) else value for name, value in values.items()}
    output, _ = check_operation(PATH, to_device(few, device), case="fifteen chains")
    assert torch.equal(output.accept_token_num.cpu(), public.accept_token_num[:15])


def family(device) -> dict:
    """Root -> 1, 2, 3 (tokens 11, 12, 13); 2 -> 4, 5 (21, 22); 5 -> 6 (31)."""
    values = trees_of([-1, 0, 0, 0, 2, 2, 5], [[10, 11, 12, 13, 21, 22, 31]]) | {
        "candidate_ids": torch.tensor([[90, 91], [90, 91], [22, 91], [90, 91], [90, 91], [31, 91], [90, 91]]),
        "candidate_lens": torch.zeros(7, dtype=torch.int64),
        "target_predict": torch.arange(70, 77)[None],
    }
    return to_device(values, device) | {"spec_steps": 3, "verify_window": 2}


@pytest.mark.parametrize(
    ("root", "length", "change", "path"),
    [
        ([13, 12], 2, {}, [2]),  # the first sibling that is a member, not the likelier one
        ([13, 90], 2, {}, [3]),
        ([90, 12], 1, {}, [2, 5, 6]),  # the window: node 2 by the second candidate, 5 and 6 by the first
        ([90, 12], 0, {}, [2, 5, 6]),
        ([90, 12], 1, {"verify_window": 1}, [2, 5]),  # and there the walk goes on, to end for want of members
        ([90, 12], 1, {"verify_window": 3}, []),
        ([90, 12], 1, {"spec_steps": 2}, []),
        ([90, 12], 1, {"spec_steps": 2, "verify_window": 1}, [2, 5]),
        ([90, 12], 1, {"verify_window": 0}, [2]),
        ([90, 11], 1, {}, []),
        ([11, 12], 1, {}, [1]),  # a member goes before the window
        ([90, 12], 9, {}, [2]),  # also where it is the second candidate
        ([90, 12], -3, {}, [2, 5, 6]),
        ([90, 91], 2, {}, []),
        ([-1, -1], 2, {}, []),
        ([2**32 + 11, 2**32 + 12], 2, {}, []),
    ],
)
def test_a_family(root, length, change, path, device):
    values = family(device) | change
    values["candidate_ids"][0] = torch.tensor(root)
    values["candidate_lens"][0] = length
    output, _ = check_operation(PATH, values, case=str(path))
    nodes = [0, *path]
    assert output.accept_index[0, : len(nodes)].tolist() == nodes and output.accept_token_num[0] == len(path)
    predicts = output.predicts.tolist()
    assert [predicts[node] for node in nodes[:-1]] == [values["candidates"][0, node].item() for node in path]
    assert predicts[nodes[-1]] == 70 + nodes[-1]


def test_the_docstring_warns():
    assert op.__doc__.startswith("Lossy ") and op.verify_tree_topp.__doc__.startswith("LOSSY: ")
