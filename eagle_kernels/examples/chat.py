"""A conversation: every answer is streamed, and each question is asked with the whole conversation before it.

    python -m eagle_kernels.examples.chat TARGET DRAFT

The target's folder needs a chat template. What a prompt shares with an earlier one is not read again.
"""

import sys
from collections.abc import Iterable, Iterator

from eagle_kernels import EAGLEInference


def main() -> None:
    """Answers the lines of standard input."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m eagle_kernels.examples.chat TARGET DRAFT (two folders)")
    target, draft = sys.argv[1:]
    engine = EAGLEInference.from_pretrained(draft, target)
    for piece in converse(engine, (line.rstrip("\n") for line in sys.stdin)):
        print(piece, end="", flush=True)


def converse(engine: EAGLEInference, questions: Iterable[str], max_new_tokens: int = 256) -> Iterator[str]:
    """Yields the answers piece by piece, each with a newline at its end."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = ""
        for piece in engine.stream_text(engine.encode_chat(messages), max_new_tokens):
            answer += piece
            yield piece
        messages.append({"role": "assistant", "content": answer})
        yield "\n"


if __name__ == "__main__":
    main()
