"""verify_tree_sampled: equal to its reference, equal to plain sampling token for token, and the target's joint law.

Rows are scanned level by level or all at once, as shapes say (`draws_all_rows`); most tests force one or the other.
"""

import functools
import importlib
import inspect

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference import sampling as reference_sampling
from op_tests.harness import check_operation, sweep, to_device
from op_tests.harness.statistics import assert_follows_law
from op_tests.harness.trees import depths_of, trees_of
from op_tests.ops.verify.cases import make_sampled as make
from op_tests.ops.verify.cases import padded, with_processors

PATH = "sampling.verify_tree_sampled"
MODULE = importlib.import_module("eagle_kernels.ops." + PATH)
LOGPROBS = ("logprobs", "raw_logprobs")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
SHAPES = [(2, 1, 1, 1), (3, 1, 4, 5), (2, 8, 1, 9), (4, 4, 3, 8), (2, 8, 5, 32)]
FILTERS = {"none": {}, "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02}}


@pytest.fixture(params=["levels", "all_rows"])
def way(request, monkeypatch):
    """How rows are scanned, whatever shapes say; penalties and log-probabilities always go level by level."""
    force(monkeypatch, request.param)
    return request.param


def force(monkeypatch, way: str) -> None:
    monkeypatch.setattr(MODULE, "draws_all_rows", lambda *_: way == "all_rows")


def ahead_of_time_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield str(dtype), make(2, 8, 5, 64, dtype=dtype)
    yield "filters", make(2, 8, 5, 64, dtype=torch.bfloat16, **FILTERS["all"])
    # large enough for the other way of scanning; nobody reads these logits
    large = {"target_logits": torch.empty(64 * 64, 32000, dtype=torch.bfloat16)}
    yield "levels", make(64, 8, 5, 64) | large
    yield "levels with log-probabilities", make(64, 8, 5, 64) | large | {"return_logprobs": True}
    yield "levels with filters", make(64, 8, 5, 64, **FILTERS["all"]) | large
    everything = with_processors(make(2, 8, 5, 64, dtype=torch.bfloat16, **FILTERS["all"]))
    everything["seq_lens"], everything["is_live"] = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    yield "everything", everything | {"filter_order": "joint", "return_logprobs": True}


def order_case():
    """Trees that are walked level by level, rows of three slices: each learns what others have found before it."""
    return make(9, 63, 1, 64, vocab_size=9000)


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 3, 8))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, filters, device, monkeypatch):
    few_rows = shape[0] * shape[3] < 20  # the interpreter takes its time for each
    force(monkeypatch, "all_rows" if few_rows and (SHAPES.index(shape) + (filters == "all")) % 2 == 0 else "levels")
    values = make(*shape, device=device, **FILTERS[filters])
    output, _ = check_operation(PATH, values, case=f"{shape} {filters}")
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


@pytest.mark.cross
@pytest.mark.parametrize("filters", FILTERS)
def test_both_ways_of_scanning_give_the_same(filters, device, monkeypatch):
    values = with_processors(make(2, 2, 2, 4, device=device, **FILTERS[filters]), penalties=False)
    values["seq_lens"] = torch.tensor([5, 6], device=device)
    results = []
    for way in ("levels", "all_rows"):
        force(monkeypatch, way)
        results.append(eagle_kernels.raw.verify_tree_sampled(**values))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))
    assert results[0].accept_token_num.sum() > 0


@pytest.mark.slow
def test_slices_that_learn_of_each_other_draw_the_same(device, monkeypatch):
    """Rows of two slices below the root: what one slice has found ends the other early, which changes no token.

    Logits spread so widely that slices look at groups of tokens more than once, in rows that all are visited.
    """
    force(monkeypatch, "levels")
    values = make(16, 1, 1, 2, vocab_size=8000, device=device)
    values["target_logits"] = 3 * torch.randn(32, 8000, device=device)
    values["temperature"][:] = 1.0
    seeds, temperature = values["seeds"].repeat_interleave(2), values["temperature"].repeat_interleave(2)
    tokens = eagle_kernels.raw.sample_from_logits(values["target_logits"], values["positions"] + 1, seeds, temperature)
    values["candidates"][:, 1] = tokens.view(16, 2)[:, 0]
    output = eagle_kernels.raw.verify_tree_sampled(**values)
    assert (output.accept_token_num == 1).all()
    assert torch.equal(output.predicts, tokens.int())


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_what_plain_sampling_draws(filters, device, monkeypatch):
    """The op-level promise: every visited node's token is sample_from_logits' token for that row, seed and position."""
    force(monkeypatch, "levels" if filters == "all" else "all_rows")
    values = with_processors(make(2, 4, 3, 8, device=device, **FILTERS[filters]), penalties=False)
    output = eagle_kernels.raw.verify_tree_sampled(**values)
    names = [name for name in ("seeds", "temperature", "top_k", "top_p", "min_p", "logit_bias") if name in values]
    visited = (output.predicts >= 0).nonzero().flatten()
    per_node = {name: values[name].repeat_interleave(8, dim=0)[visited] for name in names}
    logits, bitmask = (values[name][visited] for name in ("target_logits", "token_bitmask"))
    positions = values["positions"][visited] + 1
    plain = eagle_kernels.raw.sample_from_logits(logits, positions, **per_node, token_bitmask=bitmask)
    assert len(visited) == (output.accept_token_num + 1).sum() > 2
    assert torch.equal(output.predicts[visited].long(), plain)


def check_everything(values: dict, case: str):
    """Every output against the reference: tokens and links exactly, log-probabilities as floats."""
    device, batch_size = values["candidates"].device, len(values["seeds"])
    values = values | {"return_logprobs": True, "seq_lens": torch.arange(batch_size, device=device) * 7}
    output, _ = check_operation(PATH, values, case=case, close=LOGPROBS)
    assert output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"
    return output


@pytest.mark.parametrize("num_kept", [1, 3])
@pytest.mark.parametrize("vocab_size", [61, 2500])
def test_penalties_have_the_same_bits_in_every_kernel(vocab_size, num_kept, device):
    """Numbers off any grid, whose products round: were they fused with what follows in one kernel alone, a row's
    largest logit would not reach the edge that another kernel found."""
    batch_size = 2 if device.type == "cpu" else 512
    values = make(batch_size, 1, 0, 1, vocab_size=vocab_size, device=device, top_k=num_kept)
    random = torch.Generator(device).manual_seed(0)
    shape = (batch_size, vocab_size)
    values |= {
        "target_logits": torch.randn(shape, generator=random, device=device),
        "temperature": torch.full((batch_size,), 0.7, device=device),
        "repetition_penalty": torch.full((batch_size,), 1.3, device=device),
        "frequency_penalty": torch.full((batch_size,), 0.3, device=device),
        "presence_penalty": torch.full((batch_size,), 0.1, device=device),
        "output_counts": torch.randint(12, shape, generator=random, device=device, dtype=torch.int32),
    }
    drawn = eagle_kernels.verify_tree_sampled(**values).predicts.to(torch.int64)
    processors = reference_sampling.Processors(**{name: values[name] for name in (*PENALTIES, "output_counts")})
    logits = reference_sampling.processed_logits(values["target_logits"], processors)
    edge = logits.topk(num_kept).values[:, -1]
    assert drawn.max() < vocab_size
    assert (logits.gather(1, drawn[:, None])[:, 0] >= edge - 1e-5).all()


@pytest.mark.cross
@pytest.mark.parametrize("filters", FILTERS)
def test_padded_vocabulary(filters, way, device):
    values = make(1, 2, 2, 5, device=device, **FILTERS[filters])
    output = eagle_kernels.raw.verify_tree_sampled(**values)
    of_padded = eagle_kernels.raw.verify_tree_sampled(**values | {"target_logits": padded(values["target_logits"])})
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(of_padded, output))


@pytest.mark.parametrize(
    ("penalties", "emitted"),
    [
        ({}, [3, 3, 3]),
        ({"presence_penalty": 1.0}, [3, 4]),
        ({"frequency_penalty": 0.375}, [3, 3, 4]),
        ({"repetition_penalty": 2.0}, [3, 4]),
        # the root counts as output through output_counts, not as a draft
        ({"frequency_penalty": 0.375, "output_counts": {3: 1}}, [3, 4]),
        ({"frequency_penalty": 0.375, "output_counts": {4: 2}}, [3, 3, 3]),
        ({"repetition_penalty": 2.0, "prompt_mask": 1 << 4}, [3, 3, 3]),
    ],
    ids=str,
)
def test_penalties_count_the_drafts_on_the_path(penalties, emitted, device):
    """A target that repeats token 3 by a margin of 1/2, and a chain of drafts that repeats it as well."""
    values = trees_of([-1, 0, 1], [[5, 3, 3]]) | {
        "target_logits": torch.tensor([[-1.0, -1.0, -1.0, 4.0, 3.5, -1.0, -1.0, -1.0]]).repeat(3, 1),
        "positions": torch.tensor([8, 9, 10]),
        "seeds": torch.tensor([1]),
        "temperature": torch.zeros(1),
    }
    for name, value in penalties.items():
        if name == "output_counts":
            ((token, count),) = value.items()
            values[name] = torch.zeros(1, 8, dtype=torch.int32)
            values[name][0, token] = count
        else:
            values[name] = torch.tensor([[value]]).int() if name == "prompt_mask" else torch.tensor([value])
    values = to_device(values, device) | {"spec_steps": 2, "seq_lens": torch.tensor([8], device=device)}
    output, _ = check_operation(PATH, values, case=str(penalties))
    assert output.tokens[0, : len(emitted)].tolist() == emitted and output.accept_lengths.tolist() == [len(emitted)]


@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_filter_order(order, device, way):
    """Of 0.35, 0.25, 0.2, 0.05, ... k = 4 and p = 0.82 keep token 3 jointly alone; with seeds that then draw it."""
    probs = torch.tensor([0.35, 0.25, 0.2, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03])
    filters = reference_sampling.Filters(*(torch.full((400,), value) for value in (4, 0.82, 0.0)), "joint")
    drawn = reference_sampling.draw_tokens(
        probs.log().repeat(400, 1), torch.full((400,), 8), torch.arange(400), torch.ones(400), filters
    )
    seeds = (drawn == 3).nonzero().flatten()[:3]
    values = make(3, 1, 1, 1, vocab_size=9, device=device, top_k=4, top_p=0.82)
    values |= {"target_logits": probs.log().repeat(3, 1).to(device), "seeds": seeds.to(device)}
    values["temperature"].fill_(1.0)
    values["positions"].fill_(7)
    output, _ = check_operation(PATH, values | {"filter_order": order}, case=order)
    assert ((output.predicts == 3) == (order == "joint")).all()


@pytest.mark.cross
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_log_probabilities_of_flat_rows(order, device):
    """Of thousands of tokens that the filters keep, all are summed; those drawn are the same without the sums."""
    values = make(4, 1, 1, 1, vocab_size=2500, device=device, top_k=2500, top_p=0.6, min_p=0.0)
    values["target_logits"] = 0.3 * torch.randn(4, 2500, generator=torch.Generator().manual_seed(0)).to(device)
    values["top_k"] = torch.tensor([0, 900, 1500, 2000], device=device)
    values["min_p"] = torch.tensor([0.0, 0.0, 0.0, 0.4], device=device)
    values["temperature"].fill_(1.0)
    values["filter_order"] = order
    output, _ = check_operation(PATH, values | {"return_logprobs": True}, case=order, close=LOGPROBS)
    assert (output.logprobs > output.raw_logprobs + 0.3)[:, 0].all()
    assert torch.equal(output.predicts, eagle_kernels.raw.verify_tree_sampled(**values).predicts)


def test_log_probabilities(device):
    """Of a greedy row both are the model's own; past the path there is nothing; no filter makes a token less likely."""
    values = make(4, 4, 3, 8, device=device, **FILTERS["all"])
    values["temperature"] = torch.tensor([0.0, 1.0, 0.0, 1.0], device=device)
    output = check_everything(values, "log-probabilities")
    past = torch.arange(4, device=device) > output.accept_token_num[:, None]
    assert torch.equal(output.logprobs == float("-inf"), past)
    assert torch.equal(output.raw_logprobs == float("-inf"), past)
    assert past.any() and not past.all()
    assert torch.equal(output.logprobs[::2], output.raw_logprobs[::2])
    assert (output.logprobs >= output.raw_logprobs - 1e-6)[1::2].all()
    without = eagle_kernels.raw.verify_tree_sampled(**values)
    assert without.logprobs.numel() == without.new_seq_lens.numel() == 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(without[:3], output))


@pytest.mark.cross
@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
def test_joint_law_of_the_emitted_tokens(filters, device):
    """A target over four tokens that remembers one token; a tree of two levels; chi-square on what three draws emit.

    The emitted text is completed to three tokens by plain sampling with the same seed, so every outcome has a known
    probability whatever the tree accepted.
    """
    lanes, vocab_size = 20_000 if device.type == "cuda" else 4_000, 4
    table = torch.tensor([[0.0, 1.0, 0.5, -1.0], [1.0, 0.0, 2.0, 0.0], [0.5, 0.5, -1.0, 1.0], [2.0, 0.0, 0.0, 1.0]])
    tokens, parents = [0, 1, 2, 2, 0], [-1, 0, 0, 1, 1]
    parameters = {
        name: torch.full((lanes,), value, device=device, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in {"temperature": 0.9, **filters}.items()
    }
    seeds, links = torch.arange(lanes, device=device), to_device(trees_of(parents, [tokens] * lanes), device)
    output = eagle_kernels.verify_tree_sampled(
        **links, target_logits=table[tokens].repeat(lanes, 1).to(device),
        positions=(10 + torch.tensor(depths_of(parents), device=device)).repeat(lanes),
        seeds=seeds, spec_steps=2, **parameters,
    )  # fmt: skip
    text = torch.full((lanes, 3), -1, dtype=torch.int64, device=device)
    count = output.accept_token_num.long() + 1
    for index in range(3):
        node = output.accept_index[:, index].clamp(min=0).long()
        text[:, index] = torch.where(index < count, output.predicts[node].long(), -1)
    for index in (1, 2):
        plain = eagle_kernels.sample_from_logits(
            table.to(device)[text[:, index - 1]], torch.full((lanes,), 11 + index, device=device), seeds, **parameters
        )
        known = index < count
        assert torch.equal(text[known, index], plain[known]), "equal logits gave another token inside a tree"
        text[:, index] = torch.where(known, text[:, index], plain)

    one = {name: value[:1].repeat(vocab_size).cpu() for name, value in parameters.items()}
    scaled = reference_sampling.scaled_logits(table, one.pop("temperature"))
    kept = reference_sampling.filtered_logits(scaled, *(one.get(name) for name in ("top_k", "top_p", "min_p")))
    step = torch.softmax(kept.double(), dim=-1)
    law = step[0][:, None, None] * step[:, :, None] * step[None]  # [first, second, third]
    outcome = (text[:, 0] * vocab_size + text[:, 1]) * vocab_size + text[:, 2]
    assert_follows_law(outcome.cpu(), law.flatten())


def test_the_front_door_has_a_reference(device):
    """One signature but for `out`, and one result for each way in."""
    given, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values() if p.name != "out"]
        for function in (eagle_kernels.verify_tree, eagle_kernels.verify_tree.reference)
    )
    assert given == theirs
    values = make(3, 4, 3, 8, device=device, **FILTERS["all"])
    greedy = {key: value for key, value in values.items() if key not in ("seeds", "temperature", *FILTERS["all"])}
    simulated = greedy | {"seeds": values["seeds"], "accept_policy": "simulate"}
    simulated["simulated_rates"] = torch.tensor([0.7, 0.5, 0.3], device=device)
    for way in (values, greedy, simulated, values | {"accept_policy": "accept_all"}):
        got, want = eagle_kernels.verify_tree(**way), eagle_kernels.verify_tree.reference(**way)
        assert got._fields == want._fields
        assert all(torch.equal(a, b.to(a.device)) for a, b in zip(got, want))


def calls_behind(door, monkeypatch) -> list[tuple[str, dict]]:
    """The calls of the two ops behind the front door, or behind its reference, from now on."""
    calls, scope = [], inspect.unwrap(door).__globals__

    def note(op, *args, **kwargs):
        bound = inspect.signature(getattr(eagle_kernels, op)).bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append((op, bound.arguments))
        return (None,) * 3

    for op in ("verify_tree_greedy", "verify_tree_sampled"):
        monkeypatch.setitem(scope.get("_OPS", scope), op, functools.partial(note, op))
    return calls


def names(function) -> set[str]:
    return {*inspect.signature(function).parameters}


ASKS = sorted((names(eagle_kernels.verify_tree) - names(eagle_kernels.verify_tree_greedy)) | {"seeds"})
NEEDED = ("target_logits", "positions", "seeds", "temperature")


@pytest.mark.parametrize("policy", ["normal", "accept_all", "simulate"])
def test_every_sampling_parameter_alone_asks_for_sampling(policy, monkeypatch):
    """What sampling lacks then is named, all of it; seeds ask for nothing where they are those of a simulation."""
    assert ASKS == ["min_p", "seeds", "temperature", "top_k", "top_p"]
    values = make(3, 4, 3, 8, **FILTERS["all"]) | {"accept_policy": policy}
    bare = {name: value for name, value in values.items() if name not in (*ASKS, *NEEDED)}
    calls = calls_behind(eagle_kernels.verify_tree.reference, monkeypatch)
    for name in ASKS:
        asks = name != "seeds" or policy != "simulate"
        eagle_kernels.verify_tree.reference(**bare, **{name: values[name]})
        assert calls.pop()[0] == ("verify_tree_sampled" if asks else "verify_tree_greedy"), name
        if asks:
            missing = ", ".join(other for other in NEEDED if other != name)
            with pytest.raises(ValueError, match=f"verify_tree: {missing} must also be given for sampling, got None"):
                eagle_kernels.verify_tree(**bare, **{name: values[name]})


@pytest.mark.parametrize("policy", ["normal", "simulate"])
@pytest.mark.parametrize("door", [eagle_kernels.verify_tree, eagle_kernels.verify_tree.reference], ids=["op", "ref"])
def test_the_ops_behind_the_front_door_get_all_that_is_theirs(door, policy, monkeypatch):
    values = make(3, 4, 3, 8, **FILTERS["all"]) | {"accept_policy": policy, "simulated_rates": torch.rand(3)}
    of_greedy = {name: None if name in ASKS else value for name, value in values.items()}
    of_greedy |= {"target_predict": torch.zeros(3, 8, dtype=torch.int64)}
    of_greedy["seeds"] = values["seeds"] if policy == "simulate" else None
    calls = calls_behind(door, monkeypatch)
    for op, given in (("verify_tree_sampled", values), ("verify_tree_greedy", of_greedy)):
        door(**given)
        called, arguments = calls.pop()
        theirs = names(door) & names(getattr(eagle_kernels, op)) - {"out"}
        theirs -= {"positions"} if op == "verify_tree_greedy" and policy == "normal" else set()  # nothing is drawn
        assert called == op and [name for name in theirs if arguments[name] is not given.get(name)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS)
def test_large_vocabulary(filters, device):
    values = make(8, 8, 5, 64, vocab_size=32000, device=device, dtype=torch.bfloat16, **FILTERS[filters])
    output, _ = check_operation(PATH, values, case=filters)
    assert output.accept_token_num.sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS)
def test_more_elements_than_int32_counts(filters, device):
    """B = 256, N = 64, V = 262,144: 2^32 logits. Some requests, the last among them, equal the reference, and all equal
    what they are in batches of 64."""
    batch_size, num_nodes, vocab_size = 256, 64, 262_144
    values = make(batch_size, 8, 5, num_nodes, vocab_size=64, device=device, **FILTERS[filters])
    # the logits that lead down the trees, spread over the vocabulary, above noise of their own
    few = values["target_logits"].to(torch.bfloat16)
    stride = vocab_size // 64
    logits = torch.empty(batch_size * num_nodes, vocab_size, dtype=torch.bfloat16, device=device)
    for rows in logits.split(1024):
        rows.normal_(-2.0)
    logits[:, 5::stride] = few + 6
    values["target_logits"], values["candidates"] = logits, values["candidates"] * stride + 5
    whole = eagle_kernels.raw.verify_tree_sampled(**values)
    assert whole.accept_token_num.float().mean() > 1
    per_request = {name: len(tensor) // batch_size for name, tensor in values.items() if torch.is_tensor(tensor)}

    def part(first, last):
        cut = {name: values[name][first * size : last * size] for name, size in per_request.items()}
        return {**values, **cut, "retrieve_index": values["retrieve_index"][: last - first]}

    for first in range(0, batch_size, 64):
        alone = eagle_kernels.raw.verify_tree_sampled(**part(first, first + 64))
        assert torch.equal(alone.accept_token_num, whole.accept_token_num[first : first + 64])
        assert torch.equal(alone.predicts, whole.predicts[first * num_nodes : (first + 64) * num_nodes])
    for request in (0, 127, 128, 255):
        check_operation(PATH, part(request, request + 1), case=f"{filters} {request}")
        alone = eagle_kernels.raw.verify_tree_sampled(**part(request, request + 1))
        assert torch.equal(alone.predicts, whole.predicts[request * num_nodes : (request + 1) * num_nodes])
