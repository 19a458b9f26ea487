"""Wheels on a package index, of which single files are read by HTTP ranges: wheels of servers have hundreds of MB."""

from __future__ import annotations

import http.client
import io
import json
import urllib.parse
import urllib.request

INDEX = "https://pypi.org/simple"


class RemoteFile(io.RawIOBase):
    """A file at an https address, read by ranges over one connection. num_read: bytes so far."""

    def __init__(self, address: str):
        parts = urllib.parse.urlsplit(address)
        self.connection = http.client.HTTPSConnection(parts.netloc, timeout=60)
        self.path, self.place, self.num_read = parts.path, 0, 0
        self.size = int(self._ask("bytes=0-0").headers["Content-Range"].rpartition("/")[2])

    def _ask(self, wanted: str) -> http.client.HTTPResponse:
        self.connection.request("GET", self.path, headers={"Range": wanted})
        response = self.connection.getresponse()
        if response.status != 206:
            self.connection.close()  # instead of reading all of it
            raise OSError(f"{self.connection.host} serves no ranges: {response.status} {response.reason}")
        self.content = response.read()
        self.num_read += len(self.content)
        return response

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


def wheels_of(package: str) -> dict[str, str]:
    """Returns the addresses of a package's wheels by file name."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"{INDEX}/{package}/", headers=accept)
    with urllib.request.urlopen(request, timeout=60) as response:
        files = json.load(response)["files"]
    return {file["filename"]: file["url"] for file in files if file["filename"].endswith(".whl")}


def open_wheel(package: str, version: str, platform: str) -> io.BufferedReader:
    """Opens a wheel of a version, as zipfile takes it. platform: how its file name ends, before `.whl`."""
    name = next(name for name in wheels_of(package) if name.startswith(f"{package}-{version}-") and platform in name)
    return io.BufferedReader(RemoteFile(wheels_of(package)[name]), buffer_size=1 << 16)
