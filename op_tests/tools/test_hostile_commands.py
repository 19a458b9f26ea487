"""Hostile environments of the command and of the machine: a clear line for each, and nothing is downgraded silently."""

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from eagle_kernels import EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.runtime import interrupts, placement
from eagle_kernels.tools.cli import environment, heads
from eagle_kernels.tools.cli.main import main
from op_tests.engine.hostile import DEEP, refused
from op_tests.tools.command import complaint, printed

ROOT = Path(__file__).resolve().parents[2]


def test_prompts_that_are_no_text(capsys, tmp_path):
    """A lone surrogate is what Python makes of an argument that is not UTF-8, and what JSON can hold."""
    rule = r"encode: text must be UTF-8, its character 1 is '\udcff', half of a surrogate pair"
    assert complaint(capsys, "generate", "a\udcff", "--device", "cpu") == "prompt 0: " + rule
    assert complaint(capsys, "show-tree", "a\udcff", "--device", "cpu") == rule
    (tmp_path / "prompts.json").write_text('["fine", "a\\udcff"]')
    assert complaint(capsys, "benchmark", tmp_path / "prompts.json", "--device", "cpu") == "prompt 1: " + rule
    (tmp_path / "deep.json").write_text(DEEP)
    told = complaint(capsys, "benchmark", tmp_path / "deep.json", "--device", "cpu")
    assert told.startswith(f"{tmp_path / 'deep.json'}: ") and "nested too deeply" in told
    with pytest.raises(SystemExit):
        main(["generate", "a", "--speculative-config", DEEP])
    assert "nested too deeply" in (told := capsys.readouterr().err) and len(told.splitlines()[-1]) < 300


@contextlib.contextmanager
def ascii_output(monkeypatch):
    """What a terminal that knows ASCII alone gets, as PYTHONIOENCODING=ascii has it."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield stream
        assert stream.errors == "strict", "left as it was"


def test_a_terminal_that_knows_ascii_alone(monkeypatch, capsys):
    small = ["--device", "cpu", "--max-new-tokens", "6"]
    with ascii_output(monkeypatch) as stream:
        assert main(["generate", "naïve 漢(", *small]) == 0
    shown = stream.buffer.getvalue().decode("ascii")
    assert shown.startswith("na\\xefve \\u6f22(") and "\ntokens: 6" in shown
    with ascii_output(monkeypatch) as stream:
        assert main(["show-tree", "naïve 漢(", *small]) == 0
    shown = stream.buffer.getvalue().decode("ascii")
    assert shown.startswith("step 1 after 'na\\xefve \\u6f22(") and "\\u25" not in shown
    numbers = [line for line in shown.splitlines() if re.search(r"\d\.\d\d$", line)]
    assert all(re.match(r"([| ] )*[|`]-[*+o>] ", line) for line in numbers) and len(numbers) > 8
    assert all(line[-5:-4] == " " and line[-3] == "." for line in numbers), "columns stay columns"
    assert capsys.readouterr().err == ""


COMMANDS = [["generate", "a"], ["show-tree", "a"], ["benchmark", str(ROOT / "README.md")], ["inspect"], ["env"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_interrupt_is_one_line(capsys, monkeypatch, command):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    for module, function in ((heads, "inspect_head"), (environment, "backend")):
        monkeypatch.setattr(module, function, interrupt)
    monkeypatch.setattr(EAGLEInference, "from_pretrained", interrupt)
    assert main(command) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_while_the_command_is_imported(capsys, monkeypatch):
    class Module(SimpleNamespace):
        @property
        def main(self):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "eagle_kernels.tools.cli.main", Module())
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("eagle_kernels", run_name="__main__")
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("argv", "original", "is_command"),
    [
        (["-m", "env"], ["python", "-u", "-m", "eagle_kernels", "env"], True),
        (["-m", "--version"], ["python", "-um", "eagle_kernels", "--version"], True),
        (["-m"], ["python", "-meagle_kernels"], True),
        (["/usr/bin/eagle-kernels", "env"], ["python", "/usr/bin/eagle-kernels", "env"], True),
        (["-m", "eagle_kernels"], ["python", "-m", "pytest", "eagle_kernels"], False),
        (["-m"], ["python", "-Bm", "package"], False),
        (["-m"], ["python", "-m", "bench.lab.train_demo_pair"], False),
        (["server.py"], ["python", "server.py"], False),
        ([""], ["python"], False),
    ],
)
def test_only_the_command_ends_at_once_while_it_is_imported(argv, original, is_command):
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv, sys.orig_argv = {argv}, {original}
exec(open({str(ROOT / "eagle_kernels/runtime/interrupts.py")!r}).read())
if {is_command}:
    signal.raise_signal(signal.SIGINT)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == ((130, "interrupted\n") if is_command else (0, ""))


def test_ctrl_c_while_torch_is_imported():
    """Before any other module of the package, so that no traceback of another library can come."""
    with subprocess.Popen(
        [sys.executable, "-v", "-m", "eagle_kernels", "env"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        preexec_fn=heed_interrupts, text=True,
    ) as process:  # fmt: skip
        for line in process.stderr:
            if line.startswith("import 'torch._utils'"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 130 and rest.endswith("interrupted\n") and "Traceback" not in rest


def test_a_command_that_runs_may_clean_up_after_ctrl_c(capsys):
    before = signal.signal(signal.SIGINT, interrupts._end)
    try:
        assert main(["env"]) == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_program_without_standard_streams(name, monkeypatch, capsys):
    """As `<&-`, `>&-` and `2>&-` start it, and a program without a console."""
    small = ["--device", "cpu", "--max-new-tokens", "2"]
    monkeypatch.setattr(sys, name, None)
    assert main(["generate", "ab", *small]) == (name == "stdout")
    assert main(["generate", "-" if name == "stdin" else "ab", "--device", "nope", *small[2:]]) == 1
    assert getattr(sys, name) is None
    captured = capsys.readouterr()
    wanted = {"stdout": 2 * "error: standard output is closed\n", "stderr": ""}
    assert captured.err == wanted.get(name, captured.err)
    assert ("tokens: 2" in captured.out) == (name != "stdout") and captured.err.count("\n") <= 2
    if name == "stdin":
        assert main(["generate", "--prompts", "-", *small]) == 1
        assert capsys.readouterr().err == "error: -: holds no prompt\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command", [["generate", "a", "--device", "cpu", "--max-new-tokens", "2"], ["env"], ["--help"]]
)
@pytest.mark.parametrize("buffering", [1, -1, 0])
def test_a_full_disk_is_named(command, buffering, monkeypatch, capsys):
    is_raw = buffering == 0  # as with PYTHONUNBUFFERED, where nothing is left to be written at the end
    full = open("/dev/full", "wb" if is_raw else "w", buffering=buffering)  # noqa: SIM115
    full = io.TextIOWrapper(full, write_through=True) if is_raw else full
    monkeypatch.setattr(sys, "stdout", full)
    assert main(command) == 1 and capsys.readouterr().err == "error: standard output: No space left on device\n"
    with contextlib.suppress(OSError):
        full.close()


def test_files_that_are_no_files(capsys, tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x80")
    (tmp_path / "full.svg").symlink_to("/dev/full")
    small = ["--device", "cpu", "--max-new-tokens", "2"]
    rule = "cannot be read as a file of prompts: Is a directory"
    assert complaint(capsys, "generate", "--prompts", tmp_path, *small) == f"{tmp_path}: {rule}"
    assert complaint(capsys, "benchmark", tmp_path, *small) == f"{tmp_path}: {rule}"
    assert "must be a JSON list of texts, or UTF-8" in complaint(capsys, "benchmark", tmp_path / "bytes.txt", *small)
    rule = "--svg must be a file that ends with .svg or a folder"
    assert complaint(capsys, "show-tree", "a", "--svg", "/dev/full", *small) == f"{rule}, got /dev/full"
    svg = tmp_path / "full.svg"
    assert main(["show-tree", "a", "--svg", str(svg), *small]) == 1
    assert capsys.readouterr().err == f"error: --svg {svg} cannot be written: No space left on device\n"


def heed_interrupts() -> None:
    """A shell starts what it runs in the background with Ctrl-C ignored, and programs inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_the_program_on_an_ascii_terminal_is_interrupted(tmp_path):
    """The whole of it, in one process: its environment, its trees, Ctrl-C and what it leaves behind."""
    environment = {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "eagle_kernels", "show-tree", "é", "--steps", "999", "--max-new-tokens", "999"]
    with subprocess.Popen(
        [*command, "--device", "cpu"], cwd=tmp_path, env=os.environ | environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=heed_interrupts,
    ) as process:  # fmt: skip
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert first.startswith(b"step 1 after '\\xe9") and (first + rest).isascii()
    assert process.returncode == 130 and errors == b"interrupted\n"


# where a model goes


@pytest.fixture
def machine(monkeypatch):
    """be(gpus=..., build=...): what torch and /dev say."""

    def be(*, gpus: int, build: str | None, files=("/dev/nvidia0",)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.version, "hip", None, raising=False)
        monkeypatch.setattr(placement, "gpu_files", lambda: list(files))
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    return be


BUILD = f"torch {torch.__version__} is a build without CUDA or ROCm, and this machine has a GPU (/dev/nvidia0)"
ADVICE = f"{BUILD}; https://pytorch.org/get-started says how to install one with them"


def test_the_choice_of_the_device(machine, monkeypatch, recwarn):
    told = []
    machine(gpus=2, build="13.0")
    assert placement.read_placement("x", None, None) == (torch.device("cuda"), torch.float32)
    assert placement.read_placement("x", "cpu:0", None) == (torch.device("cpu"), torch.float32)
    assert placement.read_placement("x", None, torch.float16) == (torch.device("cuda"), torch.float16)
    assert placement.choose_device(told.append).type == "cuda"
    machine(gpus=0, build=None, files=())
    assert placement.read_placement("x", None, None) == (torch.device("cpu"), torch.float32)
    machine(gpus=0, build="13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placement.choose_device(told.append).type == "cpu"
    assert told == [] and not recwarn.list


@pytest.mark.parametrize("gpus", [0, 1, 2, 3])
def test_gpus_are_numbered_from_0(machine, gpus):
    """Those that there are can be chosen, by name or as a device, and no other."""
    machine(gpus=gpus, build="13.0", files=())

    def read(device):
        try:
            return placement.read_placement("x", device, None)[0]
        except ValueError as error:
            return str(error).removeprefix(f"x: device {device}: ")

    for index, name in enumerate(["cuda", *(f"cuda:{number}" for number in range(5))], -1):
        device, none = torch.device(name), f"this machine has {gpus} GPUs that torch can use"
        assert read(name) == read(device) == (device if max(index, 0) < gpus else none)


def test_a_gpu_that_torch_cannot_use_is_named(machine):
    machine(gpus=0, build=None)
    with pytest.warns(UserWarning) as caught:
        assert placement.choose_device().type == "cpu"
    assert [str(warning.message) for warning in caught] == [f"eagle_kernels: runs on the CPU: {ADVICE}"]
    where = "load_target: device"
    assert refused(placement.read_device, where, "cuda") == f"{where} cuda: {ADVICE}"
    machine(gpus=0, build="13.0")
    told = []
    placement.choose_device(told.append)
    assert told == [
        f"runs on the CPU: torch {torch.__version__} finds no GPU to use, although this machine has one "
        "(/dev/nvidia0); is torch built for another vendor, is the driver too old, or does this user lack access to it?"
    ]
    machine(gpus=0, build=None, files=())
    rule = "cuda: this machine has 0 GPUs that torch can use"
    assert refused(placement.read_device, where, "cuda").startswith(f"{where} {rule}")


def test_the_command_tells_that_it_takes_the_cpu(machine, capsys):
    machine(gpus=0, build=None)
    assert main(["generate", "a", "--max-new-tokens", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"warning: runs on the CPU: {ADVICE}\n"
    assert json.loads(captured.out)["generated_tokens"] == 2
    assert f"gpu: none that torch can use: {BUILD}" in printed(capsys, "env")


def test_from_pretrained_takes_what_the_command_takes(machine, monkeypatch):
    """One place chooses for both; a GPU that is not there is asked for all the same."""
    machine(gpus=1, build="13.0")
    seen = []

    def note(*arguments, **keywords):
        seen.append((*arguments[1:], keywords.get("device"), keywords.get("dtype")))
        raise ValueError("seen")

    for name in ("eagle_kernels.engine.config.pairing.load_target", "eagle_kernels.tools.inspection.load_target"):
        monkeypatch.setattr(name, lambda folder, *rest, **others: note(folder, *rest, **others))
    target, draft = demo_pair()
    assert refused(EAGLEInference.from_pretrained, draft, target) == "seen"
    assert main(["generate", "a"]) == 1
    (of_api, of_command) = [tuple(map(str, filter(None, call)))[:2] for call in seen]
    assert of_api == of_command == ("cuda", "torch.float32")


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu:3", None, "x: device must be cpu without a number, since there is only one, got 'cpu:3'"),
        (torch.ones(9, 9), None, "x: device must be cpu, cuda or cuda:N, got tensor("),
        (10**5000, None, "x: device must be cpu, cuda or cuda:N, got one that cannot be shown"),
        ("cpu", numpy.ones(9), "x: dtype must be torch.float32, torch.bfloat16 or torch.float16, got array("),
        ("cpu", torch.int8, "torch.float16, got torch.int8"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_places_of_any_type_are_refused_in_one_line(device, dtype, message):
    assert message in refused(placement.read_placement, "x", device, dtype)


def test_a_switch_is_on_or_off(monkeypatch):
    for value, is_on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("EAGLE_KERNELS_DEBUG", value)
        assert runpy.run_module("eagle_kernels.runtime.check")["DEBUG"] is is_on
    for name, module in (("EAGLE_KERNELS_DEBUG", "check"), ("EAGLE_KERNELS_PDL", "target")):
        monkeypatch.setenv(name, "yes")
        assert refused(runpy.run_module, f"eagle_kernels.runtime.{module}") == f"{name} must be 0 or 1, got 'yes'"
