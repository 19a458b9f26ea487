"""penalize_logits against its reference, against verify_tree_sampled's own penalties bit by bit, and by hand."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import Guarded, assert_close, assert_equal, check_operation, sweep, to_device
from op_tests.harness.trees import LINKS, trees_of
from op_tests.ops.verify.cases import follow_tree, make_sampled, make_tree, with_processors

PATH = "sampling.penalize_logits"
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
PROCESSORS = (*PENALTIES, "prompt_mask", "output_counts", "logit_bias", "token_bitmask")
LENGTHS = ("min_tokens", "num_output_tokens", "end_token_ids")
# (batch, K, S, N)
SHAPES = [(1, 1, 1, 1), (2, 1, 4, 5), (1, 8, 1, 9), (3, 2, 2, 4), (1, 4, 5, 20)]


def make(batch_size, topk, spec_steps, num_nodes, *, vocab_size=61, dtype=torch.float32, index_dtype=torch.int64,
         is_shared=False, device="cpu"):  # fmt: skip
    """Random trees whose drafts repeat, and everything that can be given, on a dyadic grid."""
    links, _ = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=min(vocab_size, 9), dtype=index_dtype)
    values = with_processors(dict(links) | {"target_logits": follow_tree(links, vocab_size, dtype=dtype)})
    request = torch.arange(batch_size)
    ends = torch.tensor([[3, -1, 7], [-1, 5, 3]])[request % 2]
    bad = torch.tensor([[11, 11, -1, 2], [2**40, 60, 8, -1], [-1, -1, -1, -1]])[request % 3]
    values |= {
        "min_tokens": (4 + request % 3).to(index_dtype),
        "num_output_tokens": (2 + request % 2).to(index_dtype),
        "end_token_ids": ends.to(index_dtype),
        "bad_token_ids": (bad % 2**31).where(bad >= 0, -1).to(index_dtype),
    }
    if is_shared:
        values |= {name: values[name][0] for name in ("end_token_ids", "bad_token_ids")}
    return to_device(values, device)


def only(values, *names):
    return {name: values[name] for name in (*LINKS, "target_logits", *names)}


def ahead_of_time_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield str(dtype), make(2, 8, 5, 64, dtype=dtype)
    plain = make(2, 4, 3, 8, dtype=torch.bfloat16, index_dtype=torch.int32, is_shared=True)
    yield "penalties alone", only(plain, *PENALTIES[1:], "output_counts")
    yield "lengths alone", only(plain, *LENGTHS)


def order_case():
    return make(2, 2, 2, 4)


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 3, 8))


@pytest.mark.parametrize("is_shared", [False, True], ids=["lists", "one list"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, is_shared, device):
    values = make(*shape, is_shared=is_shared, index_dtype=torch.int32 if is_shared else torch.int64, device=device)
    check_operation(PATH, values, case=f"{shape} {is_shared}")


def test_numbers_off_any_grid(device):
    """Where products round; the reference's frequency penalty rounds twice, in one of very many."""
    values = make(2, 2, 2, 4, device=device)
    values |= {
        "target_logits": torch.randn(8, 61, device=device),
        "repetition_penalty": torch.tensor([1.3, 0.7], device=device),
        "frequency_penalty": torch.tensor([0.3, -0.1], device=device),
        "presence_penalty": torch.tensor([0.1, 0.7], device=device),
    }
    check_operation(PATH, values, close=("output",))


@pytest.mark.cross
@pytest.mark.parametrize(
    ("dtype", "temperature", "filters"),
    [
        (torch.float32, 0.0, {}),
        (torch.float32, 0.7, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
        (torch.bfloat16, 0.0, {"top_k": 20}),
        (torch.bfloat16, 0.7, {}),
    ],
    ids=str,
)
def test_sampled_verification_needs_no_penalties_after_it(dtype, temperature, filters, device):
    """The same tokens and paths, of numbers off any grid. Log-probabilities are sums of the same numbers, in an order
    that the compiler chooses for each of the two."""
    values = with_processors(make_sampled(3, 2, 2, 5, device=device, **filters))
    noise = torch.randn(values["target_logits"].shape, device=device)
    values |= {
        "target_logits": (values["target_logits"] + noise).to(dtype),
        "temperature": torch.full((3,), temperature, device=device),
        "repetition_penalty": torch.tensor([1.3, 0.9, 1.1], device=device),
        "frequency_penalty": torch.tensor([0.3, 0.7, 0.123], device=device),
        "presence_penalty": torch.tensor([0.1, 0.9, 0.456], device=device),
        "return_logprobs": True,
    }
    no_links = torch.full_like(values["retrieve_next_token"], -1)
    inside = eagle_kernels.raw.verify_tree_sampled(**values)
    logits = eagle_kernels.raw.penalize_logits(**only(values, *PROCESSORS))
    plain = {name: value for name, value in values.items() if name not in PROCESSORS} | {"target_logits": logits}
    outside = eagle_kernels.raw.verify_tree_sampled(**plain)
    assert inside.accept_token_num.sum() > 0, "drafts that nobody accepts are counted by nobody"
    for name in ("predicts", "accept_index", "accept_token_num"):
        assert torch.equal(getattr(inside, name), getattr(outside, name)), name
    assert_close("verify_tree_sampled", str(dtype), "logprobs", inside.logprobs, outside.logprobs)
    committed = eagle_kernels.raw.penalize_logits(**only(values, *PROCESSORS) | {"retrieve_next_token": no_links})
    assert not torch.equal(committed, logits), "no draft changes anything, so nothing was proved of them"


def chain(logits, device, **options):
    """A chain of three, 5 the root, then 3 and 3, whose nodes have the same logits; the penalised ones."""
    values = trees_of([-1, 0, 1], [[5, 3, 3]]) | {"target_logits": torch.tensor([logits] * 3)}
    values |= {name: torch.tensor([value]) for name, value in options.items()}
    words = {name: values[name].int() for name in ("prompt_mask", "output_counts") if name in values}
    output, _ = check_operation(PATH, to_device(values | words, device), case=str(options))
    return output.tolist()


def test_drafts_on_the_path_count_as_output(device):
    """The root does not, as it is in output_counts where there are any."""
    logits = [1.0, 1.0, 1.0, 4.0, 1.0, 2.0]
    frequent = chain(logits, device, frequency_penalty=0.5)
    assert [row[3] for row in frequent] == [4.0, 3.5, 3.0] and [row[5] for row in frequent] == [2.0, 2.0, 2.0]
    present = chain(logits, device, presence_penalty=0.5, output_counts=[0, 0, 0, 0, 0, 1])
    assert [row[3] for row in present] == [4.0, 3.5, 3.5] and [row[5] for row in present] == [1.5, 1.5, 1.5]
    repeated = chain([-1.0] * 3 + [4.0, -2.0, 2.0], device, repetition_penalty=2.0, prompt_mask=[1 << 4])
    assert repeated == [[-1.0] * 3 + [4.0, -4.0, 2.0]] + [[-1.0] * 3 + [2.0, -4.0, 2.0]] * 2


def test_siblings_do_not_count(device):
    """Two branches below the root, tokens 1 and 2, and 3 below the second: each counts what is above it alone."""
    values = trees_of([-1, 0, 0, 2], [[0, 1, 2, 3]])
    values |= {"target_logits": torch.zeros(4, 4), "presence_penalty": torch.ones(1)}
    output, _ = check_operation(PATH, to_device(values, device))
    assert output.tolist() == [[0, 0, 0, 0], [0, -1, 0, 0], [0, 0, -1, 0], [0, 0, -1, -1]]


@pytest.mark.parametrize(("min_tokens", "held"), [(0, 0), (7, 0), (8, 1), (9, 2), (10, 3), (2**40, 3)])
def test_end_tokens_wait_for_min_tokens(min_tokens, held, device):
    """Seven are committed: at the nodes the output is 7, 8 and 9 tokens long, and what is drawn comes after."""
    never = float("-inf")
    options = {"min_tokens": min_tokens, "num_output_tokens": 7, "end_token_ids": [2, -1]}
    rows = chain([1.0, 1.0, 5.0, 1.0], device, **options)
    assert [row[2] for row in rows] == [never] * held + [5.0] * (3 - held)
    assert all(row[0] == row[1] == row[3] == 1.0 for row in rows)


def test_bad_tokens_are_never_drawn(device):
    rows = chain([1.0, 1.0, 5.0, 1.0], device, bad_token_ids=[2, 0, -1, 2, 9])
    assert rows == [[float("-inf"), 1.0, float("-inf"), 1.0]] * 3


def test_in_place_and_into_wider_rows(device):
    """`out` is the logits themselves, a slice of padded ones: what stands after them is left alone."""
    values = make(2, 2, 2, 4, device=device)
    expected = eagle_kernels.raw.penalize_logits(**values)
    guard = Guarded((8, 70), torch.float32, device)
    guard.tensor[:, :61] = values["target_logits"]
    beside = guard.tensor[:, 61:].clone()
    given = guard.tensor[:, :61]
    result = eagle_kernels.raw.penalize_logits(**values | {"target_logits": given}, out=given)
    assert result is given
    assert_equal("penalize_logits", "in place", "output", result, expected)
    assert_equal("penalize_logits", "in place", "beside", guard.tensor[:, 61:], beside)
    guard.check("penalize_logits", "output")


def test_serves_verification_by_probabilities(device):
    """What the renorms and the coin walk are given: no bad token is ever emitted."""
    values = make(1, 2, 2, 4, device=device)
    values["bad_token_ids"] = torch.arange(30, device=device)
    logits = eagle_kernels.raw.penalize_logits(**values)
    probs = eagle_kernels.raw.top_p_renorm(torch.softmax(logits, -1), torch.full((4,), 0.9, device=device))
    coins, final = torch.rand(1, 4, device=device), torch.rand(1, device=device)
    verdict = eagle_kernels.raw.verify_tree_coins(
        *(values[name] for name in LINKS), probs.view(1, 4, 61), coins, final, spec_steps=2
    )
    emitted = verdict.predicts[verdict.predicts >= 0]
    assert len(emitted) >= 1 and emitted.min() >= 30


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_rows(dtype, device):
    values = make(4, 8, 5, 64, vocab_size=128256, dtype=dtype, device=device)
    output = eagle_kernels.raw.penalize_logits(**values)
    expected = eagle_kernels.reference.ops.sampling.penalize_logits.penalize_logits(**values)
    assert_close("penalize_logits", str(dtype), "output", output, expected)
