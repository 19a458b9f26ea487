"""Limits hold to one token, one page, one byte and one request; the host waits for what it must wait for alone."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from eagle_kernels import SamplingParams
from eagle_kernels.engine.drafters import methods, readers
from eagle_kernels.engine.serve import memory
from eagle_kernels.engine.serve import scheduler as serving
from eagle_kernels.engine.serve.threads import running
from eagle_kernels.engine.step.choice import Choice
from eagle_kernels.engine.step.runner import Launch, StepRunner, bucket_of
from op_tests.engine.engines import make
from op_tests.engine.toys import RowWalker, WalkerHead
from op_tests.engine.view import View

TREES = {
    "plain": {"method": "naive"},
    "chain": {"topk": 1, "num_steps": 3},
    "tree": {"topk": 2, "num_steps": 2},
    "table": {"adaptive": ((1, (2, 2, 6)), (9, (1, 2, 3)))},
}


def walkers(**config):
    draft = None if config.get("method") == "naive" else WalkerHead(seed=1)
    return make(draft, RowWalker(), **{"page_size": 4, "max_batch": 4} | config)


def page_bytes(engine):
    return memory._page_bytes(engine.target, engine.session.pooled_drafts(engine.config), engine.config)


def scheduler_of(engine):
    engine.submit([1], SamplingParams(max_new_tokens=1))
    engine.collect()
    return View(engine).scheduler


@pytest.mark.parametrize("tree", TREES)
def test_pools_hold_the_requests_that_they_have_pages_for(tree):
    """One that fills the pool runs to its end, as do several that fill it together; one token more never does."""
    size = page_bytes(walkers(**TREES[tree]))
    engine = walkers(**TREES[tree], kv_cache_bytes=17 * size - 1)
    scheduler = scheduler_of(engine)
    overshoot, most = scheduler.plan.overshoot, scheduler.most_tokens()
    assert scheduler.pages.num_pages == 16 and most == 64 - overshoot
    for prompt_length in (1, 30, most - 1):
        prompt, room = [number % 40 for number in range(prompt_length)], most - prompt_length
        fits, too_long = (engine.submit(prompt, SamplingParams(max_new_tokens=count)) for count in (room, room + 1))
        engine.collect()
        assert fits.error is None and len(fits.output_ids) == room
        assert "but the pool has 16" in too_long.error and not too_long.output_ids
    for count in (2, 4):
        params = SamplingParams(max_new_tokens=64 // count - overshoot - 1)
        requests = [engine.submit([1], params) for _ in range(count)]
        one_more = engine.submit([1], SamplingParams(max_new_tokens=1))
        assert scheduler.holds(requests) and not scheduler.holds([*requests, one_more])
        scheduler.step(True, [*requests, one_more])  # which reads their prompts
        assert [row.request for row in View(engine).rows] == requests and not scheduler.is_reading
        engine.collect()
        assert all(request.finish_reason == "length" for request in [*requests, one_more])
        assert scheduler.pages.num_free == 16


SHAPES = [(2, 2, 6), (2, 1, 3), (2, 4, 9)]


@pytest.mark.parametrize("trees", [*itertools.permutations(SHAPES)], ids=str)
def test_the_largest_tree_of_a_table_has_room(trees):
    """In whichever order: the last token has the slots that it needs, and is that of plain decoding."""
    alone = {shape: scheduler_of(walkers(adaptive=((9, shape),))).plan.overshoot for shape in SHAPES}
    assert len({*alone.values()}) == len(SHAPES)
    config = {"adaptive": tuple(zip((1, 2, 9), trees))}
    engine = walkers(**config, kv_cache_bytes=8 * page_bytes(walkers(**config)))
    scheduler = scheduler_of(engine)
    assert scheduler.plan.overshoot == max(alone.values())
    room = scheduler.most_tokens() - 1
    fits, too_long = (engine.submit([1], SamplingParams(max_new_tokens=count)) for count in (room, room + 1))
    engine.collect()
    assert fits.output_ids == walkers(method="naive").generate([1], room).output_ids
    assert "but the pool has" in too_long.error


@pytest.mark.parametrize("trees", [*itertools.permutations([(6, 2, 12), (2, 1, 3), (2, 4, 9)])], ids=str)
def test_sizes_of_a_table_are_the_largest_of_its_trees(trees):
    """Depth and nodes each by itself, since the deepest tree need not be the one with the most nodes."""
    stats = walkers(adaptive=tuple(zip((1, 2, 9), trees))).generate([1], 2).stats
    assert (stats.num_steps, stats.num_draft_tokens, len(stats.accepted_per_depth)) == (4, 12, 4)


DEEP = [(1, 120, 121), (1, 2, 3), (2, 70, 100)]


@pytest.mark.parametrize("trees", [DEEP, DEEP[1:] + DEEP[:1], DEEP[::-1]], ids=str)
def test_requests_of_full_length_fit_with_the_deepest_tree(trees):
    """In whichever place of a table it is, and where a call asks for it after others with less deep ones."""
    fields = {"method": "ngram", "min_ngram_size": 1, "max_length": 16}
    plain, whole = walkers(method="naive").generate([30], 15).output_ids, SamplingParams(max_new_tokens=15)
    tables = [tuple(zip((1, 2, 9), trees)), *(((9, tree),) for tree in trees)]
    engine = walkers(**fields, adaptive=tables[0])
    for table in tables:
        stream, scheduler = engine.stream([30], whole, adaptive=table), View(engine).scheduler
        assert scheduler.state.block_table.shape[1] >= -(-(16 + scheduler.plan.overshoot) // 4)
        assert [event.token_id for event in stream] == plain


@pytest.mark.parametrize("max_batch", [1, 2, 3])
def test_as_many_requests_step_as_may(max_batch):
    """No fewer and no more, while others wait; a batch of them is held, and one more is not."""
    engine = walkers(max_batch=max_batch, topk=1, num_steps=1)
    scheduler, widths = scheduler_of(engine), []
    requests = [engine.submit([number], SamplingParams(max_new_tokens=6)) for number in range(2 * max_batch + 1)]
    assert scheduler.holds(requests[:max_batch]) and not scheduler.holds(requests[: max_batch + 1])
    while engine.has_work:
        engine.step()
        widths.append(len(scheduler.stepping))
    assert max(widths) == max_batch and all(len(request.output_ids) == 6 for request in requests)


@pytest.mark.parametrize("tree", TREES)
def test_the_bytes_that_are_free_suffice(tree, monkeypatch):
    """All of them, and not one fewer; pools have the pages that their bytes hold, one at least, and no more than rows
    have use of."""
    engine = walkers(**TREES[tree])
    size = page_bytes(engine)
    arguments = engine.target, engine.session.pooled_drafts(engine.config), engine.config
    sizes = memory.workspace_bytes(*arguments, 9, 20)
    needed = sizes["kv_cache"] + sizes["rows"]
    assert sizes["kv_cache"] == 20 * size and sizes["total"] == needed + sizes["step"]
    for free, fits in ((needed, True), (needed + 1, True), (None, True), (needed - 1, False)):
        monkeypatch.setattr(memory, "free_memory_bytes", lambda device, free=free: free)
        try:
            memory.check_fits(*arguments, 9, 20)
            reason = ""
        except ValueError as error:
            reason = str(error)
        assert (not reason) == fits and ("must fit into free memory" in reason) != fits
    for budget, pages in ((1, 1), (size - 1, 1), (2 * size - 1, 1), (2 * size, 2), (36 * size, 36), (99 * size, 36)):
        config = engine.session.read_overrides("generate", engine.config, {"kv_cache_bytes": budget})[0]
        assert memory.count_pages(*arguments[:2], config, 9) == pages
    monkeypatch.setattr(memory, "_CPU_CACHE_BYTES", 7 * size)
    assert memory.count_pages(*arguments, 9) == 7


BATCHES = [{"max_batch": count, "max_spec_batch": most} for count in (1, 2, 5) for most in (None, 0, 1, 2, 3, 64)]
BATCHES += [{"max_batch": count, "adaptive": ((1, (2, 3, 7)), (4, (1, 2, 3)), (64, None))} for count in (1, 2, 5)]
BATCHES += [{"max_batch": count, "adaptive": ((1, (1, 1, 2)), (2, None), (4, (2, 3, 7)))} for count in (1, 2, 3)]
BATCHES += [{"max_batch": 5, "adaptive": ((2, None), (3, (2, 2, 5)), (9, (1, 2, 3)))}]


def test_the_bytes_of_the_largest_step_are_those_of_its_logits():
    """However many rows may step, and may have drafts: of all steps that there are while requests end one by one."""
    engine = make(None, RowWalker(), method="ngram", topk=2, num_steps=2, cuda_graph=False)
    counted, sizes = {}, []
    engine.on_tree = lambda step: sizes.append(step.logits.nbytes)
    for fields in BATCHES:
        sizes.clear()
        params = [SamplingParams(max_new_tokens=2 + 4 * place) for place in range(fields["max_batch"])]
        engine.generate([[1 + place] for place in range(len(params))], params, **fields)
        counted[str(fields)] = engine.workspace_bytes(replace(engine.config, **fields))["step"], max(sizes)
    assert [case for case, (said, held) in counted.items() if said != held] == [], counted


def test_what_is_done_is_read_and_nothing_is_waited_for(monkeypatch):
    """However the device has got on, of which the host is three steps ahead; requests that run are not drained."""
    monkeypatch.setattr(serving, "host_lag", lambda device: 3)
    done = set()
    monkeypatch.setattr(Launch, "is_done", property(lambda launch: launch in done))
    engine = walkers(topk=1, num_steps=1, phase_times=False)
    request = engine.submit([1], SamplingParams(max_new_tokens=90))
    view, scheduler = View(engine), View(engine).scheduler
    with running(engine.target):
        for flags in itertools.product((False, True), repeat=3):
            while len(view.unread) < 3:
                engine.step()
            unread, num_tokens = view.unread, len(request.output_ids)
            done |= {launch for launch, is_done in zip(unread, flags) if is_done}
            num_done = next((number for number, launch in enumerate(unread) if launch not in done), 3)
            scheduler.drain()
            assert view.unread == unread
            scheduler.read_what_is_done()
            assert view.unread == unread[num_done:]
            assert num_done <= len(request.output_ids) - num_tokens <= 2 * num_done
            engine.step()
        engine.abort(request)
        scheduler.drain()
    assert not engine.has_work


@pytest.mark.parametrize("lag", [0, 1])
def test_steps_are_noted_as_they_were(lag, monkeypatch):
    """Their rows, tokens and times, those of the first of a kind excepted; and drafts catch up where it is time to."""
    events, read, noted, coin = [], [], [], random.Random(lag)
    monkeypatch.setattr(serving, "host_lag", lambda device: lag)
    for module in (methods, readers):
        monkeypatch.setattr(module, "CATCH_UP_EVERY", 3)

    def watch(owner, name, tell):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args: tell(self, *args) or call(self, *args))

    def tell(name):
        return lambda runner, *args: events.append((name, View(engine).plan, runner, *args))

    watch(StepRunner, "run", tell("run"))
    watch(StepRunner, "catch_up", tell("catch up"))
    watch(Choice, "note", lambda choice, *args: noted.append(args))
    monkeypatch.setattr(Choice, "choose", lambda choice, num_rows: coin.randrange(2))
    read_launch = Launch.read
    monkeypatch.setattr(Launch, "read", lambda launch: read.append((launch, read_launch(launch))) or read[-1][1])
    engine = walkers(topk=1, num_steps=2, phase_times=False, prefill_chunk=6)
    for number in range(14):
        params = SamplingParams(max_new_tokens=coin.choice((2, 9, 20)), temperature=coin.choice((0.0, 0.0, 1.0)))
        engine.submit([coin.randrange(40) for _ in range(coin.choice((1, 2, 9)))], params)
        for _ in range(coin.choice((0, 1, 5))):
            engine.step()
        if number % 5 == 4:  # other steps, and these again
            engine.collect()
            engine.is_speculating = False
            list(engine.stream([[1], [2]], 6))
            engine.is_speculating = True
            list(engine.stream([1, 2], 9, num_steps=1))
    engine.collect()
    runs = [event for event in events if event[0] == "run"]
    steps = [(launch, [len(result.tokens) for _, result in rows]) for launch, rows in read if launch.number is not None]
    assert len(runs) == len(noted) == len(steps) == View(engine).num_steps
    missed, plan, caught_up, known, has_gaps = 0, None, [], set(), False
    for event in events:
        if event[0] == "catch up":
            caught_up.append(event[2:])
            continue
        _, now, runner, num_rows, features, prompts = event
        if now is not plan:
            missed, plan = 0, now
        drafts = runner is not plan.runners[0]
        is_due = missed > 0 and (drafts or missed == 3)
        assert caught_up == [(plan.runners[0], num_rows, drafts, 0)] * is_due
        missed, caught_up = (0 if is_due else missed) + (not drafts), []
        (number, most_rows, step_ms, mean_tokens), (launch, tokens) = noted.pop(0), steps.pop(0)
        kind = id(runner), bucket_of(num_rows, 4), features, prompts is not None
        assert (number, most_rows) == (int(drafts), num_rows) and num_rows == 1 + max(row for row, _ in launch.rows)
        assert mean_tokens == sum(tokens) / len(tokens) and (step_ms is None) == (kind not in known)
        known.add(kind)
        has_gaps |= num_rows > len(tokens)
    assert View(engine).scheduler.num_cold_steps == len(known) and has_gaps


@pytest.mark.parametrize("chunk", [50, 64, 2048])
def test_few_steps_read_what_few_steps_can(chunk):
    """The tokens that four of them hold, and up to 32 prompts; with one more of either they are read apart."""
    engine = walkers(topk=1, num_steps=1, prefill_chunk=chunk)
    reading, params = scheduler_of(engine).reading, SamplingParams()
    most = 4 * min(chunk, 64 if chunk <= 64 else 192)

    def reads(*lengths, num_rows=1):
        requests = [SimpleNamespace(prompt=[0] * (3 + length), params=params) for length in lengths]
        rows = [SimpleNamespace(request=each, num_read=3, number=number) for number, each in enumerate(requests)]
        return reading.is_in_step(rows, num_rows)

    assert reads(most - 1, 1) and not reads(most, 1)
    assert reads(*[1] * 32) and not reads(*[1] * 33)
    size = reading.joint_size([(None, min(chunk, 192))])
    assert reads(most + 1, num_rows=256 - size) and not reads(most + 1, num_rows=257 - size)
    engine.on_tree = lambda step: None  # who looks at trees would see some twice
    assert not scheduler_of(engine).reading.is_in_step([], 1) and not View(engine).reading.is_joint
