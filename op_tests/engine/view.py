"""What tests see of an engine that has run: requests, pages, steps and trees, wherever the engine keeps them."""


def free_ids(pages) -> list[int]:
    """Ids of the pages of a `PrefixCache` that nobody uses, kept ones included."""
    return [*pages._free, *(page.id for page in pages._unused)]


class View:
    """The session's scheduler, and what of it tests ask about; it follows an engine to another configuration."""

    def __init__(self, engine):
        self._session = engine.session

    @property
    def scheduler(self):
        return self._session.scheduler

    @property
    def state(self):
        """The tensors of the rows and of the pools."""
        return self.scheduler.state

    @property
    def pages(self):
        return self.scheduler.pages

    @property
    def plan(self):
        return self.scheduler.plan

    @property
    def reading(self):
        """Which prompts are read next, and how much of them."""
        return self.scheduler.reading

    @property
    def num_steps(self) -> int:
        return self.scheduler.num_steps

    @property
    def rows(self) -> list:
        """Rows of the batch in which there is a request."""
        return [row for row in self.scheduler._rows if row is not None]

    @property
    def waiting(self) -> list:
        """Requests that have no row yet."""
        return list(self.scheduler._waiting)

    @property
    def unread(self) -> list:
        """Steps that were launched and whose tokens the host has not read."""
        return list(self.scheduler._unread)

    @property
    def runners(self) -> tuple:
        """One for each tree of the plan, plain steps first."""
        return self.plan.runners

    @property
    def nodes(self) -> list:
        """The nodes of a request's tree in steps of each runner, in the mean."""
        return [runner.stepper.mean_nodes for runner in self.runners]

    @property
    def pages_held(self) -> set[int]:
        """Pages of the requests in the batch; some belong to several."""
        return {page for row in self.rows for page in row.pages.ids}

    def check_pages(self) -> None:
        """Asserts that every page is free or in use, and none of them twice."""
        pages = sorted([*free_ids(self.pages), *self.pages_held])
        assert pages == list(range(self.pages.num_pages)), (
            f"{self.pages.num_pages} pages, but free or in use are {pages}"
        )

    def check_is_empty(self) -> None:
        """Asserts that nobody has a row, a page or a place in the line."""
        self.check_pages()
        assert self.pages.num_free == self.pages.num_pages
        assert not (self.rows or self.waiting or self.unread) and not self.state.is_live.any()
        assert (self.state.block_table == -1).all()
