"""A log for people and programs at once: one JSON object a line, appended and flushed, so that what ended early is
there and can be gone on with."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any, TextIO


class EventLog:
    """`log.write("cell_done", k=4)` appends {"time": .., "event": "cell_done", "k": 4}.

    sink  a file, made with its folders and appended to, or an open text stream (`sys.stderr`)
    """

    def __init__(self, sink: str | Path | TextIO, **fields: Any):
        self._owns = isinstance(sink, (str, Path))
        if self._owns:
            path = Path(sink)
            path.parent.mkdir(parents=True, exist_ok=True)
            # a line that a crash left unfinished must not swallow the next one
            is_torn = path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n")
            sink = path.open("a", encoding="utf-8")
            sink.write("\n" if is_torn else "")
        self._sink, self._fields, self._lock = sink, fields, threading.Lock()

    def bind(self, **fields: Any) -> EventLog:
        """The same log, with fields that all lines of it have."""
        child = EventLog(self._sink, **self._fields | fields)
        child._lock = self._lock
        return child

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Returns what was written. What JSON does not know is written as its text, numbers that are none as null."""
        record = _plain({"time": round(time.time(), 3), "event": event} | self._fields | fields)
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock:
            self._sink.write(line)
            self._sink.flush()
        return record

    def close(self) -> None:
        if self._owns:
            self._sink.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: str | Path, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of a log, or those of one event; [] where there is none yet. Lines that are torn are left out."""
    path, events = Path(path), []
    for line in json_lines(path) if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and event in (None, record.get("event")):
            events.append(record)
    return events


def json_lines(path: str | Path) -> list[str]:
    """The lines of a file, with or without a byte order mark. `str.splitlines` would split at U+2028 and its like too,
    which JSON allows in its strings."""
    return Path(path).read_text(encoding="utf-8-sig").split("\n")


def read_lines(path: str | Path) -> list[Any]:
    """The values of a file of JSON lines, every one of which is whole."""
    return [json.loads(line) for line in json_lines(path) if line]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # of NumPy and torch
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
