"""Pages: what a request finds in those that it shares is what it would have written there, and none is lost.

Random requests come, read, write and end, in a pool that is too small for them. Instead of a key a slot has a note of
what its key depends on. Requests ask for pages as those of the engine do, by `Reading` and `PrefixCache`.
"""

import copy
import itertools
import math
import os
import random
from types import SimpleNamespace

import pytest

from eagle_kernels.engine.batch.prefix_cache import PrefixCache, SharedPage
from eagle_kernels.engine.serve.reading import Reading
from op_tests.engine.view import free_ids


class Model(SimpleNamespace):
    """Stands for a reader whose keys depend on `ahead` more tokens."""


class Modules(Model):
    """Stands for one that reads the last rows of a part again, for the tokens that they lacked."""


READERS = (None, Model(ahead=0), Model(ahead=1), Modules(ahead=2), Modules(ahead=3))
CHUNKS = (2, 3, 6)


def reading_of(reader, page_size: int, chunk: int, is_deterministic: bool) -> Reading:
    config = SimpleNamespace(deterministic=is_deterministic, prefill_chunk=chunk)
    plain = SimpleNamespace(config=config, reads_several=not is_deterministic, on_tree=None)
    state = SimpleNamespace(
        target_pool=SimpleNamespace(page_size=page_size), lengths=SimpleNamespace(device="a device")
    )
    readers = [] if reader is None else [SimpleNamespace(number=0, reader=reader)]
    return Reading(SimpleNamespace(plain=plain, readers=readers), state, None, {})


def reader_of(row):
    return next((each.reader for each in row.reading._plan.readers), None)


class Row(SimpleNamespace):
    """Stands for a request in the batch; pages, which hold each other, are not shown."""

    def __repr__(self) -> str:
        return f"Row(number={self.number}, prompt={self.request.prompt}, {self.reading._plan.plain})"


class World:
    """Holds requests, their pages, and notes by page and slot: of the target's keys, and of the drafts'."""

    def __init__(self, coin: random.Random):
        self.coin, self.size, self.chunk = coin, coin.choice((1, 2, 3, 4)), coin.choice(CHUNKS)
        self.cache = PrefixCache(coin.randrange(14, 60) // self.size + 2, self.size)
        self.rows, self.target, self.draft = [], {}, {}
        self.numbers, self.epoch = itertools.count(), 0
        # pages that nobody uses, in the order in which they are to go
        self.kept: list[SharedPage] = []
        self.born: dict[SharedPage, int] = {}  # in which epoch; each ends when everything is forgotten
        kinds = coin.sample([*itertools.product(READERS, (False, True))], 2)
        self.readings = [reading_of(reader, self.size, self.chunk, is_whole) for reader, is_whole in kinds]
        self.texts = [coin.choices(range(3), k=24) for _ in range(2)]
        self.num_shared = self.num_dropped = self.num_refused = 0

    def submit(self) -> None:
        coin = self.coin
        prompt = coin.choice(self.texts)[: coin.randrange(1, 25)] + coin.choices(range(3), k=coin.randrange(3))
        first = coin.choice((None, None, coin.randrange(len(prompt))))
        request = SimpleNamespace(prompt=prompt, params=SimpleNamespace(logprob_start_len=first))
        reading, number = coin.choice(self.readings), next(self.numbers)
        prefix, count = reading.prefix(request), -(-(len(prompt) + coin.randrange(1, 6)) // self.size)
        try:
            copy.deepcopy(self.cache).take(prefix, count)
        except (StopIteration, IndexError):
            has_room = self.cache.has_room(prefix, count)
            assert not has_room
            self.num_refused += 1
            return
        has_room = self.cache.has_room(prefix, count)
        assert has_room
        num_free = len(self.cache._free)
        held = self.cache.take(prefix, count)
        assert len(held.ids) == len(set(held.ids)) == count
        found = [page for page in held.shared if page in self.born]
        self.born |= {page: self.epoch for page in held.shared if page not in found}
        self.kept = [page for page in self.kept if page not in found]
        # nothing that is kept goes without need, and what was left first goes first
        num_dropped = max(0, count - len(found) - num_free)
        dropped, self.kept = {page.id for page in self.kept[:num_dropped]}, self.kept[num_dropped:]
        assert dropped <= set(held.ids) and self.kept_ids() == [page.id for page in self.kept]
        self.num_dropped += num_dropped
        self.rows.append(
            Row(request=request, reading=reading, held=held, number=number, epoch=self.epoch, num_read=0, num_shared=0,
                text=[*prompt, *((number, place) for place in range(8))])
        )  # fmt: skip

    def kept_ids(self) -> list[int]:
        return [page.id for page in self.cache._unused]

    def write(self, notes: dict, row, places, note_of) -> None:
        for place in places:
            notes[row.held.ids[place // self.size], place % self.size] = (row.epoch, note_of(place))

    def read(self, row) -> bool:
        """Reads a part of a prompt, if it is this row's turn, and writes past the prompt's end once it is read."""
        if row.num_read == len(row.request.prompt):
            return False
        start, num_known = self.cache.start(row.held), row.num_read
        if start is None:
            return False
        if row.num_read == row.num_shared:
            row.num_read = row.num_shared = start
            self.num_shared += start - num_known
        first, plain = row.request.params.logprob_start_len, row.reading._plan.plain
        # the token before the first that is scored is read, and so is the prompt's last one
        num_shared, most = row.num_shared, len(row.request.prompt) - 1
        assert num_known <= row.num_read <= most and num_shared <= (most if first is None else max(0, first - 1))
        if plain.config.deterministic:
            ((_, size),) = row.reading.next_parts([row], is_beside=False, is_in_step=False)
        else:  # as much as there is time for
            size = self.coin.randrange(1, 1 + min(self.chunk, len(row.request.prompt) - row.num_read))
        begin, row.num_read = row.num_read, row.num_read + size
        self.write(self.target, row, range(begin, row.num_read), lambda place: self.note(row, place, (begin, size)))
        self.draft_keys(row, begin, row.num_read)
        self.cache.note_read(row.held, row.num_read)
        if row.num_read == len(row.request.prompt):
            most = min(len(row.text), len(row.held.ids) * self.size)
            self.write(self.target, row, range(row.num_read, most), lambda place: self.note(row, place, None))
            self.draft_keys(row, row.num_read, most)
        return True

    def draft_keys(self, row, begin: int, end: int) -> None:
        reader = reader_of(row)
        if reader is not None:
            again = reader.ahead - 1 if isinstance(reader, Modules) else 0
            rows = range(max(begin - again, row.num_shared), end)
            self.write(self.draft, row, rows, lambda place: self.draft_note(row, place, end))

    def note(self, row, place: int, part) -> tuple:
        """What a key of the target depends on; its bits also on the part that it was read in, which is its chunk."""
        return (row.text[: place + 1], part if row.reading._plan.plain.config.deterministic else None)

    def draft_note(self, row, place: int, end: int) -> tuple:
        reader = reader_of(row)
        return (type(reader), reader.ahead, row.text[: min(place + reader.ahead, end) + 1])

    def end(self, row) -> None:
        self.rows.remove(row)
        for page in reversed(row.held.shared):
            if page.users == [row.held] and page.is_read and self.born[page] == self.epoch:
                self.kept.append(page)
        self.cache.give_back(row.held)

    def forget(self) -> None:
        self.epoch += 1
        self.kept.clear()
        self.cache.forget()

    def check(self) -> None:
        held = {page for row in self.rows for page in row.held.ids}
        assert sorted([*free_ids(self.cache), *held]) == list(range(self.cache.num_pages))
        assert self.cache.num_free == self.cache.num_pages - len(held)
        assert self.kept_ids() == [page.id for page in self.kept]
        for page in self.kept:  # which is of no use without the one above it
            above = page.key[0]
            is_known = not isinstance(above, SharedPage) or self.cache._known.get(above.key) is above
            assert is_known
        for row in self.rows:
            reader, prompt = reader_of(row), row.request.prompt
            for place in range(row.num_read):
                slot = row.held.ids[place // self.size], place % self.size
                begin = place // self.chunk * self.chunk
                part = begin, min(self.chunk, len(prompt) - begin)
                epoch, note = self.target.get(slot, (-1, None))
                assert epoch >= row.epoch and note == self.note(row, place, part)
                # what is shared is not read again
                if reader is not None and (place < row.num_shared or place + reader.ahead <= row.num_read):
                    epoch, note = self.draft.get(slot, (-1, None))
                    assert epoch >= row.epoch and note == self.draft_note(row, place, len(row.text))


@pytest.mark.parametrize("seed", range(4))
def test_pages_hold_what_their_requests_would_have_written(seed):
    """Of all kinds of readers at once, with prompts that are scored, evictions, and requests that are given up."""
    shared = dropped = refused = 0
    for number in range(40):
        world = World(random.Random(f"{seed} {number}"))
        for _ in range(120):
            act = world.coin.random()
            if act < 0.35 and len(world.rows) < 6:
                world.submit()
            elif act < 0.8 and world.rows:
                world.read(world.coin.choice(world.rows))
            elif act < 0.98 and world.rows:
                world.end(world.coin.choice(world.rows))
            elif act > 0.98:
                world.forget()
            world.check()
        unread = [row for row in world.rows if row.num_read < len(row.request.prompt)]
        for _ in range(600):  # nobody waits for ever
            unread = [row for row in unread if row.num_read < len(row.request.prompt)]
            assert not unread or any([world.read(row) for row in unread])
        for row in list(world.rows):
            world.end(row)
        world.check()
        num_free, num_pages = world.cache.num_free, world.cache.num_pages
        assert not unread and num_free == num_pages
        shared, dropped, refused = shared + world.num_shared, dropped + world.num_dropped, refused + world.num_refused
    assert min(shared, dropped, refused) > 100, (shared, dropped, refused)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_all_that_is_known_is_shared(is_deterministic):
    """With room for all: whole pages, or whole chunks where bits depend on these, that an earlier prompt has alike."""
    coin, num_shared = random.Random(1), 0
    for reader, size, chunk in itertools.product(READERS, (1, 2, 4), CHUNKS):
        cache, reading, known = PrefixCache(400, size), reading_of(reader, size, chunk, is_deterministic), []
        ahead, unit = 0 if reader is None else reader.ahead, math.lcm(size, chunk) if is_deterministic else 1
        text = coin.choices(range(9), k=40)

        def whole(prompt, ahead=ahead, unit=unit):
            return (len(prompt) - max(ahead, 1)) // unit * unit

        for number in range(12):
            prompt = text[: coin.randrange(1, 41)] + coin.choices(range(9), k=coin.randrange(6))
            first = coin.choice((None, coin.randrange(len(prompt)))) if number % 2 else None
            request = SimpleNamespace(prompt=prompt, params=SimpleNamespace(logprob_start_len=first))
            # one that is scored may share less than there is, and then has pages of its own, which nobody shares
            cache, before = (cache, None) if first is None else (copy.deepcopy(cache), cache)
            held = cache.take(reading.prefix(request), len(prompt) // size + 1)
            most, want = whole(prompt) if first is None else min(whole(prompt), max(first, 1) - 1), 0
            for other in known:
                alike = len(os.path.commonprefix([prompt, other])) - ahead
                want = max(want, min(alike, most, whole(other)) // size * size // unit * unit)
            start = cache.start(held)
            assert start == want, (reader, size, chunk, prompt, known)
            num_shared += want
            if first is not None:
                cache = before
                continue
            known.append(prompt)
            cache.note_read(held, len(prompt))
            if coin.random() < 0.5:
                cache.give_back(held)
    assert num_shared > 500
