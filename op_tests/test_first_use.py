"""Names are imported when they are first used: an import alone is cheap, and whichever is used first works, with and
without Triton, on the backend that is asked for."""

import json
import os
import subprocess
import sys
import warnings

import torch

import eagle_kernels
from op_tests.architecture import ROOT

# runs each text of a list from stdin in a copy of itself, and imports in itself; prints the errors, "" for none
COPIES = """
import contextlib, json, os, sys, traceback
import torch
def run(text):
    if text.startswith("import "):
        with contextlib.suppress(ImportError):  # there may be no triton
            exec(text)
        return ""
    read, write = os.pipe()
    if os.fork() == 0:
        told = ""
        try:
            exec(text, {"__name__": "__main__"})
        except BaseException:
            told = traceback.format_exc()
        os.write(write, told.encode()[-4000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        error = told.read()
    os.wait()
    return error
json.dump([run(text) for text in json.load(sys.stdin)], sys.stdout)
"""
# a Triton that cannot be imported
BROKEN = {"triton/__init__.py": "raise ImportError('libtriton.so: undefined symbol')", "triton/language.py": ""}
UNSET = ("TRITON_INTERPRET", "EAGLE_KERNELS_DEBUG", "EAGLE_KERNELS_BACKEND")
HEAD = """
import sys
import torch
def imported(*beginnings):
    return sorted(name for name in sys.modules if name.startswith(beginnings) and sys.modules[name] is not None)
FAMILIES = tuple(f"eagle_kernels.ops.{family}." for family in "attention draft kv nn tree verify".split())
def sampled(module):
    one = torch.ones(1)
    return module.sample_from_logits(torch.tensor([[0.0, 2.0, 1.0]]), one.long(), one.long(), 0 * one).tolist()
def error_of(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except (RuntimeError, ValueError) as error:
        return str(error)
"""
LATE = (
    "eagle_kernels.sample_from_logits: TRITON_INTERPRET=1 was set after the first kernel was imported, too late; "
    "set it before the first import of eagle_kernels"
)
PROGRAMS = {
    "an import": """
import eagle_kernels
assert not imported("triton", "eagle_kernels.engine", "eagle_kernels.primitives", "eagle_kernels.reference", *FAMILIES)
assert not torch.cuda.is_initialized()
""",
    "names": """
import eagle_kernels
from eagle_kernels import ops, raw, types
for module in (eagle_kernels, ops, raw, types, ops.tree):
    assert {*getattr(module, "__all__", ())} <= {*dir(module)}
    try:
        module.no_such_name
    except AttributeError as error:
        assert str(error) == f"module '{module.__name__}' has no attribute 'no_such_name'"
assert "build_tree" in dir(ops.tree) and {"engine", "types", "reference"} <= {*dir(eagle_kernels)}
assert not imported("triton", "eagle_kernels.engine", *FAMILIES)
""",
    "the command": """
import contextlib, io
sys.argv, sys.orig_argv = ["-m", "--help"], ["python", "-m", "eagle_kernels", "--help"]
for name in imported("torch", "numpy"):
    del sys.modules[name]
with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
    from eagle_kernels.tools.cli.main import main
    main(["--help"])
assert "train-head" in told.getvalue()
assert not imported("torch", "numpy", "triton", "eagle_kernels.engine")
""",
    "a broken triton": """
import warnings
sys.path.insert(0, "broken")
warnings.simplefilter("ignore")
import eagle_kernels
assert sampled(eagle_kernels) == [1]
assert error_of(sampled, eagle_kernels.raw) == (
    "eagle_kernels.sample_from_logits: the triton backend needs the package triton, which is installed but broken: "
    "libtriton.so: undefined symbol"
)
""",
    "launchers without triton": """
sys.modules["triton"] = None  # importing it now fails, as on a machine without it
import eagle_kernels
from op_tests.harness.ahead_of_time import PATHS, module_of_tests
for path in PATHS:
    name = path.rpartition(".")[2]
    _, values = next(module_of_tests(path).ahead_of_time_cases())
    told = f"{name}: the triton backend needs the package triton, which is not installed"
    assert error_of(getattr(eagle_kernels.raw, name), **values).endswith(told)
assert len(PATHS) == len(eagle_kernels.ops.OPS)
""",
    "the interpreter, asked for after an import": """
import os
import eagle_kernels
os.environ |= {"TRITON_INTERPRET": "1", "EAGLE_KERNELS_BACKEND": "triton"}
assert sampled(eagle_kernels) == sampled(eagle_kernels.raw) == [1]
""",
    "import triton": "import triton",  # which the others need, and which takes long
    "one op": """
import eagle_kernels
eagle_kernels.rms_norm(torch.ones(1, 4), torch.ones(4))
assert "eagle_kernels.ops.nn.rms_norm" in sys.modules
assert not imported("eagle_kernels.ops.verify.", "eagle_kernels.ops.tree.", "eagle_kernels.engine")
""",
    "a star": """
from eagle_kernels import *
import eagle_kernels
for name in eagle_kernels.__all__:
    assert globals()[name] is getattr(eagle_kernels, name)
assert "types" not in globals()  # Python's own
""",
    "from": """
from eagle_kernels import EAGLEInference, TreeMaskMode, build_tree, verify_tree
from eagle_kernels.ops import build_tree as same
from eagle_kernels.raw import build_tree as launcher
import eagle_kernels.ops.front_door
assert build_tree is same is not launcher and eagle_kernels.ops.verify_tree is verify_tree
""",
    "chains of attributes": """
import eagle_kernels
assert eagle_kernels.ops.tree.build_tree.Output is eagle_kernels.ops.BuildTreeOutput
assert callable(eagle_kernels.reference.ops.tree.build_tree.build_tree)
assert eagle_kernels.engine.SamplingParams is eagle_kernels.SamplingParams
""",
    "help": """
import pydoc
import eagle_kernels
assert "parent_list" in pydoc.render_doc(eagle_kernels.build_tree)
""",
    "pickle": """
import pickle
build_tree = pickle.loads(b"\\x80\\x04\\x8c\\reagle_kernels\\x8c\\nbuild_tree\\x93.")
import eagle_kernels
assert build_tree is eagle_kernels.build_tree
for function in (build_tree, eagle_kernels.verify_tree, eagle_kernels.raw.build_tree):
    assert pickle.loads(pickle.dumps(function)) is function
""",
    "without triton": """
sys.modules["triton"] = None
import eagle_kernels
assert sampled(eagle_kernels) == [1]
eagle_kernels.EAGLEInference
""",
    "a forced backend": """
import os
import eagle_kernels
node = torch.zeros(1, 1, dtype=torch.int64)
def told(backend):
    os.environ["EAGLE_KERNELS_BACKEND"] = backend
    return error_of(eagle_kernels.verify_tree_greedy, node, node, node - 1, node - 1, node, spec_steps=0)
assert "verify_tree_greedy: the triton backend cannot run on cpu tensors" in told("triton")
assert "must be 'reference' or 'triton', got 'cuda'" in told("cuda")
assert told("reference") is None
""",
    # all kernels run in one way, also those whose files are imported after the environment has changed
    **{
        f"the interpreter, asked for after {first}": f"""
import os
import eagle_kernels
eagle_kernels.{first}
os.environ["TRITON_INTERPRET"] = "1"
assert sampled(eagle_kernels) == [1]
assert error_of(sampled, eagle_kernels.raw) == {LATE!r}
"""
        for first in ("build_tree", "sample_from_logits")
    },
    "debug": """
import os
os.environ["EAGLE_KERNELS_DEBUG"] = "1"
import eagle_kernels
try:
    eagle_kernels.build_tree(torch.ones(1).long(), torch.zeros(1, 0).long(), torch.zeros(1, 0).long(),
                             torch.zeros(1, 0).long(), torch.ones(1).long(), 7, topk=1, spec_steps=1,
                             num_verify_tokens=1, tree_mask_mode="full_mask")
except ValueError as error:
    assert "seq_lens_sum" in str(error), error
else:
    raise AssertionError("nothing was checked")
""",
    "threads": """
import threading
names = "build_tree rope verify_tree EAGLEInference raw reference TreeMaskMode verify_tree_sampled".split()
found, ready = [], threading.Barrier(8)
def use(first):
    ready.wait()
    import eagle_kernels
    order = names[first:] + names[:first]
    found.append({name: getattr(eagle_kernels, name) for name in order})
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=use, args=(first,)) for first in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8 and all(each == found[0] for each in found)
""",
    # two threads would wait for each other, if one took the lock of the module before that of its package
    "a package and a module of it, at once": """
import threading, time
from importlib import machinery, util
from pathlib import Path
from eagle_kernels.runtime.lazy import lazily
Path("whole").mkdir()
Path("whole/__init__.py").write_text("from . import part")
Path("whole/part.py").write_text("")
class Slow(machinery.SourceFileLoader):
    def create_module(self, spec):  # before others can see that the package is on its way
        time.sleep(0.5)
    def find_spec(name, path, target=None):
        place = "whole/__init__.py"
        return util.spec_from_file_location(name, place, loader=Slow(name, place)) if name == "whole" else None
sys.meta_path.insert(0, Slow)
get, _ = lazily("eagle_kernels", {"whole": "whole:", "part": "whole.part:"})
found = []
thread = threading.Thread(target=lambda: found.append(get("whole")))
thread.start()
time.sleep(0.2)
assert get("part").__name__ == "whole.part"
thread.join()
assert found == [sys.modules["whole"]]
""",
    # as one of torch.export and AOTInductor: in C++, where no attribute of a module is asked for
    "a program that was traced": """
import eagle_kernels
x, weight, output = torch.load("values.pt")
assert torch.equal(torch.jit.load("traced.pt")(x, weight), output)
assert "eagle_kernels.ops.nn.rms_norm" in sys.modules
""",
    "ops by their names": """
import eagle_kernels
x, weight = torch.randn(3, 8), torch.rand(8)
output, _ = torch.ops.eagle_kernels.rms_norm(x, weight)
buffers = torch.empty(3, 8), torch.empty(0, 8)
assert torch.ops.eagle_kernels.rms_norm.out(x, weight, out_output=buffers[0], out_residual=buffers[1]) is None
mask = torch.ones(1, 4, dtype=torch.bool)
torch.ops.eagle_kernels.align_evict_mask_to_page_size(torch.tensor([2]), mask, page_size=4)
assert torch.equal(output, buffers[0]) and not mask.all()
assert torch.ops.eagle_kernels.silu_and_mul(x.to("meta")).shape == (3, 4)
assert {each.split("(")[0].split(".")[0] for each in eagle_kernels.ops.operators.SCHEMAS} == {*eagle_kernels.ops.OPS}
""",
    "import eagle_kernels.reference": "import eagle_kernels.reference",
}
FIRST = """
import doctest, inspect
import eagle_kernels
assert not imported(*FAMILIES)
text = inspect.getdoc(eagle_kernels.{0}).partition("Example:")[2]
test = doctest.DocTestParser().get_doctest(text, {{"torch": torch, "eagle_kernels": eagle_kernels}}, "{0}", None, None)
assert test.examples and not doctest.DocTestRunner().run(test).failed
"""
PROGRAMS |= {name: FIRST.format(name) for name in (*eagle_kernels.ops.OPS, "verify_tree")}  # its example


def test_whatever_is_used_first_works(tmp_path):
    """Each program starts anew; one process copies itself for all, since torch takes long to import."""
    x, weight = torch.randn(3, 8), torch.rand(8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(lambda x, weight: eagle_kernels.rms_norm(x, weight).output, (x, weight))
    traced.save(str(tmp_path / "traced.pt"))
    torch.save((x, weight, eagle_kernels.rms_norm(x, weight).output), tmp_path / "values.pt")
    (tmp_path / "broken" / "triton").mkdir(parents=True)
    for name, text in BROKEN.items():
        (tmp_path / "broken" / name).write_text(text)
    process = subprocess.run(
        [sys.executable, "-c", COPIES], cwd=tmp_path, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if name not in UNSET} | {"PYTHONPATH": str(ROOT)},
        input=json.dumps([text if text.startswith("import ") else HEAD + text for text in PROGRAMS.values()]),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    errors = zip(PROGRAMS, json.loads(process.stdout), strict=True)
    assert not (told := [f"{name}: {error}" for name, error in errors if error]), "\n".join(told)
