"""What a plug-in relies on in a framework: entries of a table that is held against sources, which are not imported."""

import functools
from collections.abc import Callable, Iterable, Iterator

from .hooks import Hook
from .sources import Sources

Rule = Callable[[Sources], "str | None"]  # says why something does not hold
Entry = list[tuple[str, Rule]]  # rules with their names


def names(owner: str, wanted: tuple[str, ...], members: str = "") -> Entry:
    """Requires of a module or class what ours reads, calls, sets or overrides of it.
    members: a list of classes in the sources whose fields are the owner's too."""

    def fault(sources: Sources, name: str) -> str | None:
        if sources.find(owner) is None:
            return f"{owner} does not exist"
        owners = (owner, *(sources.listed(members) if members else ()))
        is_known = any(sources.find(f"{each}.{name}") is not None for each in owners)
        return None if is_known else f"{owner} has no {name}"

    return [(f"{short(owner)}.{name}", functools.partial(fault, name=name)) for name in wanted]


def call(target: str, first: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> Entry:
    """Requires that a function or class which ours calls takes these parameters, the first of them at the front."""

    def fault(sources: Sources) -> str | None:
        found = sources.parameters(target)
        if found is None:
            return f"{target} is not a function"
        if found[: len(first)] != first:
            return f"{target} takes {', '.join(found)}; expected first {', '.join(first)}"
        missing = [name for name in others if name not in found]
        return f"{target} takes no {', '.join(missing)}" if missing else None

    return [(f"{short(target)}()", fault)]


def takes(target: str, *parameters: tuple[str, ...]) -> Entry:
    """Requires that a function takes these parameters and no others, or those of another version: ours overrides it,
    or gives it all of them."""

    def fault(sources: Sources) -> str | None:
        found = sources.parameters(target)
        expected = "; or ".join(", ".join(each) or "none" for each in parameters)
        if found is None:
            return f"{target} is not a function"
        return None if found in parameters else f"{target} takes {', '.join(found)}; expected {expected}"

    return [(f"{short(target)}()", fault)]


def either(*targets: str) -> Entry:
    """Requires that one of these names exists, since versions differ."""

    def fault(sources: Sources) -> str | None:
        is_known = any(sources.find(target) is not None for target in targets)
        return None if is_known else f"there is neither {' nor '.join(targets)}"

    return [(" or ".join(map(short, targets)), fault)]


def where(target: str, there: Iterable[Entry], otherwise: Iterable[Entry] = ()) -> Entry:
    """Requires some entries of versions in which a name exists, and others of those in which it does not."""

    def fault(sources: Sources, rule: Rule, is_there: bool) -> str | None:
        return rule(sources) if (sources.find(target) is not None) == is_there else None

    return [
        (name, functools.partial(fault, rule=rule, is_there=is_there))
        for entries, is_there in ((there, True), (otherwise, False))
        for entry in entries
        for name, rule in entry
    ]


def value(target: str, expected: object) -> Entry:
    """Requires of a constant that it is this, and of a Literal that these are its choices."""

    def fault(sources: Sources) -> str | None:
        found = sources.constant(target)
        return None if found == expected else f"{target} is {found!r}; expected {expected!r}"

    return [(short(target), fault)]


def listed(function: str, name: str) -> Entry:
    """Requires of a function that a list of classes in it has this one."""

    def fault(sources: Sources) -> str | None:
        return None if name in sources.names_in_lists(function) else f"{function} has no list with {name}"

    return [(f"{name} in {short(function)}", fault)]


def contains(function: str, code: str) -> Entry:
    """Requires of a function that this is in it, as `ast` writes it."""

    def fault(sources: Sources) -> str | None:
        return None if code in sources.code(function) else f"{function} does not contain {code}"

    return [(f"{code} in {short(function)}", fault)]


def last_refusal(function: str, words: tuple[str, ...], allowed: str) -> Entry:
    """Requires that a function ends with a ValueError of these words, unless a name is in a tuple."""

    def fault(sources: Sources) -> str | None:
        condition, text = sources.last_refusal(function)
        missing = [] if allowed in condition else [allowed]
        missing += [part for part in words if part not in text]
        return f"the last statement of {function} is no ValueError with {missing}" if missing else None

    return [(f"last statement of {short(function)}", fault)]


def short(target: str) -> str:
    """Returns the last two names of a path."""
    return ".".join(target.split(".")[-2:])


def of_hook(hook: Hook) -> Entry:
    """Returns what is required of a function that is hooked."""
    return call(hook.target, hook.parameters)


def rules(hooks: Iterable[Hook], entries: Iterable[Entry]) -> Iterator[tuple[str, Rule]]:
    """Yields all that must hold, of hooks too: a name, and what says of sources why it does not hold, or None."""
    for hook in hooks:
        yield from ((f"hook {name}", rule) for name, rule in of_hook(hook))
    for entry in entries:
        yield from entry


def differences(sources: Sources, entries: Iterable[Entry]) -> list[str]:
    """Returns what of these entries does not hold in the sources."""
    found = (rule(sources) for entry in entries for _, rule in entry)
    return [fault for fault in found if fault is not None]
