"""The pages of the KV pools: which requests hold them, and which hold what prompts with an equal beginning share.

A page that a prompt fills is the page of every prompt that begins with the same tokens. The draft reads token i + 1 in
the row of token i, next-token modules read further ahead: such a page is shared only if these tokens are equal, too.
Requests that arrive together share as well: the first one reads, and the others wait for it. A page that nobody uses
keeps its keys until its room is needed; the one that was used longest ago goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Prefix(NamedTuple):
    """Says what of a prompt may be shared."""

    prompt: Sequence[int]  # empty: nothing is shared
    kind: Hashable = None  # what reads the prompt beside the target: keys of one draft are not those of another
    ahead: int = 0  # tokens after a page's that its keys depend on
    most: int = 0  # tokens of the prompt that may be shared at most
    # of which the number of shared tokens must be a multiple. If it is not 1, it is a multiple of the page size, and so
    # is `most`: a request that found a part of a unit would write its pages again, while others use them
    unit: int = 1


@dataclass(eq=False, slots=True)
class SharedPage:
    """Holds what is known of a page: its key, its users, of whom the first one reads it, and whether it is read."""

    id: int
    key: tuple[Hashable, bytes]
    users: list[Held] = field(default_factory=list)
    is_read: bool = False


@dataclass(eq=False, slots=True)
class Held:
    """Holds the pages of a request: `ids` of all, of which the first may be others' as well."""

    prefix: Prefix
    ids: list[int] = field(default_factory=list)
    shared: list[SharedPage] = field(default_factory=list)
    num_ready: int = 0  # of the shared pages, from the first on, that have been read


class PrefixCache:
    """Hands out page ids 0 .. num_pages - 1. It lives on the host, so learning an id never waits for the device."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self._page_size = num_pages, page_size
        self._free = deque(range(num_pages))
        self._known: dict[tuple[Hashable, bytes], SharedPage] = {}
        self._unused: OrderedDict[SharedPage, None] = OrderedDict()  # in the order in which they were left

    @property
    def num_free(self) -> int:
        """Returns how many pages nobody uses, kept ones included."""
        return len(self._free) + len(self._unused)

    def has_room(self, prefix: Prefix, count: int) -> bool:
        """Returns whether a request gets `count` pages, with those that it shares."""
        if count - len(prefix.prompt) // self._page_size > self.num_free:  # whatever is found
            return False
        found = self._find(prefix)
        return count - len(found) <= self.num_free - sum(not page.users for page in found)

    def take(self, prefix: Prefix, count: int) -> Held:
        """Returns `count` pages, for which there `has_room`."""
        held = Held(prefix, shared=self._find(prefix))
        for page in held.shared:
            if not page.users:
                del self._unused[page]
            page.users.append(held)
        num_found = len(held.shared)
        held.ids = [page.id for page in held.shared] + self._allocate(count - num_found)
        above: Hashable = held.shared[-1] if held.shared else prefix.kind
        for id, (tokens, _) in zip(held.ids[num_found:], list(self._pages_of(prefix))[num_found:]):
            page = SharedPage(id, (above, tokens), [held])
            if self._known.setdefault(page.key, page) is not page:  # another prompt's, of which this one may share less
                break
            held.shared.append(page)
            above = page
        return held

    def give_back(self, held: Held) -> None:
        """Ends the use of these pages; the next user of a page that has not been read reads it."""
        for page in reversed(held.shared):  # the deepest are kept shortest, as they are of no use without the others
            page.users.remove(held)
            if page.users:
                continue
            if page.is_read and self._known.get(page.key) is page:
                self._unused[page] = None
            else:
                self._forget(page)
        self._free.extend(held.ids[len(held.shared) :])

    def start(self, held: Held) -> int | None:
        """Returns how many tokens need not be read; None while another request reads the next page."""
        while held.num_ready < len(held.shared) and held.shared[held.num_ready].is_read:
            held.num_ready += 1
        if held.num_ready < len(held.shared) and held.shared[held.num_ready].users[0] is not held:
            return None
        num_tokens = held.num_ready * self._page_size
        return num_tokens - num_tokens % held.prefix.unit

    def note_read(self, held: Held, num_tokens: int) -> None:
        """Records how many tokens of the prompt have been read."""
        num_pages = max(0, num_tokens + 1 - max(held.prefix.ahead, 1)) // self._page_size
        for page in held.shared[held.num_ready : num_pages]:
            page.is_read = True

    def forget(self) -> None:
        """Lets no other request share what there is, as its keys are no longer those of the models."""
        for page in list(self._unused):
            self._drop(page)
        self._known.clear()

    def _find(self, prefix: Prefix) -> list[SharedPage]:
        """Returns the pages that exist already of those that the prompt may share."""
        found, above = [], prefix.kind
        for tokens, stop in self._pages_of(prefix):
            page = self._known.get((above, tokens))
            if page is None or stop > prefix.most:
                break
            found.append(page)
            above = page
        return found

    def _pages_of(self, prefix: Prefix) -> Iterator[tuple[bytes, int]]:
        """Yields the tokens that each full page of the prompt depends on, but for those before it, and where it stops.
        The prompt's last token is always read, as the first new one is drawn after it."""
        size, ahead = self._page_size, max(prefix.ahead, 1)
        tokens = array("q", prefix.prompt)
        width, text = tokens.itemsize, tokens.tobytes()  # whose parts are hashed once
        for stop in range(size, len(prefix.prompt) - ahead + 1, size):
            yield text[(stop - size) * width : (stop + prefix.ahead) * width], stop

    def _allocate(self, count: int) -> list[int]:
        """Returns pages of `num_free`, those that were free longest first, and of the kept ones those left first."""
        while len(self._free) < count:
            self._drop(next(iter(self._unused)))
        return [self._free.popleft() for _ in range(count)]

    def _drop(self, page: SharedPage) -> None:
        del self._unused[page]
        self._forget(page)

    def _forget(self, page: SharedPage) -> None:
        if self._known.get(page.key) is page:
            del self._known[page.key]
        self._free.append(page.id)
