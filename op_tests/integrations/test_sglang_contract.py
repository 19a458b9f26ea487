"""What the plug-in relies on in SGLang is held against the sources of released versions, which are never imported.

Plain runs skip this, since a wheel of SGLang is 20 to 40 MB. EAGLE_KERNELS_SGLANG_WHEELS is a folder of wheels, to
which missing ones are added, or `download` for a temporary one:

    EAGLE_KERNELS_SGLANG_WHEELS=download python -m pytest op_tests/integrations/test_sglang_contract.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_kernels.integrations.sglang import contract, hooks
from eagle_kernels.integrations.sglang.sources import Sources

WHEELS = os.environ.get("EAGLE_KERNELS_SGLANG_WHEELS", "")
if not WHEELS:
    pytest.skip("needs SGLang's wheels: set EAGLE_KERNELS_SGLANG_WHEELS=FOLDER or =download", allow_module_level=True)

RULES = dict(contract.rules())
DOWNLOAD = (
    "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--platform", "manylinux_2_34_x86_64",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sglang") if WHEELS == "download" else Path(WHEELS)


@pytest.fixture(scope="module", params=hooks.TESTED)
def sources(request, folder) -> Sources:
    """The sources of a version; a wheel that cannot be had is told once for each case."""
    pattern = f"sglang-{request.param}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", *DOWNLOAD, "-d", str(folder), f"sglang=={request.param}"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            reason = (result.stderr.strip() or result.stdout.strip() or "pip failed").splitlines()[-1]
            pytest.skip(f"no wheel of SGLang {request.param}: {reason}")
    return Sources.of_wheel(next(folder.glob(pattern)))


def test_no_two_rules_have_one_name():
    assert len(RULES) == len(list(contract.rules()))


@pytest.mark.parametrize("name", RULES)
def test_it_holds(sources, name):
    assert RULES[name](sources) is None
