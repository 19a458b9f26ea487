"""What a planted bug is, and short ways to write one."""

from pathlib import Path
from typing import NamedTuple

from eagle_kernels.ops.registry import OPS

ROOT = Path(__file__).parents[2]
PRIMITIVES = "eagle_kernels/primitives/"
REJECTION = "eagle_kernels/ops/rejection/"
SAMPLING = "eagle_kernels/ops/sampling/"
VERIFY = "eagle_kernels/ops/verify/"
ATTENTION = "eagle_kernels/ops/attention/"
EXPERTS = "eagle_kernels/ops/experts/"
LINEAR = "eagle_kernels/ops/linear/"
ENGINE = "eagle_kernels/engine/"
INTEGRATIONS = "eagle_kernels/integrations/"
RUNTIME = "eagle_kernels/runtime/"
TOOLS = "eagle_kernels/tools/"
SGLANG = INTEGRATIONS + "sglang/"
VLLM = INTEGRATIONS + "vllm/"
LAWS = "op_tests/test_laws.py::"
ENUMERATION = "reference/enumeration.py"
# attention without a pool, with which tests run the engine's models
ATTEND = "reference/causal_attend.py"
# whose bug it is, by the file that is edited; the first that fits
_PLACES = {
    ENUMERATION: "enumeration",
    ATTEND: "engine",
    "op_tests/": "enumeration",
    "reference/": "reference",
    "eagle_kernels/ops/": "kernel",
    "eagle_kernels/primitives/": "kernel",
    ENGINE: "engine",
    INTEGRATIONS: "plug-in",
    RUNTIME: "runtime",
    TOOLS: "tool",
    "eagle_kernels/examples/": "example",
    "bench/": "laboratory",
}


class Mutant(NamedTuple):
    """A planted bug: every occurrence of each edit's old text is replaced, and there must be one.

    Attributes:
        name: What is wrong.
        edits: (file, old text, new text).
        tests: What must see it, in pytest's words: the narrowest tests that do.
        op: Of a bug in kernel and reference alike, the op whose test_matches_reference must not see it.
    """

    name: str
    edits: list[tuple[str, str, str]]
    tests: list[str]
    op: str = ""

    @property
    def kind(self) -> str:
        """Returns where it is planted: both (kernel and reference alike), kernel, engine, plug-in, enumeration, .."""
        places = {next(kind for start, kind in _PLACES.items() if file.startswith(start)) for file, _, _ in self.edits}
        return "both" if places == {"kernel", "reference"} else " and ".join(sorted(places))

    def stale(self) -> list[str]:
        """Returns the edits whose old text is in no file, as lines to print."""
        lines = []
        for name, old, _ in self.edits:
            if not (ROOT / name).exists() or old not in (ROOT / name).read_text(encoding="utf-8"):
                lines.append(f"{self.name}: the mutant is stale: {name} has no {old.strip()!r}")
        return lines


def bug(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Returns a mutant of one edit, and of the tests that must see it."""
    return Mutant(name, [(file, old, new)], list(tests))


def both(
    name: str, op: str, tests: list[str], kernel: list[tuple[str, ...]], reference: list[tuple[str, ...]]
) -> Mutant:
    """Returns a mutant in kernel and reference; edits of two texts are in the op's own files."""
    place = OPS[op].replace(".", "/")
    edits = [edit if len(edit) == 3 else (f"eagle_kernels/ops/{place}.py", *edit) for edit in kernel]
    edits += [edit if len(edit) == 3 else (f"reference/ops/{place}.py", *edit) for edit in reference]
    return Mutant(name, edits, tests, op)


def of(op: str, *names: str) -> list[str]:
    """Returns tests of an op."""
    family, _, own = OPS[op].partition(".")
    return [f"op_tests/ops/{family}/test_{own}.py::{name}" for name in names]


def rounds(*schemes: str) -> list[str]:
    """Returns the law test of rounds of drafting and verifying, by scheme."""
    return [f"{LAWS}test_rounds_of_drafting_and_verifying[{scheme}]" for scheme in schemes]
