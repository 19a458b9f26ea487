"""Which version of a framework is installed, and whether a plug-in was checked with it."""

import importlib
import importlib.metadata
import re


def installed_version(package: str) -> str:
    """Returns the version of the package that Python would import."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return importlib.import_module(package).__version__


def is_taken(package: str, title: str, tested: tuple[str, ...], variable: str, is_forced: bool, logger) -> bool:
    """Tells whether a plug-in takes the installed version, and logs where it does not.
    variable: of the environment, forces it to."""
    version = installed_version(package)
    if is_forced or is_supported(version, tested):
        return True
    logger.warning(
        "eagle_kernels: %s %s is outside of %s, which the plug-in was checked with: nothing is replaced; "
        "%s=1 tries anyway, and `python -m eagle_kernels env` says what differs",
        title, version, spans(tested), variable,
    )  # fmt: skip
    return False


def is_supported(version: str, tested: tuple[str, ...]) -> bool:
    """Tells whether a version lies in a range of those that a plug-in was checked with.
    tested: the first and the last of each range, one after the other."""
    return any(_numbers(first) <= _numbers(version) <= _numbers(last) for first, last in _ranges(tested))


def is_first(version: str, tested: tuple[str, ...]) -> bool:
    """Tells whether a version is the first of those that a plug-in was checked with, which was run as well."""
    return _numbers(version) == _numbers(tested[0])


def spans(tested: tuple[str, ...]) -> str:
    """Returns the ranges of versions as text."""
    return " and ".join(f"{first}..{last}" for first, last in _ranges(tested))


def _ranges(tested: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(tested[::2], tested[1::2]))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))
