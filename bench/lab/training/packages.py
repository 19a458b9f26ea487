"""The corpus of the small pair: the Python files of installed packages under BSD, Apache and PSF licences.

A list in this folder (`packages.json`) names packages with a hash of their sources; whoever has the same ones trains on
the same text. A hash of its path decides whether a file is held out.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from .corpus import MAX_FILE_BYTES, Corpus, SourceFile

LIST = Path(__file__).parent / "packages.json"
_KNOWN = re.compile(r"\b(BSD|Apache|PSF|Python Software Foundation)\b", re.IGNORECASE)
_PARTS = re.compile(r"\s+(?:AND|OR)\s+|\s*[;,/]\s*|[()]", re.IGNORECASE)


class Package(NamedTuple):
    """Names an installed package, its licence, and its files by their paths below the folder of packages."""

    name: str  # with the version, as NAME==VERSION
    licence: str
    files: list[SourceFile]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{hashlib.sha256(file.contents).hexdigest()}  {file.path}\n".encode())
        return digest.hexdigest()


def licence_of(package: metadata.Distribution) -> str | None:
    """Returns the licence where all that the package names are BSD, Apache or PSF; None for any other."""
    told = package.metadata
    expression, short = told.get("License-Expression"), (told.get("License") or "").strip()
    classes = [each.rpartition("::")[2].strip() for each in told.get_all("Classifier") or []
               if each.startswith("License ::")]  # fmt: skip
    classes = [each for each in classes if each != "OSI Approved"]
    if expression:
        parts = [part for part in _PARTS.split(expression) if part and part.strip()]
    elif classes:
        parts = classes
    else:  # a field that may hold a whole licence: its first line
        parts = short.splitlines()[:1]
    return ", ".join(parts) if parts and all(map(_KNOWN.search, parts)) else None


def read_packages(folder: Path | None = None) -> list[Package]:
    """Returns the packages of a folder (None: those that this Python imports) that may be learnt from, by name."""
    found = {}
    for package in metadata.distributions() if folder is None else metadata.distributions(path=[str(folder)]):
        name, licence = package.metadata["Name"], licence_of(package)
        if name is None or licence is None:
            continue
        files = []
        for path in sorted(path.as_posix() for path in package.files or [] if path.suffix == ".py"):
            place = Path(str(package.locate_file(path)))
            is_inside = not path.startswith("..") and place.is_file()
            contents = place.read_bytes() if is_inside and place.stat().st_size <= MAX_FILE_BYTES else b""
            if contents and _is_text(contents):
                files.append(SourceFile(path, contents))
        if files:
            found[f"{name.lower()}=={package.version}"] = Package(f"{name.lower()}=={package.version}", licence, files)
    return [found[name] for name in sorted(found)]


def corpus_of(packages: list[Package]) -> Corpus:
    """Returns the files of packages, each contents once; raises ValueError if either side of the split is empty."""
    seen, files, digest = set(), [], hashlib.sha256()
    for package in packages:
        digest.update(f"{package.name} {package.sha256}\n".encode())
        for file in package.files:
            key = hashlib.sha256(file.contents).digest()
            if key not in seen:
                seen.add(key)
                files.append(file)
    sides = [[file for file in files if file.is_held_out == held_out] for held_out in (False, True)]
    if not all(sides):
        told = f"{len(sides[0])} training and {len(sides[1])} held-out files"
        raise ValueError(f"packages under BSD, Apache and PSF licences give {told}, both need 1")
    return Corpus(*sides, sha256=digest.hexdigest())


def listed(packages: list[Package]) -> dict[str, dict[str, str | int]]:
    """Returns what `packages.json` says of packages."""
    return {
        package.name: {"licence": package.licence, "files": len(package.files), "sha256": package.sha256}
        for package in packages
    }


def tell_differences(packages: list[Package], known: dict[str, dict[str, str | int]]) -> str | None:
    """Returns in a line how packages differ from those that are listed; None: they are the same."""
    ours = listed(packages)
    others = sorted(name for name in ours.keys() & known.keys() if ours[name]["sha256"] != known[name]["sha256"])
    parts = {"more": sorted(ours.keys() - known.keys()), "fewer": sorted(known.keys() - ours.keys()),
             "with other files": others}  # fmt: skip
    told = [f"{len(names)} {how} ({', '.join(names[:4])}{', ..' if len(names) > 4 else ''})"
            for how, names in parts.items() if names]  # fmt: skip
    return f"packages differ from {LIST.name}: {'; '.join(told)}" if told else None


def read_list() -> dict[str, dict[str, str | int]]:
    return json.loads(LIST.read_text(encoding="utf-8")) if LIST.is_file() else {}


def _is_text(contents: bytes) -> bool:
    try:
        contents.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
