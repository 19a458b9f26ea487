"""append_output against its reference and against the engine's own requests: every way to end, and to be dead."""

import pytest
import torch

import eagle_kernels
from eagle_kernels.engine import SamplingParams
from eagle_kernels.engine.requests.request import Request
from op_tests.harness import check_operation, to_device

# (batch, tokens of a step, end tokens, stop sequences, their length); rows have 40 columns
SHAPES = [(1, 1, 1, 1, 1), (6, 4, 2, 3, 3), (9, 6, 1, 5, 4), (12, 9, 3, 1, 7), (3, 3, 70, 40, 40)]
# few enough tokens that sequences occur
VOCABULARY = 4
ALWAYS = ("token_ids", "num_tokens", "num_prompt_tokens", "tokens")


def make(batch_size, num_columns, num_ends=2, num_stops=3, stop_size=3, *, row_size=40, dtype=torch.int64,
         history_dtype=None, is_shared=False, device="cpu"):  # fmt: skip
    """Requests in scattered rows of more, some dead, some at their end; all that can be given."""
    num_prompt = torch.randint(0, row_size // 2, (batch_size,))
    num_tokens = num_prompt + torch.randint(0, row_size // 2, (batch_size,))
    tokens = torch.randint(VOCABULARY, (batch_size, num_columns))
    tokens[torch.arange(num_columns) >= torch.randint(num_columns + 1, (batch_size, 1))] = -1
    tokens[0] = torch.randint(VOCABULARY, (num_columns,))
    stops = torch.randint(VOCABULARY, (batch_size, num_stops, stop_size))
    stops[torch.arange(stop_size) < torch.randint(stop_size + 1, (batch_size, num_stops, 1))] = -1
    ends = torch.randint(-1, 2 * VOCABULARY, (batch_size, num_ends))
    values = {
        "num_tokens": num_tokens,
        "num_prompt_tokens": num_prompt,
        "tokens": tokens,
        "max_tokens": num_tokens + torch.randint(0, 2 * num_columns, (batch_size,)),
        "end_token_ids": ends[0] if is_shared else ends,
        "stop_sequences": stops,
        "min_tokens": torch.randint(0, row_size // 2, (batch_size,)),
        "is_live": torch.arange(batch_size) % 5 != 3,
        "rows": torch.randperm(batch_size + 3)[:batch_size],
    }
    values = {name: value if name == "is_live" else value.to(dtype) for name, value in values.items()}
    history = torch.randint(VOCABULARY, (batch_size + 3, row_size)).to(history_dtype or dtype)
    return to_device({"token_ids": history} | values, device)


def check(values, case=""):
    """Returns the outputs and the texts after them; those of `values` stay."""
    given = values | {"token_ids": values["token_ids"].clone()}
    return check_operation("verify.append_output", given, case=case)[0], given["token_ids"]


def one(tokens, *, before=(), prompt=(9, 9), row_size=16, device="cpu", **options):
    """A single request's result: (tokens kept, reason, its whole text)."""
    text = [*prompt, *before]
    values = {
        "token_ids": torch.tensor([[*text, *[77] * (row_size - len(text))]]),
        "num_tokens": torch.tensor([len(text)]),
        "num_prompt_tokens": torch.tensor([len(prompt)]),
        "tokens": torch.tensor([tokens]),
    }
    values |= {name: torch.tensor([value]) for name, value in options.items()}
    result, history = check(to_device(values, device), str(options))
    length = int(result.new_num_tokens)
    assert (history[0, length:] == 77).all()
    return result.tokens[0, : int(result.num_kept)].tolist(), int(result.finish_reason), history[0, :length].tolist()


def ahead_of_time_cases():
    plain = make(3, 4)
    yield "plain", {name: plain[name] for name in (*ALWAYS, "rows")}
    yield "int64", make(3, 6, 2, 4, 8)
    yield "int32", make(3, 6, 2, 4, 8, dtype=torch.int32, is_shared=True)
    yield "long sequences", make(3, 70, 300, 5, 500, history_dtype=torch.int32)


def order_case():
    return make(9, 6)


def size_sweep():
    for batch_size, row_size in [(1, 100), (2, 128), (3, 1), (16, 1000), (17, 64), (64, 4096), (257, 77)]:
        yield make(batch_size, 4, row_size=max(row_size, 4))


def wrong_calls():
    fewer = {"rows": None, "token_ids": torch.zeros(2, 9).long()}
    yield make(3, 4) | fewer, "token_ids must have a row for each of B = 3 requests"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, dtype, device):
    for is_shared in (False, True):
        check(make(*shape, dtype=dtype, is_shared=is_shared, device=device), f"{shape} {dtype} {is_shared}")


def test_every_reason_occurs(device):
    """So that the comparison above proves something; the text is int32 beside step tokens of int64."""
    values = make(64, 6, 1, 3, 3, history_dtype=torch.int32, device=device)
    values["end_token_ids"] = torch.where(values["end_token_ids"] == 0, 0, -1)
    result, _ = check(values, "reasons")
    assert sorted(set(result.finish_reason.tolist())) == [0, 1, 2, 3]
    is_stopped = result.finish_reason == 2
    assert (result.num_kept[is_stopped] < (values["tokens"] >= 0).sum(1)[is_stopped]).any()


@pytest.mark.parametrize(
    "names",
    [(), ("max_tokens",), ("end_token_ids",), ("stop_sequences",), ("stop_sequences", "min_tokens"), ("is_live",)],
    ids="+".join,
)
def test_what_is_not_given_changes_nothing(names, device):
    values = make(9, 5, device=device)
    result, _ = check({name: values[name] for name in (*ALWAYS, *names)}, str(names))
    if not names:
        assert torch.equal(result.tokens, values["tokens"])


def test_an_end_token_is_kept_and_nothing_after_it(device):
    assert one([1, 2, 3, 4], end_token_ids=[5, 3], device=device) == ([1, 2, 3], 1, [9, 9, 1, 2, 3])
    assert one([1, 2, 3, 4], end_token_ids=[-1, 6], device=device) == ([1, 2, 3, 4], 0, [9, 9, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("stop", "kept", "reason"),
    [
        ([-1, 2, 3], [1, 2, 3], 2),  # inside the step
        ([8, 1, 2], [1, 2], 2),  # begun in the output before it
        ([7, 8, 1], [1], 2),
        ([9, 7, 8], [1, 2, 3, 4], 0),  # ends before the step, and begins in the prompt
        ([-1, 7, 8], [1, 2, 3, 4], 0),  # ended before the step already
        ([9, 7, 8, 1], [1, 2, 3, 4], 0),  # begins in the prompt
        ([-1, -1, 4], [1, 2, 3, 4], 2),
        ([-1, -1, -1], [1, 2, 3, 4], 0),  # no sequence at all
        ([2, -1, 3], [1, 2, 3], 2),  # what stands before the last -1 is padding too
        ([3, 4, -1], [1, 2, 3, 4], 0),
        ([-1, 4, 5], [1, 2, 3, 4], 0),  # would end after the step
    ],
    ids=str,
)
def test_a_stop_sequence_ends_inside_the_step(stop, kept, reason, device):
    found = one([1, 2, 3, 4], before=(7, 8), stop_sequences=[stop], device=device)
    assert found == (kept, reason, [9, 9, 7, 8, *kept])


def test_the_first_stop_sequence_counts(device):
    stops = [[-1, 3, 4], [8, 1, 2], [-1, -1, 4]]
    assert one([1, 2, 3, 4], before=(8,), stop_sequences=stops, device=device)[:2] == ([1, 2], 2)


@pytest.mark.parametrize(
    ("options", "kept", "reason"),
    [
        ({"max_tokens": 5}, 3, 3),
        ({"max_tokens": 6}, 4, 3),  # filled by the last of them
        ({"max_tokens": 7}, 4, 0),
        ({"max_tokens": 2}, 0, 3),  # full already
        ({"max_tokens": 1}, 0, 3),
        ({"max_tokens": -5}, 0, 3),
        ({"max_tokens": 100}, 4, 0),
        ({"max_tokens": 5, "end_token_ids": [3]}, 3, 1),  # at one and the same token
        ({"max_tokens": 5, "stop_sequences": [[2, 3]]}, 3, 2),
        ({"end_token_ids": [3], "stop_sequences": [[2, 3]]}, 3, 1),
        ({"end_token_ids": [3], "stop_sequences": [[1, 2]]}, 2, 2),
        ({"max_tokens": 4, "end_token_ids": [3], "stop_sequences": [[2, 3]]}, 2, 3),
    ],
    ids=str,
)
def test_what_comes_first_ends_and_of_one_token_the_lowest_reason(options, kept, reason, device):
    assert one([1, 2, 3, 4], device=device, **options)[:2] == ([1, 2, 3, 4][:kept], reason)


def test_a_row_that_is_full_ends_and_is_not_overrun(device):
    assert one([1, 2, 3, 4], row_size=5, device=device) == ([1, 2, 3], 3, [9, 9, 1, 2, 3])
    assert one([1, 2], before=(5, 6, 7), row_size=5, device=device) == ([], 3, [9, 9, 5, 6, 7])
    assert one([1, 2], row_size=5, max_tokens=9, device=device)[:2] == ([1, 2], 0)


@pytest.mark.parametrize(("min_tokens", "kept", "reason"), [(0, 1, 1), (2, 1, 1), (3, 3, 2), (4, 3, 2), (5, 4, 0)])
def test_min_tokens_hold_back_end_tokens_and_stop_sequences(min_tokens, kept, reason, device):
    """One token before the step: its first makes an output of 2; 5 is an end token, 6 6 a stop sequence."""
    options = {"end_token_ids": [5], "stop_sequences": [[-1, 6, 6]], "min_tokens": min_tokens}
    assert one([5, 6, 6, 1], before=(6,), device=device, **options)[:2] == ([5, 6, 6, 1][:kept], reason)
    assert one([5, 6, 6, 1], before=(6,), device=device, **options, max_tokens=4)[1] == (1 if reason == 1 else 3)


@pytest.mark.parametrize("max_new_tokens", [1, 5, 9, 40])
def test_ends_where_requests_of_the_engine_end(max_new_tokens, device):
    """The same steps for `Request.push` and for the op, until both have ended."""
    request = Request(0, [9, 9, 9], SamplingParams(max_new_tokens=max_new_tokens), 0, frozenset({3}))
    values = {
        "token_ids": torch.full((1, 64), 9, device=device),
        "num_tokens": torch.tensor([3], device=device),
        "num_prompt_tokens": torch.tensor([3], device=device),
        "max_tokens": torch.tensor([3 + max_new_tokens], device=device),
        "end_token_ids": torch.tensor([3], device=device),
    }
    reason = 0
    for _ in range(20):
        step = torch.randint(0, 12, (1, 4))
        step[:, int(torch.randint(1, 5, ())) :] = -1
        request.push([token for token in step[0].tolist() if token >= 0])
        result, values["token_ids"] = check(values | {"tokens": step.to(device)})
        values["num_tokens"], reason = result.new_num_tokens, int(result.finish_reason)
        assert values["token_ids"][0, 3 : int(values["num_tokens"])].tolist() == request.output_ids
        assert {0: None, 1: "eos", 3: "length"}[reason] == request.finish_reason
        if reason:
            break
    assert reason


@pytest.mark.slow
def test_steps_of_any_length_end_at_the_same_token(device):
    """One text in steps of 1, 3 and 24: a sequence is found wherever the steps part it."""
    values = make(8, 24, row_size=60, device=device)
    values["tokens"] = torch.randint(VOCABULARY, (8, 24), device=device)
    values["is_live"] = torch.ones(8, dtype=torch.bool, device=device)
    ended = []
    for width in (24, 3, 1):
        state = values | {"token_ids": values["token_ids"].clone()}
        reasons = torch.zeros(8, dtype=torch.int32, device=device)
        for start in range(0, 24, width):
            state["tokens"] = values["tokens"][:, start : start + width].contiguous()
            state["is_live"] = reasons == 0
            result = eagle_kernels.raw.append_output(**state)
            state["num_tokens"], reasons = result.new_num_tokens, torch.maximum(reasons, result.finish_reason)
        ended.append((state["token_ids"], state["num_tokens"], reasons))
    assert {2, 3} & set(ended[0][2].tolist())
    for other in ended[1:]:
        assert all(torch.equal(got, want) for got, want in zip(other, ended[0]))


def test_dead_rows_keep_what_they_have(device):
    values = make(6, 4, device=device)
    values["is_live"] = torch.tensor([1, 0, 1, 1, 1, 0], device=device)
    values["rows"][2], values["rows"][3] = -1, 9
    values["tokens"][0] = torch.tensor([-1, 2, 2, 2])
    result, history = check(values, "dead")
    dead = [0, 1, 2, 3, 5]
    assert torch.equal(result.new_num_tokens[dead], values["num_tokens"][dead])
    assert (result.tokens[dead] == -1).all()
    assert not result.num_kept[dead].any() and not result.finish_reason[dead].any()
    changed = (history != values["token_ids"]).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {int(values["rows"][4])}


def test_follows_a_commit(device):
    """The tokens of verify_commit are what it takes; its dead rows are dead here."""
    committed = eagle_kernels.raw.verify_commit(
        torch.tensor([7, 8, 5, -1], dtype=torch.int32, device=device),
        torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32, device=device),
        torch.tensor([1, 0], dtype=torch.int32, device=device),
        torch.tensor([3, 3], device=device),
    )
    history = torch.zeros(2, 8, dtype=torch.int64, device=device)
    lengths = torch.tensor([4, 4], device=device)  # the root, which is no part of seq_lens, is one of them
    result = eagle_kernels.raw.append_output(history, lengths, lengths, committed.tokens)
    assert history.tolist() == [[0, 0, 0, 0, 7, 8, 0, 0], [0] * 8]
    assert result.new_num_tokens.tolist() == [6, 4] and result.num_kept.tolist() == [2, 0]
