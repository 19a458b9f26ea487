"""Progress bars of calls that take long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...runtime.values import is_terminal, read_flag
from .stream import TokenStream


@contextmanager
def progress_bar(caller: str, total: int, unit: str, wanted: bool | None) -> Iterator[Any]:
    """Gives a bar of tqdm until the block ends or fails, or None; for `wanted` None only a terminal has a bar."""
    if wanted is not None:
        wanted = read_flag(f"{caller}: progress", wanted)
    if wanted is False or wanted is None and not is_terminal(sys.stderr):
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        if wanted:
            raise ValueError(f"{caller}: progress=True needs tqdm: pip install tqdm") from None
        yield None
        return
    with tqdm(total=total, unit=unit, file=sys.stderr) as bar:
        yield bar


def run(stream: TokenStream, caller: str, num_samples: int, wanted: bool | None) -> None:
    """Reads a stream to its end. Of several prompts, or if `wanted`, a bar counts the requests that have ended."""
    wanted = False if wanted is None and len(stream.requests) == num_samples else wanted
    with progress_bar(caller, len(stream.requests), "request", wanted) as bar:
        if bar is None:
            for _ in stream:
                pass
            return
        start_s, ended = time.perf_counter(), set()
        for count, event in enumerate(stream, start=1):
            if stream.requests[event.request].is_finished and event.request not in ended:
                ended.add(event.request)
                speed = count / (time.perf_counter() - start_s)
                bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                bar.update()
