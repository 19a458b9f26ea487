"""sample_from_logits: the reference's tokens, exact filters, the right law, and noise that its key alone sets."""

from __future__ import annotations

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference import random as reference_random
from eagle_kernels.reference import sampling as reference_sampling
from op_tests.harness import assert_only_launches, check_registration
from op_tests.harness.statistics import assert_follows_law

PATH = "verify.sample_from_logits"
FILTERS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def make(num_rows, vocab_size, *, dtype=torch.float32, device="cpu", temperature=None, **filters):
    temperatures = torch.tensor([0.0, 0.5, 0.8, 1.0, 1.7])[torch.arange(num_rows) % 5]
    if temperature is not None:
        temperatures.fill_(temperature)
    values = {
        "logits": (3.0 * torch.randn(num_rows, vocab_size)).to(dtype),
        "positions": torch.randint(0, 2**31 - 1, (num_rows,)),
        "seeds": torch.randint(-(2**62), 2**62, (num_rows,)),
        "temperature": temperatures,
    }
    for name, value in filters.items():
        values[name] = torch.full((num_rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
    return {key: value.to(device) for key, value in values.items()}


def ahead_of_time_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield str(dtype), make(2, 64, dtype=dtype)
    yield "filters", make(2, 64, dtype=torch.bfloat16, **FILTERS["all"])


def size_sweep():
    for num_rows in (1, 2, 3, 16, 17, 64, 257):
        yield make(num_rows, 1000)


def assert_same_tokens(values: dict, actual: torch.Tensor) -> None:
    """Equal to the reference, except rows whose two best keys differ by < 8 ulp; these are counted and must be rare."""
    expected = eagle_kernels.reference.ops.verify.sample_from_logits.sample_from_logits(**values)
    different = (actual != expected).nonzero().flatten().tolist()
    if not different:
        return
    row = {key: value[different] for key, value in values.items()}
    scaled = reference_sampling.scaled_logits(row["logits"], row["temperature"])
    kept = reference_sampling.filtered_logits(scaled, *(row.get(name) for name in ("top_k", "top_p", "min_p")))
    keys = kept + reference_random.gumbel(row["seeds"], row["positions"], scaled.shape[1])
    gap = (keys.max(1).values - keys.gather(1, actual[different][:, None])[:, 0]).abs()
    ulp = torch.finfo(torch.float32).eps * keys.max(1).values.abs()
    print(f"{len(different)} of {len(actual)} rows are near-ties")
    found = f"got {actual[different]}, expected {expected[different]}, gap {gap}"
    assert (gap < 8 * ulp).all(), f"rows {different}: {found}"
    assert len(different) <= max(1, 1e-5 * len(actual))


def test_philox_known_answers():
    """Random123's vectors for philox4x32-10: counter and key of all zeros and all ones."""
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    words = [int(w) for w in reference_random.philox(torch.tensor([0]), [zero] * 4)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = [int(w) for w in reference_random.philox(torch.tensor([-1]), [ones] * 4)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 4, 31, 257])
def test_matches_reference(vocab_size, filters, device):
    values = make(5, vocab_size, device=device, **FILTERS[filters])
    assert_same_tokens(values, eagle_kernels.raw.sample_from_logits(**values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_logits(dtype, device):
    values = make(3, 300, dtype=dtype, device=device, **FILTERS["all"])
    assert_same_tokens(values, eagle_kernels.raw.sample_from_logits(**values))


def test_more_than_one_block_and_row_strides(device):
    values = make(3, 2100, device=device, **FILTERS["all"])
    wide = torch.full((3, 2500), 1e4, device=device)
    wide[:, :2100] = values["logits"]
    values["logits"] = wide[:, :2100]
    assert_same_tokens(values, eagle_kernels.raw.sample_from_logits(**values))


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_large_rows(filters, device):
    values = make(4096, 32000, dtype=torch.bfloat16, device=device, **FILTERS[filters])
    actual = eagle_kernels.raw.sample_from_logits(**values)
    for start in range(0, 4096, 512):
        part = {key: value[start : start + 512] for key, value in values.items()}
        assert_same_tokens(part, actual[start : start + 512])


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
    few = {key: value[:3] for key, value in values.items()}
    assert_same_tokens(few, eagle_kernels.raw.sample_from_logits(**few))


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
    assert torch.equal(
        eagle_kernels.raw.sample_from_logits(**{key: value[order] for key, value in values.items()}), tokens[order]
    )
    flat = {**values, "logits": torch.zeros(6, 50, device=device)}
    flat["seeds"] = torch.zeros(6, dtype=torch.int64, device=device)
    flat["positions"] = torch.arange(6, device=device)
    assert len(set(eagle_kernels.raw.sample_from_logits(**flat).tolist())) > 1
    flat["positions"], flat["seeds"] = torch.zeros_like(order), 2**32 * torch.arange(6, device=device)
    assert len(set(eagle_kernels.raw.sample_from_logits(**flat).tolist())) > 1


def test_streams_do_not_share_noise():
    seeds, positions = torch.arange(64), torch.arange(64)
    target = reference_random.gumbel(seeds, positions, 64, reference_random.STREAM_TARGET)
    draft = reference_random.gumbel(seeds, positions, 64, reference_random.STREAM_DRAFT)
    assert (target != draft).all()
    assert torch.corrcoef(torch.stack([target.flatten(), draft.flatten()]))[0, 1].abs() < 0.05


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_special_logits(bad, device):
    values = make(5, 40, device=device, temperature=1.0, **FILTERS["all"])
    clean = eagle_kernels.raw.sample_from_logits(**values)
    values["logits"][1] = bad
    values["logits"][3, 7] = bad
    tokens = eagle_kernels.raw.sample_from_logits(**values)
    assert torch.equal(tokens[[0, 2, 4]], clean[[0, 2, 4]])
    assert ((tokens >= 0) & (tokens < 40)).all()
    if bad == float("inf"):
        assert tokens[3] == 7
    else:
        assert tokens[1] == 0 and tokens[3] != 7


def test_launches_and_nothing_else(device):
    assert_only_launches(PATH, make(3, 20, device=device, **FILTERS["all"]))


def test_registration(device):
    check_registration("sample_from_logits", make(3, 20, device=device, **FILTERS["all"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 0)}, "logits must have at least one token a row"),
        ({"logits": torch.zeros(20, 3).T}, "logits must be contiguous in its last 1 axes"),
        ({"seeds": torch.zeros(3)}, "seeds must have dtype int32 or int64, got float32"),
        ({"temperature": 1.0}, "temperature must be a tensor, got float"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises((ValueError, TypeError), match="eagle_kernels.sample_from_logits: " + message):
        eagle_kernels.raw.sample_from_logits(**{**make(3, 20), **change})


def test_debug_mode_checks_values(monkeypatch):
    values = make(3, 20, temperature=-1.0)
    monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
    with pytest.raises(ValueError, match=r"temperature must not be negative, got -1.0 at \[0\]"):
        eagle_kernels.sample_from_logits(**values)
