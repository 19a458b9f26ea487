"""Acceptance to order: every policy reaches the depth that it says, kernel and reference, from ids and from logits."""

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.sampling import verify_tree_sampled as sampled
from eagle_kernels.ops.verify import verify_tree_greedy as op
from eagle_kernels.reference.accept_policy import simulated_acceptance
from eagle_kernels.runtime import launch
from op_tests.harness import assert_only_launches, check_operation, check_registration, to_device
from op_tests.harness.trees import stars
from op_tests.ops.verify.cases import follow_tree, make_tree

PATH = "verify.verify_tree_greedy"
POLICIES = ("accept_all", "reject_all", "simulate")
FORMS = ("ids", "all rows", "level by level")
SHAPES = [(2, 1, 4, 5), (2, 4, 3, 8), (1, 8, 5, 16), (2, 1, 1, 1)]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """How the target's tokens come; both ways to scan logits, whatever the shapes say, in one slice of 128 tokens."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    monkeypatch.setattr(op, "scans_all_rows", lambda *sizes: request.param == "all rows")
    for table in ("ROWS_TUNING", "LEVEL_TUNING"):
        monkeypatch.setattr(op, table, {"default": getattr(op, table)["default"] | {"BLOCK_VOCAB": 128}})
    return request.param


def make(batch_size, topk, spec_steps, num_nodes, *, policy="normal", form="ids", device="cpu", rates=None):
    links, positions = make_tree(batch_size, topk, spec_steps, num_nodes, device=device)
    logits = follow_tree(links, 97)
    values = {**links, "spec_steps": spec_steps, "accept_policy": policy}
    if form == "ids":
        values["target_predict"] = logits.argmax(-1).view(batch_size, num_nodes)
    else:
        values["target_logits"] = logits
    if policy == "simulate":
        rates = torch.linspace(0.9, 0.4, spec_steps) if rates is None else torch.tensor(rates)
        values |= {"simulated_rates": rates.to(device), "positions": positions}
        values["seeds"] = torch.arange(batch_size, device=device) * 1_000_003 - 7
    return values


def wished_depths(values: dict) -> list[int]:
    """From the policy's words: the path of first children, cut where the policy or S says stop."""
    spec_steps, policy = values["spec_steps"], values["accept_policy"]
    depths = []
    for request, first_child in enumerate(values["retrieve_next_token"].tolist()):
        wanted = [policy == "accept_all"] * spec_steps
        if policy == "simulate":
            root = values["positions"].view(len(values["candidates"]), -1)[request, :1]
            seed = values["seeds"][request : request + 1]
            wanted = simulated_acceptance(values["simulated_rates"], seed, root)[0].tolist()
        node = depth = 0
        while depth < spec_steps and wanted[depth] and first_child[node] > 0:
            node, depth = first_child[node], depth + 1
        depths.append(depth)
    return depths


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reaches_the_wished_depth(shape, policy, form, device):
    values = make(*shape, policy=policy, form=form, device=device)
    output, _ = check_operation(PATH, values, case=f"{shape} {policy} {form}")
    assert output.accept_token_num.tolist() == wished_depths(values)


@pytest.mark.cross
@pytest.mark.parametrize("way", ["all rows", "level by level"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}], ids=["plain", "top_k"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled_walks_reach_it_too(shape, policy, filters, way, device, monkeypatch):
    """Whichever way rows are drawn: all at once, by launches of their own, or by the next level's scan."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    monkeypatch.setattr(sampled, "draws_all_rows", lambda *sizes: way == "all rows")
    values = make(*shape, policy=policy, form="logits", device=device)
    batch_size = len(values["candidates"])
    numbers = {"seeds": torch.arange(batch_size) * 1_000_003 - 7, "temperature": torch.full((batch_size,), 0.9)}
    numbers |= {name: torch.full((batch_size,), value) for name, value in filters.items()}
    numbers["positions"] = torch.arange(values["candidates"].numel())
    values |= {name: values.get(name, value.to(device)) for name, value in numbers.items()}
    values["seq_lens"] = torch.arange(batch_size, device=device) + 5
    output, _ = check_operation("sampling.verify_tree_sampled", values, case=f"{shape} {policy} {way}")
    if policy != "simulate":
        assert output.accept_token_num.tolist() == wished_depths(values)


@pytest.mark.parametrize(
    ("tokens", "target", "policy", "planted", "accepted"),
    [
        ([5, 6], 6, "accept_all", 5, 1),
        ([5, 6], 9, "accept_all", 5, 1),
        ([5, 6], -1, "accept_all", 5, 1),
        ([-1, 6], 9, "accept_all", 6, 1),
        ([2**31 + 5, 6], 9, "accept_all", 6, 1),
        ([-1, -1], 9, "accept_all", 9, 0),
        ([5, 6], 6, "simulate", 0, 0),
        ([0, 1, 3, 1], 3, "simulate", 2, 0),
        ([2, 1, 0], 1, "simulate", 3, 0),
        ([0, 1], 9, "simulate", 9, 0),
        ([-1, 1], -1, "simulate", -1, 0),
    ],
)
def test_planted_tokens(tokens, target, policy, planted, accepted, device):
    """The first child's, where one has a token; to stop, only a child's gives way, to the smallest free id."""
    predict = torch.full((1, len(tokens) + 1), target)
    values = to_device(stars([tokens], root=7) | {"target_predict": predict}, device)
    values |= {"spec_steps": 1, "accept_policy": policy}
    if policy == "simulate":
        values |= {"simulated_rates": torch.zeros(1, device=device), "seeds": torch.zeros(1, device=device).long()}
        values["positions"] = torch.zeros(len(tokens) + 1, device=device).long()
    output, _ = check_operation(PATH, values, case=policy)
    assert output.predicts[0] == planted and output.accept_token_num[0] == accepted
    child = next((i for i, token in enumerate(tokens, 1) if token == planted), None)
    assert output.accept_index[0].tolist() == [0, child if accepted else -1]
    if accepted:
        assert output.predicts[child] == target, "at depth S nothing can be accepted, so nothing is planted"


@pytest.mark.cross
@pytest.mark.parametrize("way", ["all rows", "level by level"])
def test_rejecting_all_keeps_the_targets_token(way, form, device, monkeypatch):
    """At the root alone, also where a child carries it; nothing else is visited. Greedy and sampled."""
    values = make(3, 4, 3, 8, policy="reject_all", form=form, device=device)
    normal = eagle_kernels.raw.verify_tree_greedy(**values | {"accept_policy": "normal"})
    assert normal.accept_token_num.min() > 0
    output, _ = check_operation(PATH, values, case=form)
    assert_rejected(output, normal, values)
    if form == "ids":
        return
    monkeypatch.setattr(sampled, "draws_all_rows", lambda *sizes: way == "all rows")
    links, positions = make_tree(3, 4, 3, 8, device=device)
    sampling = {"seeds": torch.arange(3, device=device), "temperature": torch.full((3,), 0.5, device=device)}
    for more in ({}, {"top_k": torch.full((3,), 3, dtype=torch.int32, device=device)}):
        values = {**links, "target_logits": follow_tree(links, 97), "positions": positions, "spec_steps": 3}
        values |= sampling | more
        normal = eagle_kernels.raw.verify_tree_sampled(**values)
        assert normal.accept_token_num.sum() > 0
        values["accept_policy"] = "reject_all"
        output, _ = check_operation("sampling.verify_tree_sampled", values, case=way)
        assert_rejected(output, normal, values)


def assert_rejected(output, normal, values: dict) -> None:
    predicts, before = output.predicts.view(3, 8), normal.predicts.view(3, 8)
    assert torch.equal(predicts[:, 0], before[:, 0]) and (predicts[:, 1:] == -1).all()
    assert torch.equal(output.accept_index[:, 0], values["retrieve_index"][:, 0].int())
    assert (output.accept_index[:, 1:] == -1).all() and output.accept_token_num.tolist() == [0] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_fewer_steps_than_levels(policy, form, device):
    values = make(2, 1, 4, 5, policy=policy, form=form, rates=[1.0, 1.0, 1.0, 1.0], device=device)
    for steps in (0, 2):
        cut = {**values, "spec_steps": steps}
        if policy == "simulate":
            cut["simulated_rates"] = values["simulated_rates"][:steps]
        output, _ = check_operation(PATH, cut, case=f"{policy} {steps}")
        assert output.accept_token_num.tolist() == [0 if policy == "reject_all" else steps] * 2


def chains(lanes: int, spec_steps: int, rates: list[float], device) -> dict:
    """A request per lane, all the same chain at the same position: only their seeds differ."""
    values = make(1, 1, spec_steps, spec_steps + 1, policy="simulate", rates=rates, device=device)
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and name not in ("simulated_rates", "seeds"):
            values[name] = value.repeat(lanes, *[1] * (value.dim() - 1))
    index = torch.arange(lanes * (spec_steps + 1), device=device)
    return values | {"retrieve_index": index.view(lanes, -1), "seeds": torch.arange(lanes, device=device)}


@pytest.mark.cross
@pytest.mark.parametrize("rates", [[0.8, 0.5, 0.5, 0.1], [1.0, 0.25, 0.0, 0.0]], ids=str)
def test_simulated_rates(rates, device):
    """P(at least d accepted) = rates[d - 1], within four sigmas; 0 and 1 exactly. Kernel and reference alike."""
    lanes, steps = 2000, len(rates)
    values = chains(lanes, steps, rates, device)
    accepted = eagle_kernels.verify_tree_greedy(**values).accept_token_num
    for depth, rate in enumerate(rates):
        share = (accepted > depth).double().mean().item()
        assert abs(share - rate) <= 4 * (rate * (1 - rate) / lanes) ** 0.5, (depth, share)
    mean, of_squares = sum(rates), sum((2 * depth + 1) * rate for depth, rate in enumerate(rates))
    assert abs(accepted.double().mean().item() - mean) < 4 * ((of_squares - mean**2) / lanes) ** 0.5
    per_request = {name: len(value) // lanes for name, value in values.items() if isinstance(value, torch.Tensor)}
    few = {name: values[name][: 16 * count] for name, count in per_request.items() if count}
    output, _ = check_operation(PATH, {**values, **few}, case="few")
    assert torch.equal(output.accept_token_num, accepted[:16])


def test_levels_and_positions_have_coins_of_their_own(device):
    """Of two coins of a request, and of one depth at neighbouring positions: a quarter each of the four outcomes."""
    seeds = torch.arange(4000)
    half = torch.tensor([0.5, 0.25])
    here, next_to_it = (simulated_acceptance(half, seeds, torch.full_like(seeds, root)) for root in (10, 11))
    for one, other in ((here[:, 0], here[:, 1]), (here[:, 0], next_to_it[:, 0])):
        counts = torch.bincount(one.long() * 2 + other.long(), minlength=4)
        assert (counts - 1000).abs().max() < 4 * (4000 * 0.25 * 0.75) ** 0.5


def test_normal_is_what_it_was(form, device):
    """The same launches, none of which gets anything of a policy."""
    values = make(3, 4, 3, 8, form=form, device=device)
    recorded = []
    with launch.intercept(lambda *record: recorded.append(record[3])):
        op.verify_tree_greedy(**values)
    given = [value for arguments in recorded for value in (*arguments.get("coins", ()), arguments.get("planted_ptr"))]
    assert recorded and given and not any(value is not None for value in given)
    assert {arguments.get("ACCEPT_POLICY", "normal") for arguments in recorded} == {"normal"}
    del values["accept_policy"]
    check_operation(PATH, values, case="no policy named")


def test_a_policy_launches_nothing_more(form, device):
    for policy in ("normal", *POLICIES):
        launches = {"ids": 1, "all rows": 2, "level by level": 5}[form]
        assert_only_launches(PATH, make(2, 4, 3, 8, policy=policy, form=form, device=device), launches=launches)


def test_registration(device):
    check_registration("verify_tree_greedy", make(2, 4, 3, 8, policy="simulate", device=device))
    check_registration("verify_tree_greedy", make(2, 4, 3, 8, policy="accept_all", device=device))


@pytest.mark.cross
@pytest.mark.parametrize("policy", POLICIES)
def test_front_door(policy, device):
    values = make(3, 4, 3, 8, policy=policy, form="logits", device=device)
    want = eagle_kernels.verify_tree_greedy(**values)
    got = eagle_kernels.verify_tree(**values)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    links, positions = make_tree(3, 4, 3, 8, device=device)
    sampling = {
        **links, "target_logits": follow_tree(links, 97), "positions": positions, "spec_steps": 3,
        "seeds": torch.arange(3, device=device), "temperature": torch.ones(3, device=device), "accept_policy": policy,
        "simulated_rates": values.get("simulated_rates"),
    }  # fmt: skip
    output, _ = check_operation("sampling.verify_tree_sampled", sampling, case=policy)
    got = eagle_kernels.verify_tree(**sampling)
    assert all(torch.equal(a, b) for a, b in zip(got, output))
    wanted = {"accept_all": output.accept_token_num.min() > 0, "reject_all": output.accept_token_num.max() == 0}
    assert wanted.get(policy, True)


COME_WITH_IT = "must come with accept_policy='simulate', got"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accept_policy": "no"}, "accept_policy must be one of 'normal', 'accept_all', 'reject_all', 'simulate', got"),
        ({"accept_policy": "accept_all"}, f"simulated_rates {COME_WITH_IT} 'accept_all'"),
        ({"accept_policy": "normal", "simulated_rates": None}, f"seeds {COME_WITH_IT} 'normal'"),
        ({"simulated_rates": torch.ones(4)}, r"simulated_rates must have shape \[3\], got \[4\]"),
        ({"simulated_rates": torch.ones(3).double()}, "simulated_rates must have dtype float32, got float64"),
        ({"positions": torch.zeros(2, 8, dtype=torch.int64)}, r"positions must have shape \[16\], got \[2, 8\]"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match="eagle_kernels.verify_tree_greedy: " + message):
        eagle_kernels.raw.verify_tree_greedy(**{**make(2, 4, 3, 8, policy="simulate"), **change})


@pytest.mark.parametrize("missing", ["simulated_rates", "seeds", "positions"])
def test_what_simulate_needs(missing):
    with pytest.raises(TypeError, match=f"verify_tree_greedy: {missing} must be a tensor, got NoneType"):
        eagle_kernels.raw.verify_tree_greedy(**{**make(2, 4, 3, 8, policy="simulate"), missing: None})
