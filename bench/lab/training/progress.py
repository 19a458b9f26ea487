"""Lines of progress where no bar is shown: at least one every few seconds, however long a step takes."""

import time
from collections.abc import Callable
from typing import Any

from eagle_kernels.engine.inference import EAGLEInference
from eagle_kernels.engine.serve.output import GenerationOutput

REPORT_SECONDS = 10.0


class Pace:
    """The time since the last line of progress."""

    def __init__(self) -> None:
        self.told()

    def told(self) -> None:
        """Notes that a line was written."""
        self._told_at = time.monotonic()

    def is_due(self) -> bool:
        """Tells whether it is time for the next line."""
        return time.monotonic() - self._told_at >= REPORT_SECONDS


def decode(
    engine: EAGLEInference,
    prompts: list[list[int]],
    max_new_tokens: int,
    tell: Callable[[str], None] | None,
    **options: Any,
) -> GenerationOutput:
    """Generates as `EAGLEInference.generate` does, and tells from time to time how many tokens there are."""
    pace, stream = Pace(), engine.stream(prompts, max_new_tokens, **options)
    for count, _ in enumerate(stream, start=1):
        if tell is not None and pace.is_due():
            tell(f"{count} of {len(prompts) * max_new_tokens} tokens")
            pace.told()
    return stream.output()
