"""`engine/LIFE.md` names files and functions that exist, in eight steps, on the way that a call takes."""

import ast
import re
import sys
from pathlib import Path

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference
from op_tests.engine.toys import DEVICE, random_llama

ENGINE = Path(__file__).parents[2] / "eagle_kernels" / "engine"
ROWS = re.findall(
    r"^\| (\d?) ?\| .*\| \[(.+?)\]\(\2\) \| (.+) \|$", (ENGINE / "LIFE.md").read_text(encoding="utf-8"), re.MULTILINE
)
NAMED = [(file, name) for _, file, names in ROWS for name in re.findall(r"`(.+?)`", names)]


def defined(file: str) -> set[str]:
    """Functions and classes of a file, with those in classes."""
    names = set()
    for node in ast.parse((ENGINE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names |= {node.name}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_all_names_exist_in_eight_steps():
    assert [int(number) for number, _, _ in ROWS if number] == list(range(1, 9)) and len(NAMED) > 16
    assert [(file, name) for file, name in NAMED if name not in defined(file)] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames do not know the names of their classes")
def test_a_call_goes_through_all_of_them_in_this_order():
    """By the first calls of all, and of the last step, which prompts have as well, by the last ones."""
    target, seen = random_llama(device=DEVICE), []
    engine = EAGLEInference(target, target, EAGLEConfig(topk=2, num_steps=2, cuda_graph=False))

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ENGINE)):
            file = Path(frame.f_code.co_filename).relative_to(ENGINE).as_posix()
            seen.append((file, frame.f_code.co_qualname.removesuffix(".__init__")))

    sys.setprofile(note)
    try:
        engine.generate([1, 2, 3], 6, temperature=0.8, seeds=1)
    finally:
        sys.setprofile(None)
    last = NAMED.index(("serve/scheduler.py", "Scheduler._read_back"))
    places = [seen.index(each) for each in NAMED[:last]]
    places += [len(seen) - 1 - seen[::-1].index(each) for each in NAMED[last:]]
    assert places == sorted(places), list(zip(places, NAMED))
