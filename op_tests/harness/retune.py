"""Other numbers in a tuning table, for all architectures alike, that a test may ask for what it needs."""

from typing import Any

from eagle_kernels.runtime import launch, target


def retune(monkeypatch: Any, table: dict, **numbers: int) -> None:
    """Every row of an op's tuning `table`, or every one of several, with these numbers."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)  # earlier calls have planned with the numbers of then
    for architecture, rows in table.items():
        is_one = isinstance(rows, dict)
        changed = tuple(row | numbers for row in ((rows,) if is_one else rows))
        monkeypatch.setitem(table, architecture, changed[0] if is_one else changed)


def assume_multiprocessors(monkeypatch: Any, number: int) -> None:
    """A GPU of so many: attention cuts the keys of a batch into as many chunks as programs run at once."""
    monkeypatch.setattr(launch, "_can_plan", lambda: False)
    monkeypatch.setattr(target, "num_multiprocessors", lambda device: number)
