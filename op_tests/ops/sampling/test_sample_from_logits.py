"""sample_from_logits: the reference's tokens, exact filters, the right law, and noise that its key alone sets.

Penalties, bias and grammar are checked on dyadic values, where arithmetic is exact, and against Hugging Face's classes.
"""

import math

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.sampling.shared import sampling
from eagle_kernels.reference import random as reference_random
from eagle_kernels.reference import sampling as reference_sampling
from op_tests.harness import sweep, to_device
from op_tests.harness.statistics import assert_follows_law
from op_tests.ops.verify.cases import make_logits as make
from op_tests.ops.verify.cases import padded

FILTERS = {"none": {}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1},
           "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05}}  # fmt: skip
PROCESSORS = reference_sampling.Processors._fields
ORDERS = ("top_k_first", "joint")


def ahead_of_time_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield str(dtype), make(2, 64, dtype=dtype)
    yield "filters", make(2, 64, dtype=torch.bfloat16, **FILTERS["all"])
    yield "processors", with_processors(make(2, 64, dtype=torch.bfloat16, **FILTERS["all"])) | {"filter_order": "joint"}


def short_rows():
    values = make(2, 257, dtype=torch.float16)
    yield "", values | {"logits": padded(values["logits"])}


size_sweep = sweep(lambda num_rows: make(num_rows, 1000))


def with_processors(values: dict, names=PROCESSORS) -> dict:
    """The same rows with these processors, all numbers on a coarse dyadic grid."""
    num_rows, vocab_size = values["logits"].shape
    row, num_words = torch.arange(num_rows), -(-vocab_size // 32)
    words = torch.randint(-(2**31), 2**31, (2, num_rows, num_words), dtype=torch.int64).to(torch.int32)
    counts = torch.randint(0, 4, (num_rows, vocab_size)) * (torch.rand(num_rows, vocab_size) < 0.3)
    made = {
        "repetition_penalty": torch.tensor([2.0, 1.0, 1.25, 0.5])[row % 4],
        "frequency_penalty": torch.tensor([0.25, 0.0, -0.5])[row % 3],
        "presence_penalty": torch.tensor([1.0, 0.5, 0.0, -0.25, 2.0])[row % 5],
        "prompt_mask": words[0],
        "output_counts": counts.to(torch.int32),
        "logit_bias": torch.randint(-8, 9, (num_rows, vocab_size)) / 4.0,
        "token_bitmask": words[1],
    }
    made["logit_bias"][:, vocab_size // 2] = float("-inf")
    device = values["logits"].device
    logits = torch.randint(-32, 33, values["logits"].shape).to(values["logits"]) / 4.0
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0], device=device)[row % 4]
    made = {name: made[name].to(device) for name in names}
    return values | {"logits": logits, "temperature": temperature} | made


def kept_of(values: dict) -> torch.Tensor:
    """What the reference draws from, -inf where a token cannot be drawn."""
    filters = (values.get(name) for name in ("top_k", "top_p", "min_p"))
    filters = reference_sampling.Filters(*filters, values.get("filter_order", "top_k_first"))
    processors = reference_sampling.Processors(**{name: values[name] for name in PROCESSORS if name in values})
    return reference_sampling.kept_logits(values["logits"], values["temperature"], filters, processors)


def rows_of(values: dict, index) -> dict:
    return {key: value[index] if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def check(values: dict, actual: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the kernel's tokens, equal to the reference's, except in rows whose two best keys differ by < 8 ulp.

    These are counted and must be rare.
    """
    actual = eagle_kernels.raw.sample_from_logits(**values) if actual is None else actual
    expected = eagle_kernels.reference.ops.sampling.sample_from_logits.sample_from_logits(**values)
    different = (actual != expected).nonzero().flatten().tolist()
    if not different:
        return actual
    row = rows_of(values, different)
    kept = kept_of(row)
    noise, _ = reference_random.grouped_gumbel(row["seeds"], row["positions"], kept.shape[1])
    keys = torch.where((row["temperature"] > 0)[:, None], kept + noise, kept)
    gap = (keys.max(1).values - keys.gather(1, actual[different][:, None])[:, 0]).abs()
    ulp = torch.finfo(torch.float32).eps * keys.max(1).values.abs()
    print(f"{len(different)} of {len(actual)} rows are near-ties")
    found = f"got {actual[different]}, expected {expected[different]}, gap {gap}"
    assert (gap < 8 * ulp).all(), f"rows {different}: {found}"
    assert len(different) <= max(1, 1e-5 * len(actual))
    return actual


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [*((size, torch.float32) for size in (1, 4, 31, 257)), (257, torch.float16), (257, torch.bfloat16)],
    ids=str,
)
def test_matches_reference(vocab_size, dtype, filters, device):
    values = make(5, vocab_size, dtype=dtype, device=device, **FILTERS[filters])
    check(values)
    check(values | {"logits": padded(values["logits"])})


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_large_rows(filters, device):
    values = make(4096, 32000, dtype=torch.bfloat16, device=device, **FILTERS[filters])
    actual = eagle_kernels.raw.sample_from_logits(**values)
    for start in range(0, 4096, 512):
        part = {key: value[start : start + 512] for key, value in values.items()}
        check(part, actual[start : start + 512])


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3}),  # tokens 2 and 3 tie at the edge: both stay
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # renormalised after top-k: token 0 holds 2/3
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.51}, {0}),
        ({"top_k": 100, "top_p": 1.0, "min_p": 0.0}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_exactly(filters, kept, device):
    """Probabilities 1/2, 1/4, 1/8, 1/8: over many seeds exactly the kept tokens appear."""
    values = make(400, 4, device=device, temperature=1.0, **filters)
    values["logits"] = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device).log().expand(400, 4).contiguous()
    assert set(eagle_kernels.sample_from_logits(**values).tolist()) == kept
    check(rows_of(values, slice(0, 3)))


@pytest.mark.parametrize("filters", ["none", "all"])
def test_follows_the_law(filters, device):
    """chi-square against the filtered softmax: 20,000 draws (references on the CPU), one threshold for every test."""
    num_rows = 20_000
    logits = torch.tensor([1.0, 0.5, -0.5, 2.0, 0.0, -1.0, 1.5])
    values = make(num_rows, 7, device=device, temperature=0.8, **FILTERS[filters])
    values["logits"] = logits.to(device).expand(num_rows, 7).contiguous()
    values["seeds"] = torch.full((num_rows,), 11, device=device)
    values["positions"] = torch.arange(num_rows, device=device)
    one = {key: value[:1].cpu() for key, value in values.items()}
    scaled = reference_sampling.scaled_logits(one["logits"], one["temperature"])
    kept = reference_sampling.filtered_logits(scaled, *(one.get(name) for name in ("top_k", "top_p", "min_p")))
    drawn = eagle_kernels.sample_from_logits(**values)
    assert_follows_law(drawn.cpu(), torch.softmax(kept.double()[0], 0))


def test_noise_depends_on_its_key_alone(device):
    """Same seed and position, same logits: the same token in any row of any batch; another key, another draw."""
    values = make(6, 50, device=device, temperature=1.0)
    tokens = eagle_kernels.raw.sample_from_logits(**values)
    order = torch.tensor([5, 2, 0, 4, 1, 3], device=device)
    assert torch.equal(eagle_kernels.raw.sample_from_logits(**rows_of(values, order)), tokens[order])
    flat = {**values, "logits": torch.zeros(6, 50, device=device)}
    flat["seeds"] = torch.zeros(6, dtype=torch.int64, device=device)
    flat["positions"] = torch.arange(6, device=device)
    assert len(set(eagle_kernels.raw.sample_from_logits(**flat).tolist())) > 1
    flat["positions"], flat["seeds"] = torch.zeros_like(order), 2**32 * torch.arange(6, device=device)
    assert len(set(eagle_kernels.raw.sample_from_logits(**flat).tolist())) > 1


def test_penalties_are_those_of_hugging_face():
    processors = pytest.importorskip("transformers.generation.logits_process")
    values = make(3, 50, temperature=1.0)
    prompt, output = torch.randint(50, (3, 9)), torch.randint(50, (3, 6))
    for penalty in (1.3, 0.7):
        values |= {
            "repetition_penalty": torch.full((3,), penalty),
            "prompt_mask": pack_bits(torch.zeros(3, 50, dtype=torch.bool).scatter(1, prompt, True)),
            "output_counts": torch.zeros(3, 50).scatter_add(1, output, torch.ones(3, 6)).int(),
        }
        theirs = processors.RepetitionPenaltyLogitsProcessor(penalty)
        expected = theirs(torch.cat([prompt, output], dim=1), values["logits"].clone())
        torch.testing.assert_close(kept_of(values), expected)


@pytest.mark.parametrize("vocab_size", [40, 1000])
def test_filters_keep_what_those_of_hugging_face_keep(vocab_size, device):
    """Top-k, top-p and min-p alone and in Hugging Face's order, which is ours; jointly: each on all tokens."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    warpers = {
        "top_k": lambda scores: processors.TopKLogitsWarper(7)(None, scores),
        "top_p": lambda scores: processors.TopPLogitsWarper(0.77)(None, scores),
        "min_p": lambda scores: processors.MinPLogitsWarper(0.11)(None, scores),
    }
    parameters = {"top_k": 7, "top_p": 0.77, "min_p": 0.11}
    for names in (("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p"), ("top_p", "min_p"), tuple(warpers)):
        values = make(20, vocab_size, temperature=0.7, **{name: parameters[name] for name in names})
        scores = values["logits"] / 0.7
        in_order, jointly = scores, torch.ones_like(scores, dtype=torch.bool)
        for name in names:
            in_order = warpers[name](in_order)
            jointly &= warpers[name](scores) > float("-inf")
        assert torch.equal(kept_of(values) > float("-inf"), in_order > float("-inf"))
        assert torch.equal(kept_of(values | {"filter_order": "joint"}) > float("-inf"), jointly)
    for order in ORDERS:
        check(to_device(rows_of(values, slice(0, 4)), device) | {"filter_order": order})


@pytest.mark.parametrize(("order", "num_kept"), [("top_k_first", 3), ("joint", 4)])
def test_filter_order(order, num_kept, device):
    """Of 0.35, 0.25, 0.2, 0.05, ... k = 4 and p = 0.82 keep four tokens, but three once top-k has renormalised them."""
    values = make(600, 9, device=device, temperature=1.0, top_k=4, top_p=0.82) | {"filter_order": order}
    probs = torch.tensor([0.35, 0.25, 0.2, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03], device=device)
    values["logits"] = probs.log().repeat(600, 1)
    drawn = eagle_kernels.sample_from_logits(**values)
    assert set(drawn.tolist()) == set(range(num_kept))
    # the kernel on rows that tell the two orders apart, and on others
    some = torch.cat([(drawn == num_kept - 1).nonzero().flatten()[:4], torch.arange(4, device=device)])
    check(rows_of(values, some))


def filter_rows(vocab_size: int) -> list[tuple]:
    """What each path of the filters has to get right: (logits, top_k, top_p, min_p, temperature) of one row each."""
    infinity, nan = float("inf"), float("nan")
    normal = 3.0 * torch.randn(vocab_size)
    few = torch.full((vocab_size,), -infinity)
    few[[3, 1200, vocab_size - 1]] = torch.tensor([1.0, 2.0, 1.5])
    coarse = torch.randint(0, 4, (vocab_size,)) / 2.0
    half = torch.where(torch.arange(vocab_size) % 2 == 0, nan, normal)
    top = normal.clone()
    top[[5, 1500, vocab_size - 2]] = infinity
    next_to_nan = normal.clone()
    next_to_nan[[7, 1030]], next_to_nan[[6, 1031]] = 40.0, nan
    rows = [(normal, k, 1.0, 0.0, 1.0) for k in (1, 50, 128, 129, 200, vocab_size - 1)]
    rows += [(normal, k, 0.7, 0.01, 1.5) for k in (128, 129)]
    # more than 256 tokens tie with the edge
    rows += [(coarse, 50, 1.0, 0.0, 1.0), (coarse, 128, 0.3, 0.0, 0.5), (coarse, 0, 0.4, 0.0, 1.0)]
    rows += [(coarse, vocab_size - 1, 0.9, 0.0, 1.0), (coarse, 0, 1.0, 0.5, 1.0), (0.0 * normal, 3, 0.5, 1.0, 1.0)]
    # a nucleus of thousands; next to nothing removed
    rows += [(0.01 * normal, 0, 0.9, 0.0, 1.0), (0.01 * normal, 1500, 0.9, 0.0, 1.0), (normal, 0, 1.0, 1e-6, 1.0)]
    rows += [(normal, 0, 0.9, 1e-6, 2.0), (normal, 0, 0.0, 0.0, 1.0), (normal, 0, 1.0, 2.0, 1.0)]
    rows += [(few, 50, 0.9, 0.0, 1.0), (few, 0, 0.9, 0.0, 1.0), (few, 200, 1.0, 0.0, 1.0), (few, 2, 1.0, 0.0, 1.0)]
    rows += [(normal * 0 + value, 5, 0.9, 0.1, 1.0) for value in (-infinity, infinity, nan)]
    rows += [(half, 50, 0.9, 0.0, 1.0), (half, 0, 1.0, 0.0, 1.0), (top, 2, 1.0, 0.0, 1.0), (top, 0, 0.5, 0.0, 1.0)]
    rows += [(next_to_nan, 0, 0.5, 0.0, 1.0), (next_to_nan, 0, 1.0, 0.0, 1.0), (next_to_nan, 1, 1.0, 0.0, 0.0)]
    # an infinite temperature makes all tokens alike, but those of +inf
    rows += [(torch.where(torch.arange(vocab_size) % 64 == 0, infinity, normal), 2000, 0.99, 0.0, infinity)] * 2
    rows += [(top, 0, 1.0, 0.0, infinity), (normal, 0, 0.5, 0.0, infinity)] * 2
    # fewer tokens than top-k asks for
    rows += [(torch.where(torch.arange(vocab_size) % 4 == 1, 0.01 * normal, -infinity), 1500, 0.1, 0.0, 1.0)] * 4
    return rows


@pytest.mark.cross
@pytest.mark.parametrize(("vocab_size", "order"), [(2500, "top_k_first"), (2500, "joint"), (4097, "joint")])
def test_filters_of_long_rows(vocab_size, order, device):
    rows = filter_rows(vocab_size)
    if device.type == "cpu":  # every row once, which takes the interpreter long enough
        rows = rows[2:9:3] if vocab_size != 2500 else rows[ORDERS.index(order) :: 2]
    logits, top_k, top_p, min_p, temperature = zip(*rows)
    values = make(len(rows), vocab_size, device=device) | {"filter_order": order}
    values |= {"logits": torch.stack(logits).to(device), "top_k": torch.tensor(top_k, device=device)}
    for name, numbers in (("top_p", top_p), ("min_p", min_p), ("temperature", temperature)):
        values[name] = torch.tensor(numbers, device=device)
    check(values)


@pytest.mark.parametrize(
    ("name", "num_kept", "vocab_size"),
    [
        *(("top_k", num_kept, 1100) for num_kept in (50, 128, 129)),
        *((name, num_kept, 1100) for name in ("top_p", "min_p") for num_kept in (40, 600)),
        ("top_p", 90_000, 151_936),
    ],
)
def test_edges_are_exact(name, num_kept, vocab_size, device):
    """A row so flat that noise decides: its winner is drawn as the last token that is kept, not as the one after it.

    One of a pair of rows has it at the edge, the other one behind; both small and large numbers of tokens are kept.
    """
    positions, seeds = torch.arange(40), torch.zeros(40, dtype=torch.int64)
    noise, _ = reference_random.grouped_gumbel(seeds, positions, vocab_size)
    first, second = noise.topk(2, dim=1).values.T
    position = int((first - second > 0.5).nonzero()[0])
    winner = int(noise[position].argmax())
    by_rank = -0.11 / vocab_size * torch.arange(vocab_size)
    weights = by_rank.double().exp()
    mass = weights.cumsum(0) / weights.sum()
    value = {
        "top_k": num_kept,
        "top_p": float(mass[num_kept - 2 : num_kept].mean()),
        "min_p": float(weights[num_kept - 1 : num_kept + 1].mean()),
    }[name]
    values = make(2, vocab_size, temperature=1.0, **{name: value})
    values |= {"positions": torch.tensor([position] * 2), "seeds": torch.zeros(2, dtype=torch.int64)}
    others = torch.randperm(vocab_size)
    others = others[others != winner]
    for row, place in enumerate((num_kept - 1, num_kept)):
        values["logits"][row, torch.cat([others[:place], torch.tensor([winner]), others[place:]])] = by_rank
    tokens = check(to_device(values, device))
    assert (tokens == winner).tolist() == [True, False]


@pytest.mark.parametrize("slope", [0.02, 0.09])
def test_the_tail_of_a_nucleus_is_drawn(slope, device):
    """Its least likely tokens, far behind the others, and not the ones behind them; whatever was gathered first.

    Of each top_p a row whose winner is as far back as any, and one that a token just behind the nucleus would win.
    """
    positions = torch.arange(3000)
    noise, _ = reference_random.grouped_gumbel(torch.zeros_like(positions), positions, 1100)
    ranked = torch.randperm(1100)
    row = torch.empty(1100).index_copy(0, ranked, -slope * torch.arange(1100))
    mass = torch.softmax(row.double(), 0)[ranked].cumsum(0)
    keys = (row + noise)[:, ranked]  # by rank
    cases = []
    for top_p in (0.5, 0.9, 0.99, 0.999, 0.9999):
        size = 1 + int((mass < top_p).sum())
        winner, beyond = keys[:, :size].argmax(1), keys.argmax(1)
        behind = torch.where(beyond >= size, beyond, 2000)
        cases += [(top_p, position, ranked[winner[position]]) for position in (winner.argmax(), behind.argmin())]
    top_p, position, expected = zip(*cases)
    values = make(len(cases), 1100, temperature=1.0)
    values |= {"logits": row.repeat(len(cases), 1), "top_p": torch.tensor(top_p)}
    values |= {"positions": torch.stack(position), "seeds": torch.zeros(len(cases), dtype=torch.int64)}
    values = to_device(values, device)
    for ops in (eagle_kernels.raw, eagle_kernels):
        assert ops.sample_from_logits(**values).tolist() == torch.stack(expected).tolist()


# of four levels, each half as likely as the one before and of twice as many tokens: a quarter of the mass on each.
# top_k (in tokens of the first level), top_p, min_p, order, and how many levels stay
ABOVE = 1.0 + 2.0**-23
LEVELS = [
    *((0, 0.25 * number, 0.0, "joint", number) for number in (1, 2, 3)),
    *((0, 0.25 * number * ABOVE, 0.0, "joint", number + 1) for number in (1, 2, 3)),
    (1, 1.0, 0.0, "joint", 1), (1.01, 1.0, 0.0, "joint", 2), (3, 1.0, 0.0, "joint", 2), (3.01, 1.0, 0.0, "joint", 3),
    (0, 1.0, 0.5, "joint", 2), (0, 1.0, 0.5 * ABOVE, "joint", 1), (0, 1.0, 0.125, "joint", 4),
    (3, 0.25, 0.0, "joint", 1), (3, 0.25 * ABOVE, 0.0, "joint", 2), (3, 0.5 * ABOVE, 0.0, "joint", 2),
    (3, 0.5, 0.0, "top_k_first", 1), (3, 0.5 * ABOVE, 0.0, "top_k_first", 2),
    (0, 0.75, 0.25 * ABOVE, "joint", 2), (0, 0.5, 0.25, "joint", 2),
]  # fmt: skip


@pytest.mark.parametrize("num_first", [8, 150])
def test_levels_on_the_edge_stay_or_go_as_a_whole(num_first, device):
    """Mass that is just enough is enough, on a grid where it is exact; gathered and searched for.

    Of each case a row whose winner would be another one with a level more, and with a level less.
    """
    if device.type == "cuda":
        pytest.skip("exp is no exact power of two there")
    level = torch.arange(4).repeat_interleave(num_first * 2 ** torch.arange(4))
    level = level[torch.randperm(len(level))]
    row = -level * math.log(2)
    positions = torch.arange(200)
    noise, _ = reference_random.grouped_gumbel(torch.zeros_like(positions), positions, len(row))
    winners = torch.stack([torch.where(level < kept, row, -float("inf")).add(noise).argmax(1) for kept in range(1, 5)])
    for order in ORDERS:
        cases = [case for case in LEVELS if case[3] == order]
        found = []
        for *_, kept in cases:
            others = winners[[other - 1 for other in (kept - 1, kept + 1) if 1 <= other <= 4]]
            found.append(int((others != winners[kept - 1]).all(0).nonzero()[0]))
        values = make(len(cases), len(row), device=device, temperature=1.0) | {"filter_order": order}
        values |= {"logits": row.repeat(len(cases), 1), "positions": torch.tensor(found)}
        values |= {"seeds": torch.zeros(len(cases), dtype=torch.int64)}
        top_k, top_p, min_p, _, kept = zip(*cases)
        values |= {"top_k": (num_first * torch.tensor(top_k)).ceil().int(), "top_p": torch.tensor(top_p)}
        values |= {"min_p": torch.tensor(min_p)}
        expected = [int(winners[number - 1, position]) for number, position in zip(kept, found)]
        for ops in (eagle_kernels.raw, eagle_kernels):
            drawn = ops.sample_from_logits(**values).tolist()
            assert drawn == expected, [case for case, *tokens in zip(cases, drawn, expected) if len(set(tokens)) > 1]


@pytest.mark.parametrize("vocab_size", [20_000, 151_936])
def test_flat_rows_of_a_large_vocabulary(vocab_size, device):
    """Rows whose winners lie anywhere, or near the end, of nuclei of nearly all tokens, of half and of few.

    Such a winner is found by bounds, more than one tile of them, and what lies above it is weighed block by block.
    """
    is_slow = device.type == "cpu"
    # standard deviation, top_p, top_k, and what the last eighth of the tokens has more than all others
    kinds = [(0.01, 0.95, 0, 0.0), (0.01, 0.4, 0, 0.0), (1.5, 0.1, 0, 0.0), (0.01, 0.9, 0, 20.0)]
    if vocab_size == 20_000 or not is_slow:
        kinds += [(1.5, 0.95, 0, 0.0), (0.01, 0.1, 2_000, 0.0), (3.0, 0.999, 0, 0.0)]
    scales, top_p, top_k, lead = (torch.tensor(column).repeat(1 if is_slow else 40) for column in zip(*kinds))
    values = make(len(scales), vocab_size, device=device, temperature=0.8)
    is_last = torch.arange(vocab_size) >= vocab_size - vocab_size // 8
    logits = scales[:, None] * torch.randn(len(scales), vocab_size) + lead[:, None] * is_last
    values |= {"logits": logits.bfloat16().to(device), "top_p": top_p.to(device), "top_k": top_k.to(device)}
    values["min_p"] = torch.where(torch.arange(len(scales)) % 5 == 4, 1e-3, 0.0).to(device)
    for order in ORDERS:
        check(values | {"filter_order": order})


@pytest.mark.parametrize("num_large", [90, 300])
def test_gathering_and_searching_agree(num_large, device):
    """Tokens far above all others: whether they are gathered, searched for or not filtered at all does not show.

    Up to 256 equal tokens are gathered, for k up to 128. They all stay, even for k = 1, as they tie with the edge.
    """
    top_k = torch.tensor([1, 100, 129, 0, 0, 0], device=device)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 1.0], device=device)
    min_p = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.5, 0.0], device=device)
    values = make(6, 1100, device=device, temperature=1.0)
    values |= {name: values[name][:1].expand(6).contiguous() for name in ("seeds", "positions")}
    logits = torch.full((1100,), -200.0, device=device)
    logits[torch.randperm(1100)[:num_large].to(device)] = 1.0
    values |= {"logits": logits.repeat(6, 1), "top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens = check(values)
    assert len(set(tokens.tolist())) == 1 and logits[tokens[0]] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_of_any_length_give_the_same(dtype, device, monkeypatch):
    """Of one and of many tiles, of rows that are flat, steep, constant, far from 0, almost empty, full of NaN."""
    infinity, nan, vocab_size = float("inf"), float("nan"), 4200
    place, normal = torch.arange(vocab_size), torch.randn(vocab_size)
    few = torch.full((vocab_size,), -infinity)
    few[[700, 2100, vocab_size - 1]] = 3.0
    half = torch.where(place // 8 % 2 == 0, nan, normal)
    infinite = torch.where(place % 1000 == 77, infinity, normal)
    rows = [normal, 2 * normal, 10 * normal, 0 * normal, 30 * (place % 2500 == 1) + normal, 1e4 + normal]
    rows += [1e30 * normal, -3e38 * normal.abs(), few, half, infinite, few - infinity, normal.round()]
    values = make(2 * len(rows), vocab_size, device=device, temperature=1.0)
    values["logits"] = torch.stack(rows + rows).to(device, dtype)
    values["temperature"][len(rows) :] = 0.0
    tokens = []
    for num_chunks in (1, 2, 4):
        monkeypatch.setitem(sampling.SCAN_TUNING, "default", {"BLOCK_CHUNK": num_chunks, "num_warps": 1})
        wide = torch.zeros(len(values["logits"]), vocab_size + 16 * num_chunks, device=device, dtype=dtype)
        wide[:, :vocab_size] = values["logits"]  # a stride of its own: the launcher remembers how it launched others
        tokens.append(eagle_kernels.raw.sample_from_logits(**values | {"logits": wide[:, :vocab_size]}))
    assert all(torch.equal(other, tokens[0]) for other in tokens)
    check(values, tokens[0])


def test_noise_beside_nan_in_every_tile(device):
    """NaN in a tile neither wins nor hides the tile's other tokens."""
    values = make(4, 2100, device=device, temperature=1.0)
    values["logits"] *= 0.1
    values["logits"][:, 1029::97] = float("nan")
    values["logits"][1, :1024] = float("nan")
    values["logits"][2, 1024:2048] += 30.0
    values["logits"][3, 2048:] += 30.0
    check(values)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """int32 words of truth values [R, V]."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 32)).view(bits.shape[0], -1, 32).long()
    words = (padded << torch.arange(32)).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
