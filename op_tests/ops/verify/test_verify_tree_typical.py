"""verify_tree_typical against its reference, a float64 search of all paths, the greedy walk, and plain sampling."""

import math

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.verify import verify_tree_typical as op
from eagle_kernels.runtime import launch
from op_tests.harness import check_operation, sweep
from op_tests.ops.verify.cases import follow_tree, make_tree

PATH = "verify.verify_tree_typical"
SHAPES = [(2, 1, 1, 1), (2, 1, 4, 5), (1, 8, 1, 9), (3, 4, 3, 8), (1, 8, 5, 20)]


def make(batch_size, topk, spec_steps, num_nodes, *, vocab_size=61, peak=3.0, device="cpu", dtype=torch.float32):
    links, positions = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size, device=device)
    return {
        **links,
        "target_logits": follow_tree(links, vocab_size, peak=peak, dtype=dtype),
        "positions": positions,
        "seeds": torch.randint(-(2**62), 2**62, (batch_size,), device=device),
        "temperature": torch.tensor([0.8, 0.0, 1.0, 1.3], device=device).repeat(batch_size)[:batch_size].contiguous(),
        "epsilon": torch.full((batch_size,), 0.09, device=device),
        "delta": torch.full((batch_size,), 0.3, device=device),
        "spec_steps": spec_steps,
    }


def unread_logits(batch_size, topk, spec_steps, num_nodes, dtype):
    """For launches that are recorded only: one row of 128k tokens stands for all."""
    logits = torch.empty(batch_size * num_nodes, 128256, dtype=dtype)
    return make(batch_size, topk, spec_steps, num_nodes) | {"target_logits": logits}


def ahead_of_time_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield str(dtype), unread_logits(2, 8, 5, 64, dtype)
    yield "S=0 N=1 V=2", make(2, 1, 1, 1, vocab_size=2) | {"spec_steps": 0}


def order_case():
    """Rows of three slices, all of them read."""
    return make(2, 8, 5, 20, vocab_size=9000)


size_sweep = sweep(lambda batch_size: unread_logits(batch_size, 4, 3, 8, torch.bfloat16))


def wrong_calls():
    wide = {"target_logits": torch.zeros(16, 2**20 + 1).half()}
    yield make(2, 4, 3, 8) | wide, "target_logits must have at most 1048576 tokens a row"


@pytest.fixture
def slices(monkeypatch):
    """Rows of two slices; elsewhere one slice holds them."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    monkeypatch.setattr(op, "SCAN_TUNING", {"default": op.SCAN_TUNING["default"] | {"BLOCK_VOCAB": 32}})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, slices, device):
    output, _ = check_operation(PATH, make(*shape, device=device), case=str(shape))
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


def all_paths(values: dict, request: int) -> list[list[int]]:
    """Every path from the root, from the trees' parents; found by trying every node as its last."""
    first, sibling = (values[name][request].tolist() for name in ("retrieve_next_token", "retrieve_next_sibling"))
    parent = {}
    for node, child in enumerate(first):
        while child >= 0:
            parent[child], child = node, sibling[child]
    paths = []
    for node in range(len(first)):
        path = [node]
        while path[0] in parent:
            path.insert(0, parent[path[0]])
        paths.append(path)
    return paths


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.5, 0.9), (0.02, 0.1)])
def test_the_longest_path_of_likely_drafts(epsilon, delta, device):
    """By Medusa's own formula in float64: the product of posterior masks along each whole path."""
    values = make(6, 4, 3, 9, peak=2.0, device=device)
    values["temperature"] = torch.tensor([0.5, 0.7, 1.0, 1.0, 1.5, 3.0], device=device)
    values["epsilon"].fill_(epsilon)
    values["delta"].fill_(delta)
    output = eagle_kernels.raw.verify_tree_typical(**values)
    seen = set()
    for request in range(6):
        temperature = values["temperature"][request].double().item()
        probs = torch.softmax(values["target_logits"].double().view(6, 9, -1)[request] / temperature, -1).cpu()
        tokens = values["candidates"][request].tolist()

        def mask(node, child, probs=probs, tokens=tokens):
            row = probs[node]
            entropy = -sum(p * math.log(p) for p in row.tolist() if p > 0)
            return row[tokens[child]].item() > min(epsilon, delta * math.exp(-entropy))

        accepted = [path for path in all_paths(values, request) if all(map(mask, path, path[1:]))]
        longest = max(map(len, accepted))
        want = next(path for path in accepted if len(path) == longest)  # in order of their last node
        got = [index - 9 * request for index in output.accept_index[request].tolist() if index >= 0]
        assert got == want and output.accept_token_num[request] == len(want) - 1
        predicts = output.predicts.view(6, 9)[request].tolist()
        assert [predicts[node] for node in want[:-1]] == [tokens[node] for node in want[1:]]
        seen.add(longest)
    assert len(seen) > 1, "all requests accept equally much, so the case proves little"


def test_the_bonus_is_what_plain_sampling_draws(slices, device):
    values = make(4, 4, 3, 8, device=device)
    output = eagle_kernels.raw.verify_tree_typical(**values)
    last = output.accept_index.gather(1, output.accept_token_num[:, None].long())[:, 0].long()
    plain = eagle_kernels.raw.sample_from_logits(
        values["target_logits"][last], values["positions"][last] + 1, values["seeds"], values["temperature"]
    )
    assert torch.equal(output.predicts[last].long(), plain)


def test_a_falling_temperature_ends_in_greedy(device):
    """Where the argmax is unique."""
    values = make(4, 4, 3, 8, device=device)
    values["target_logits"] += torch.rand(values["target_logits"].shape, device=device) / 8
    values["temperature"].fill_(2e-5)
    got = eagle_kernels.raw.verify_tree_typical(**values)
    links = list(values.values())[:4]
    want = eagle_kernels.raw.verify_tree_greedy(*links, target_logits=values["target_logits"], spec_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_ties_go_to_the_lowest_node_and_depth_is_limited(device):
    """A flat target finds nothing unlikely at delta < 1: every path of full length is accepted."""
    values = make(2, 4, 3, 8, device=device)
    values["target_logits"].zero_()
    values["temperature"].fill_(1.0)
    values["delta"].fill_(0.5)
    deep, _ = check_operation(PATH, values, case="flat")
    for request, got in enumerate(deep.accept_index.tolist()):
        paths = all_paths(values, request)
        longest = max(map(len, paths))
        want = next(path for path in paths if len(path) == longest)
        assert [index - 8 * request for index in got if index >= 0] == want
    for steps in (0, 1):
        output, _ = check_operation(PATH, {**values, "spec_steps": steps}, case=f"{steps} steps")
        assert output.accept_token_num.tolist() == [steps] * 2
    values["delta"].fill_(1.0)  # p = exp(-H) is not above itself; epsilon lies higher
    values["epsilon"].fill_(0.9)
    output = eagle_kernels.raw.verify_tree_typical(**{**values, "delta": values["delta"] * 1.001})
    assert output.accept_token_num.sum() == 0


def test_impossible_tokens_are_never_accepted(device):
    values = make(3, 4, 3, 8, device=device)
    values["temperature"].fill_(1.0)
    values["epsilon"].zero_()
    values["target_logits"].fill_(float("-inf"))
    values["target_logits"][:, 60] = 0.0
    values["candidates"].clamp_(max=59)
    output, _ = check_operation(PATH, values, case="one-hot beside the drafts")
    assert output.accept_token_num.sum() == 0 and (output.predicts.view(3, 8)[:, 0] == 60).all()


def test_the_docstring_warns():
    assert op.__doc__.startswith("Lossy ") and op.verify_tree_typical.__doc__.startswith("LOSSY: ")
