"""The smoke set with other versions of triton: `python -m op_tests.versions 3.4.0 3.6.0`.

Each version is installed into a temporary folder, which comes first on PYTHONPATH; with none named, the installed
triton is used. Prints rows of the table in op_tests/README.md. Exit code 1: a row is red.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
ABOUT = "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.is_available())"
HEADER = "| Python | torch | triton | kernels run on | smoke set | seconds |\n|---|---|---|---|---|---|"


# where the smoke set is: elsewhere there is nothing to collect
SMOKE = ("op_tests/ops", "op_tests/test_ahead_of_time.py")


def run_smoke_set(version: str | None) -> tuple[bool, str]:
    """Runs it with this triton; returns whether it passed, and its row. Prints the output of a failed run."""
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        environment = dict(os.environ)
        if version is not None:
            install = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}")
            subprocess.run([sys.executable, *install], check=True)
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        about = subprocess.run(
            [sys.executable, "-c", ABOUT], env=environment, check=True, capture_output=True, text=True
        )
        torch, triton, has_gpu = about.stdout.split()
        begin = time.monotonic()
        tests = ("-m", "pytest", "-q", "-m", "smoke", "-n", "auto", "--dist", "worksteal", *SMOKE)
        result = subprocess.run([sys.executable, *tests], cwd=ROOT, env=environment, capture_output=True, text=True)
    last_line = result.stdout.rstrip().rpartition("\n")[2]
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?)", last_line)) or f"exit code {result.returncode}"
    if result.returncode:
        print(result.stdout[-8000:], result.stderr[-4000:], file=sys.stderr)
    where = "the GPU" if has_gpu == "True" else "the interpreter"
    row = (platform.python_version(), torch, triton, where, counts, f"{time.monotonic() - begin:.0f}")
    return result.returncode == 0, "| " + " | ".join(row) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m op_tests.versions", description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of triton, as 3.6.0; none: the installed one")
    versions = parser.parse_args().versions
    for version in versions:
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            parser.error(f"VERSION must be like 3.6.0, got {version}")
    print(HEADER, flush=True)
    is_green = True
    for version in versions or [None]:
        passed, row = run_smoke_set(version)
        is_green &= passed
        print(row, flush=True)
    return int(not is_green)


if __name__ == "__main__":
    sys.exit(main())
