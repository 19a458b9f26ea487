"""The sources of released versions of servers, out of wheels: of those on the index single files by HTTP ranges.

A wheel of vLLM has 300 MB, and the files that its plug-in relies on have 2.
"""

import functools
import http.client
import io
import json
import os
import re
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_kernels.integrations.shared.sources import Sources

INDEX = "https://pypi.org/simple"
ENDINGS = ("-any.whl", "_x86_64.whl")  # of file names


class RemoteFile(io.RawIOBase):
    """A file at an https address, read by ranges over one connection."""

    def __init__(self, address: str):
        parts = urllib.parse.urlsplit(address)
        self.connection = http.client.HTTPSConnection(parts.netloc, timeout=60)
        self.path, self.place = parts.path, 0
        self.size = int(self._ask("bytes=0-0").headers["Content-Range"].rpartition("/")[2])

    def _ask(self, wanted: str) -> http.client.HTTPResponse:
        try:
            response = self._answer(wanted)
        except (ConnectionError, http.client.HTTPException):  # the server closed what was idle
            self.connection.close()
            response = self._answer(wanted)
        if response.status != 206:
            self.connection.close()  # instead of reading all of it
            raise OSError(f"{self.connection.host} serves no ranges: {response.status} {response.reason}")
        self.content = response.read()
        return response

    def _answer(self, wanted: str) -> http.client.HTTPResponse:
        self.connection.request("GET", self.path, headers={"Range": wanted})
        return self.connection.getresponse()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def readinto(self, buffer) -> int:
        stop = min(self.place + len(buffer), self.size)
        if stop <= self.place:
            return 0
        self._ask(f"bytes={self.place}-{stop - 1}")
        buffer[: len(self.content)] = self.content
        self.place += len(self.content)
        return len(self.content)


def open_wheel(package: str, version: str) -> io.BufferedReader:
    """Opens a version's wheel for this kind of machine on the index, as zipfile takes it; raises OSError."""
    request = urllib.request.Request(f"{INDEX}/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        files = json.load(response)["files"]
    for file in files:
        if file["filename"].startswith(f"{package}-{version}-") and file["filename"].endswith(ENDINGS):
            return io.BufferedReader(RemoteFile(file["url"]), buffer_size=1 << 16)
    raise OSError(f"{INDEX} has none")


def releases_of(title: str, package: str) -> Callable[[str], Sources]:
    """Returns what gives the sources of a version, or skips; skips the module where no variable says where from.

    EAGLE_KERNELS_..._WHEELS is a folder of wheels, or `download`: then, and for wheels that are not there, single
    files are read out of those of the package index.
    """
    variable = f"EAGLE_KERNELS_{package.upper()}_WHEELS"
    place = os.environ.get(variable, "")
    if not place:
        pytest.skip(f"needs {title}'s wheels: set {variable}=FOLDER or =download", allow_module_level=True)

    def sources(version: str) -> Sources:
        found = [] if place == "download" else sorted(Path(place).glob(f"{package}-{version}-*.whl"))
        try:
            return Sources.of_wheel(found[0] if found else open_wheel(package, version))
        except (OSError, ValueError) as error:  # no network, or an index that knows no JSON
            pytest.skip(f"no wheel of {title} {version}: {error}")

    return functools.cache(sources)


def without(sources: Sources, rule: str) -> Sources:
    """Returns sources in which what a rule is about has another name everywhere. rule: its name."""
    gone = {target.rpartition(".")[2].removesuffix("()") for target in rule.split(" or ")}
    words = re.compile(rf"\b({'|'.join(map(re.escape, gone))})\b")

    def read(path: str) -> str | None:
        text = sources.read(path)
        return None if text is None else words.sub(r"\1_is_gone", text)

    return Sources(read)
