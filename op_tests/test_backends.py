"""Which backend runs, in programs of their own: with and without Triton, forced, and on an import alone."""

import os
import subprocess
import sys

from op_tests.architecture import ROOT


def run_python(code: str, *arguments: str, **environment) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True)


def test_importing_touches_no_device():
    code = "import torch, eagle_kernels; assert not torch.cuda.is_initialized()"
    assert run_python(code).returncode == 0


EVERY_OP_WITHOUT_TRITON = """
import importlib, sys
sys.modules["triton"] = None
from op_tests.harness.ahead_of_time import PATHS, module_of_tests
for path in PATHS:
    name = path.rpartition(".")[2]
    launcher = getattr(importlib.import_module("eagle_kernels.ops." + path), name)
    _, values = next(module_of_tests(path).ahead_of_time_cases())
    try:
        launcher(**values)
    except RuntimeError as error:
        assert str(error).endswith(f"{name}: the triton backend needs the package triton, which is not installed")
        print(name)
"""


def test_every_launcher_says_that_triton_is_missing():
    result = run_python(EVERY_OP_WITHOUT_TRITON)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == len(list((ROOT / "eagle_kernels" / "ops").glob("*/[!_]*.py")))


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it now fails, as on a machine without it
import torch, eagle_kernels
logits = torch.tensor([[0.0, 2.0, 1.0]])
one = torch.ones(1)
values = (logits, one.long(), one.long(), 0 * one)
print(eagle_kernels.sample_from_logits(*values).tolist())
try:
    eagle_kernels.raw.sample_from_logits(*values)
except RuntimeError as error:
    print(error)
"""


def test_works_without_triton():
    """References run; a kernel launch says in one line what is missing."""
    result = run_python(WITHOUT_TRITON)
    assert result.returncode == 0, result.stderr
    tokens, message = result.stdout.splitlines()
    assert tokens == "[1]"
    assert message == (
        "eagle_kernels.sample_from_logits: the triton backend needs the package triton, which is not installed"
    )


FORCED_BACKENDS = """
import os, sys
import torch, eagle_kernels
node = torch.zeros(1, 1, dtype=torch.int64)
for os.environ["EAGLE_KERNELS_BACKEND"] in sys.argv[1:]:
    try:
        eagle_kernels.verify_tree_greedy(node, node, node - 1, node - 1, node, spec_steps=0)
        print("obeyed")
    except (RuntimeError, ValueError) as error:
        print(error)
"""


def test_a_forced_backend_is_obeyed_or_refused():
    triton, unknown, reference = run_python(FORCED_BACKENDS, "triton", "cuda", "reference").stdout.splitlines()
    assert "verify_tree_greedy: the triton backend cannot run on cpu tensors" in triton
    assert "must be 'reference' or 'triton', got 'cuda'" in unknown
    assert reference == "obeyed"
    assert run_python(FORCED_BACKENDS, "triton", TRITON_INTERPRET="1").stdout == "obeyed\n"
