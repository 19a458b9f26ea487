"""Drafts that cannot win rest: what it takes, what they cost then, when they are tried again, and what they draft."""

import itertools
import random
import re
from collections import Counter

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.step import choice as choices
from eagle_kernels.engine.step import roster as rules
from eagle_kernels.engine.step.choice import PROBE_AFTER, Fastest, Outlook
from eagle_kernels.engine.step.roster import SOON_AFTER, TRY_AFTER, Roster
from eagle_kernels.engine.step.runner import StepRunner
from op_tests.engine.engines import steps_known
from op_tests.engine.methods import SIZES
from op_tests.engine.prophets import LENGTH, PROMPT, Prophet, planted_ms
from op_tests.engine.several import at_random, check_drafts, drafts_for, engine_of
from op_tests.engine.toys import DEVICE, RowWalker, random_llama
from op_tests.engine.view import View

# of each draft: trees of 2, 4, 8 and 16 nodes, and how many tokens their steps bring at most
TREES = {draft: [4 * draft + tree for tree in range(1, 5)] for draft in range(3)}
MOST = (1, *(2, 4, 5, 5) * 3)
# milliseconds of a step with these numbers of nodes, plain ones first, by the number of requests
STEP_MS = {1: (5.4, 6.3, 6.6, 6.9, 8.3), 8: (6.2, 6.7, 7.2, 7.7, 10.2), 64: (8.1,)}


class Work:
    """Steps of three drafts, each draft of which is accepted with a probability of its own."""

    def __init__(self, seed=0, rows=None, most_rows=None):
        kinds = [None, *(draft for draft, numbers in TREES.items() for _ in numbers)]
        self.choice, self.coin = Fastest(MOST, most_rows, rows, kinds=kinds), random.Random(seed)
        self.roster, self.known = Roster(TREES, {0: self.choice}), set(TREES)
        self.num_steps, self.seen, self.changes = 0, Counter(), []

    def run(self, num_steps, probs, num_rows=8, step_ms=STEP_MS):
        for _ in range(num_steps):
            self.num_steps += 1
            if self.roster.is_due():
                changes = self.roster.review(self.known - self.roster.absent)
                self.changes += [(self.num_steps, *changes)] if any(changes) else []
            number = self.choice.choose(num_rows)
            draft, tree = divmod(number - 1, 4)
            brought = [self._tokens(probs[draft], tree) if number else 1 for _ in range(num_rows)]
            ms = step_ms[num_rows][1 + tree if number else 0] * self.coin.uniform(0.97, 1.05)
            self.choice.note(number, num_rows, ms, sum(brought) / num_rows)
            self.seen[draft if number else None] += 1
        return self

    def _tokens(self, prob, tree):
        accepted = (self.coin.random() < prob * (1 + 0.05 * (tree > 1)) for _ in range(MOST[1 + tree] - 1))
        return 1 + next((count for count, is_right in enumerate(accepted) if not is_right), MOST[1 + tree] - 1)

    @property
    def resting(self):
        return {draft for draft, (first, *_) in TREES.items() if first in self.roster.reasons}


@pytest.mark.parametrize("rows", [None, (1, *(2, 4, 8, 16) * 3)], ids=["eager", "graphs"])
def test_who_cannot_win_rests_in_time(rows):
    """Within some thousand steps, hardly any of which were its own; and then it has none."""
    work = Work(rows=rows).run(16000, (0.2, 0.75, 0.4))
    assert work.resting == {0, 2} and work.seen[0] + work.seen[2] < 1000
    before = work.seen.copy()
    work.run(2000, (0.2, 0.75, 0.4))
    assert (work.seen - before).keys() <= {1, None}
    assert all(each.startswith("at most ") for each in work.roster.reasons.values())


@pytest.mark.parametrize("seed", range(3))
def test_who_may_win_never_rests(seed):
    """Nearly as good as the best; the best in other batches only; and whatever nobody has tried yet."""
    assert not Work(seed).run(6000, (0.72, 0.75, 0.74)).changes
    costly = STEP_MS | {8: (6.2, 6.7, 12.0, 14.0, 20.0)}
    alike = Work(seed).run(1000, (0.9, 0.1, 0.1), 1, costly)
    for _ in range(4):
        alike.run(1000, (0.9, 0.1, 0.1), 8, costly).run(1000, (0.9, 0.1, 0.1), 1, costly)
    assert 0 not in alike.resting
    assert not Work(seed).run(PROBE_AFTER, (0.0, 0.0, 0.0)).changes


def test_a_bad_start_decides_nothing():
    """The few steps that are tried at once fall where the best draft is wrong."""
    work = Work().run(40, (0.0, 0.4, 0.4)).run(3000, (0.9, 0.4, 0.4))
    assert 0 not in work.resting and work.seen[0] > 1000


def test_times_of_smaller_batches_bound_only_what_has_none():
    """Long texts one at a time, for which plain decoding is best, and short ones together, for which the draft is."""
    choice = Fastest((1, 4, 4), None, kinds=(None, 0, 1))
    for num_rows, times in ((1, (9.0, 30.0, 30.0)), (2, (9.0, 10.0, 10.0))):
        for number, _ in itertools.product(range(3), range(PROBE_AFTER)):
            choice.note(number, num_rows, times[number], 3.0 if number == 1 else 1.0)
    assert Roster({0: [1], 1: [2]}, {0: choice}).review({0, 1}) == ([1], [])


def test_batches_that_are_rare_or_have_no_drafts_count_for_nothing():
    """What little was tried in them would leave hope to any draft."""
    work = Work(rows=(1, *(2, 4, 8, 16) * 3), most_rows=8).run(PROBE_AFTER + 8, (0.2, 0.75, 0.2), 1)
    assert not work.run(2000, (0.2, 0.75, 0.2), 64).changes
    assert work.run(25000, (0.2, 0.75, 0.2)).resting == {0, 2}


def test_all_may_rest_where_plain_decoding_is_best():
    work = Work().run(16000, (0.0, 0.0, 0.0))
    assert work.resting == {0, 1, 2} and work.choice.choose(8) == 0


def test_who_has_rested_is_tried_again(monkeypatch):
    """Soon where texts have changed, and seldom where they have not; it drafts once it has read what there is."""
    work = Work().run(14000, (0.2, 0.75, 0.2))
    assert work.resting == work.roster.absent == {0, 2}
    assert SOON_AFTER == 16384 and TRY_AFTER == 131072
    monkeypatch.setattr(rules, "SOON_AFTER", 1024)
    monkeypatch.setattr(rules, "TRY_AFTER", 15000 + work.num_steps)
    work.run(1000, (0.2, 0.75, 0.2))
    assert work.resting == work.roster.absent == {0, 2}, "as nothing has changed"
    work.known = {1}
    work.run(2000, (0.2, 0.3, 0.75))
    assert work.resting == {0, 2} and not work.roster.absent, "they have not read all texts yet"
    work.known, work.seen = {1, 2}, Counter()
    work.run(3000, (0.2, 0.3, 0.75))
    assert work.seen[2] > 2000 and work.seen[0] == 0 and 0 in work.resting
    work.known = {0, 1, 2}
    work.run(PROBE_AFTER, (0.2, 0.3, 0.75))
    assert work.resting == work.roster.absent == {1} and work.seen[0] > 0
    monkeypatch.setattr(rules, "TRY_AFTER", 512)
    work.run(1024, (0.2, 0.3, 0.75))
    assert 1 not in work.roster.absent, "although nothing has changed"


class Counted(Prophet):
    """Counts what it reads."""

    num_read = 0

    def forward(self, *inputs, **options):
        self.num_read += 1
        return super().forward(*inputs, **options)


@pytest.fixture(scope="module")
def target():
    return random_llama(num_layers=4, device=DEVICE)


@pytest.fixture(scope="module")
def texts(target):
    """Two prompts, each with the text after it."""
    plain, prompts = EAGLEInference(None, target, EAGLEConfig(method="naive")), (PROMPT, PROMPT[::-1])
    return [prompt + plain.generate(prompt, LENGTH)[0] for prompt in prompts]


@pytest.fixture
def soon(monkeypatch):
    """What takes thousands of steps takes dozens, and steps take the times that are planted for their nodes."""
    note, plan = Fastest.note, {}

    def noted(choice, number, num_rows, step_ms, tokens):
        note(choice, number, num_rows, planted_ms(View(plan["of"]).plan.runners[number].stepper.mean_nodes), tokens)

    monkeypatch.setattr(Fastest, "note", noted)
    steps = {"PROBE_AFTER": 8, "LOSER_AFTER": 32, "TOKEN_STEPS": 4, "COLD_AFTER": 1}
    for name, value in ({"PROBE_SHARE": 0.5} | steps).items():
        monkeypatch.setattr(choices, name, value)
    for name, value in (("PROBE_AFTER", 8), ("PROBE_SHARE", 0.4), ("TRY_AFTER", 100000), ("SOON_AFTER", 48)):
        monkeypatch.setattr(rules, name, value)
    return plan


def make(target, drafts, plan, **options):
    config = {"adaptive": "auto", "topk": 4, "num_steps": 4, "num_draft_tokens": 16, "max_batch": 4, "max_length": 220}
    engine = plan["of"] = EAGLEInference(drafts, target, EAGLEConfig(**config | options))
    return engine


def serve(engine, text, count):
    """Serves requests, a new one as soon as another ends, and compares their texts; returns the steps of each draft."""
    before, prompt = Counter({each[:5]: each.steps for each in engine.candidates}), text[: len(PROMPT)]
    lengths = [LENGTH - 9 * (number % 8) for number in range(count)]
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=length)) for length in lengths]
    engine.collect()
    for length, request in zip(lengths, requests):
        assert request.output_ids == text[len(PROMPT) :][:length]
    seen = Counter()
    for each in engine.candidates:
        seen[each.draft] += each.steps - before[each[:5]]
    return seen


def test_a_draft_that_rests_costs_nothing(target, texts, soon, monkeypatch):
    """Neither prompts nor steps nor a warm-up reach it, it holds no graphs, and the engine says why."""
    drafts = {name: Counted(texts[0], target.vocab_size, name == "right", DEVICE) for name in ("wrong", "right")}
    engine = make(target, drafts, soon)
    serve(engine, texts[0], 20)
    reasons = {each.draft: each.resting for each in engine.candidates}
    assert reasons.keys() == {None, "wrong", "right"} and reasons[None] is reasons["right"] is None
    told = re.fullmatch(r"at most (\d+\.\d) tokens/s of a request, others at least (\d+\.\d)", reasons["wrong"])
    assert 100 < float(told[1]) < float(told[2]) < 1000
    num_read = drafts["wrong"].num_read, drafts["right"].num_read
    assert serve(engine, texts[0], 9)["wrong"] == 0
    catch_up, caught_up = StepRunner.catch_up, []
    monkeypatch.setattr(
        StepRunner, "catch_up", lambda runner, *which: (caught_up.append((runner, which[2])), catch_up(runner, *which))
    )
    engine.warmup(SamplingParams())
    assert set(caught_up) == {(View(engine).runners[0], 1)}, "nobody else catches up, and in no other runner's steps"
    assert drafts["wrong"].num_read == num_read[0] and drafts["right"].num_read > num_read[1]
    for runner in View(engine).runners[1:]:
        assert bool(steps_known(runner)) == (runner.stepper.own.number == 1)


def test_changed_texts_wake_it(target, texts, soon):
    """Each of two drafts knows the texts of one prompt; a third one knows none."""
    drafts = {str(number): Prophet(text, target.vocab_size, True, DEVICE) for number, text in enumerate(texts)}
    drafts["none"] = Prophet(texts[0], target.vocab_size, False, DEVICE)
    engine = make(target, drafts, soon)
    for turn, count in ((0, 12), (1, 24)):
        serve(engine, texts[turn], count)
        seen = serve(engine, texts[turn], 8)
        assert seen[str(turn)] > 0.8 * seen.total(), seen


def test_a_request_that_runs_on_is_read_from_where_it_is(monkeypatch):
    """By drafts that have missed more of it than is kept for them, and draft only for what joins."""
    monkeypatch.setattr(Roster, "_outlook", lambda *_: Outlook(0.0, 1.0, 1.0))
    monkeypatch.setattr(rules, "PROBE_AFTER", 2)
    monkeypatch.setattr(rules, "TRY_AFTER", 30)
    monkeypatch.setattr(Fastest, "choose", lambda choice, num_rows: 0)
    engine = engine_of("head", "model")
    request = engine.submit([3], SamplingParams(max_new_tokens=90))
    engine.collect()
    roster = View(engine).plan.roster
    assert request.error is None and roster.reasons and not roster.absent
    assert request.output_ids == engine.generate([3], 90, speculative=False).output_ids


# six prompts, most of which begin alike
BEGINNING = [(7 * place) % 20 for place in range(9)]
PROMPTS = [BEGINNING + [number] for number in range(3)] + [BEGINNING[:5] + [3], [4], BEGINNING + BEGINNING]


SLOW = ("model", "masks head", "block")


@pytest.mark.parametrize("name", ["head", "modules", "masks", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
def test_who_has_rested_for_long_drafts_as_if_it_had_not(name, monkeypatch):
    """Whenever it rests and reads again: among requests that run on, of which rows move, and prompts that begin alike;
    texts, greedy and sampled, are those of plain decoding."""
    coin, order, changes = random.Random(name), random.Random(1), Counter()
    review = Roster.review

    def counted(roster, known):
        resting, reading = review(roster, known)
        changes.update(resting=len(resting), reading=len(reading), drafting=len(known & roster._since.keys()))
        return resting, reading

    monkeypatch.setattr(Roster, "review", counted)
    monkeypatch.setattr(Roster, "_outlook", lambda *_: Outlook(coin.random() + 0.6, 0.7, 1.0))
    for rule, value in (("PROBE_AFTER", 2), ("SOON_AFTER", 12), ("TRY_AFTER", 24)):
        monkeypatch.setattr(rules, rule, value)
    at_random(monkeypatch)
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: 1)
    target, made = RowWalker(**SIZES), []

    def run(engine):
        for number in [order.randrange(len(PROMPTS)) for _ in range(60)]:
            params = SamplingParams(max_new_tokens=order.randrange(4, 24), seed=number, temperature=0.8 * (number % 2))
            made.append(engine.submit(PROMPTS[number], params))
            for _ in range(order.randrange(9)):
                engine.step()
        engine.collect()

    options = {"page_size": 4, "max_batch": 3, "prefill_chunk": 6, "num_steps": 2, "num_draft_tokens": 4}
    drafts = drafts_for(target, name, "model" if name == "head" else "head")
    assert check_drafts(drafts, name, target, options, run, monkeypatch) > 20
    plain = EAGLEInference(None, target, EAGLEConfig(method="naive"))
    asked = [SamplingParams(max_new_tokens=24, seed=number, temperature=0.8 * (number % 2)) for number in range(6)]
    texts = [plain.generate(*each).output_ids for each in zip(PROMPTS, asked)]
    for request in made:
        assert request.output_ids == texts[request.params.seed][: request.params.max_new_tokens]
    assert min(changes.values()) > 3, changes
