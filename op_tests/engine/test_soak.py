"""The soak run itself: it is quiet where all is well, and loud where something was broken on purpose."""

import re

import pytest

from eagle_kernels import ops
from eagle_kernels.engine.batch.prefix_cache import PrefixCache
from eagle_kernels.engine.batch.state import RowSampling
from eagle_kernels.engine.requests.request import Request
from op_tests.engine import soak
from op_tests.engine.toys import DEVICE


def test_a_round_is_fine(monkeypatch, capsys):
    monkeypatch.setitem(soak.TICKS, "cpu", 20)
    assert soak.main(["--minutes", "0", "--seed", "3", "--device", DEVICE]) == 0
    *so_far, told = capsys.readouterr().out.splitlines()  # a line a minute, and a last one
    assert told.startswith("fine: ") and re.search(r"\b1 rounds", told)
    assert all(re.match(r"\d+ min: ", line) for line in so_far)
    counts = soak.run(4, DEVICE, 0, rounds=[1]).counts
    assert counts["rounds"] == 1 and counts["'length'"] > 1 and counts["tokens"] > 20
    assert counts["ties of the target"] <= 1


def skip(*arguments, **keywords):
    """What was to be done is not."""


def keep_one(give_back):
    """Loses a page of a request that has some to itself."""

    def given(self, held):
        if len(held.ids) > len(held.shared) + 2:
            held.ids.pop()
        give_back(self, held)

    return given


def push_more(push):
    """Takes a token more than was asked for, where a step brings one."""

    def pushed(self, accepted, tokens, *scores):
        before = len(self.output_ids)
        push(self, accepted, tokens, *scores)
        taken = len(self.output_ids) - before
        if self.is_finished and taken < len(tokens):
            self.output_ids.append(tokens[taken])

    return pushed


def count_first(count):
    return lambda self, features, rows, tokens: count(self, features, rows, tokens[:, :1])


# with what is told of it
DEFECTS = {
    "accepted keys stay where they are": (ops, "move_accepted_kv", lambda old: skip, "MISMATCH token "),
    "a step's first token alone is counted": (RowSampling, "count", count_first, "MISMATCH "),
    "a page is lost": (PrefixCache, "give_back", keep_one, "pages, but free or in use are"),
    "a token past the end": (Request, "push", push_more, "MISMATCH token None"),
}


@pytest.mark.cross
@pytest.mark.parametrize("defect", DEFECTS)
def test_what_is_broken_is_found(defect, monkeypatch, capsys):
    owner, name, make, words = DEFECTS[defect]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    rounds = map(str, range(40))  # at any pace of the machine; the first rounds find most defects
    status = soak.main(["--seed", "0", "--device", DEVICE, "--round", *rounds])
    told = capsys.readouterr().out
    assert status == 1 and words in told and "--seed 0 --round" in told and "EAGLEConfig(" in told, told


def test_only_ties_are_forgiven():
    """Where the target's two best logits all but meet either may come; elsewhere the second is a mistake."""
    run = soak.Soak(1, DEVICE)
    request = run.plain.submit([3, 1, 4], soak.SamplingParams(max_new_tokens=2))
    run.plain.collect()
    first, second = run.plain.next_token_logits([3, 1, 4, request.output_ids[0]]).topk(2).indices.tolist()
    assert request.output_ids[1] == first
    judge = soak._Round(run, None, run.plain)
    assert judge.is_close(request, 1, {first}) and not judge.is_close(request, 1, {first, second})
    logits = run.plain.next_token_logits([3, 1, 4, request.output_ids[0]]).clone()
    logits[second] = logits[first] - soak.ROUNDING / 4
    run.plain.next_token_logits = lambda tokens: logits
    assert judge.is_close(request, 1, {first, second})
    third = int(logits.topk(3).indices[-1])
    assert not judge.is_close(request, 1, {first, third})
