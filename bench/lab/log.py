"""A log for people and programs at once: one JSON object a line, appended and flushed, so that what ended early is
there and can be gone on with."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, TextIO


class EventLog:
    """`log.write("cell", k=4)` appends {"time": .., "event": "cell", "k": 4}.

    sink  a file, made with its folders and appended to, or an open text stream (`sys.stdout`)
    """

    def __init__(self, sink: str | Path | TextIO):
        self._owns = isinstance(sink, (str, Path))
        if self._owns:
            path = Path(sink)
            path.parent.mkdir(parents=True, exist_ok=True)
            # a line that a crash left unfinished must not swallow the next one
            is_torn = path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n")
            sink = path.open("a", encoding="utf-8")
            sink.write("\n" if is_torn else "")
        self._sink = sink

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Returns what was written; numbers that are none are null."""
        record = _plain({"time": round(time.time(), 3), "event": event} | fields)
        self._sink.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._sink.flush()
        return record

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owns:
            self._sink.close()


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
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
