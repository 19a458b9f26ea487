"""Everything that can end a text at a given token."""

from __future__ import annotations

from eagle_kernels import SamplingParams
from op_tests.engine.toys import LetterTokenizer

MOST_STEPS = 5
LENGTH = 1 + 2 * (MOST_STEPS + 1)  # the prompt's own token and two blocks
TOKENIZER = LetterTokenizer()


def endings(text: list[int], last: int, **others) -> dict[str, SamplingParams]:
    """All that can end the text with its token `last`, by the reason that is given for it."""
    # with the last letter of the token before, unless there is none
    stop = TOKENIZER.decode(text[max(last - 1, 0) : last + 1])[-2:]
    return {
        "eos": SamplingParams(max_new_tokens=LENGTH + 9, stop_token_ids=(text[last],), **others),
        "stop": SamplingParams(max_new_tokens=LENGTH + 9, stop=(stop,), **others),
        "length": SamplingParams(max_new_tokens=last + 1, **others),
    }
