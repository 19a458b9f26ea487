"""Versions of triton: what cannot run is told in one line, and the references stay."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from eagle_kernels.runtime import language

ROOT = Path(__file__).parent.parent
LANGUAGE = ROOT / "eagle_kernels" / "runtime" / "language.py"

NO_TRITON = {
    "old": ("__version__ = '3.2.0'", "triton 3.4 or newer; 3.2.0 is installed"),
    "broken": (
        "raise ImportError('libtriton.so: undefined symbol')",
        "the package triton, which is installed but broken: libtriton.so: undefined symbol",
    ),
    "half_installed": (
        "import triton.runtime",
        "the package triton, which is installed but broken: No module named 'triton.runtime'",
    ),
    "raising": (
        "raise RuntimeError('no driver\\nsecond line')",
        "the package triton, which is installed but broken: no driver",
    ),
}


def install(case: str, folder: Path) -> str:
    """Writes this case's package into a folder; returns what a launch then lacks."""
    source, missing = NO_TRITON[case]
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text(source + "\n")
    (folder / "triton" / "language.py").touch()
    return missing


@pytest.mark.parametrize("case", NO_TRITON)
def test_an_unusable_triton_is_a_warning(case, tmp_path, monkeypatch):
    missing = install(case, tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match=f"^eagle_kernels: kernels cannot run: they need {re.escape(missing)}$"):
        names = runpy.run_path(str(LANGUAGE))
    assert names["MISSING"] == missing and names["tl"].anything is names["triton"]


def test_a_newer_triton_is_a_warning(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.10.1")
    with pytest.warns(UserWarning, match="^eagle_kernels: tested with triton up to 3.9; 3.10.1 is untested$"):
        assert runpy.run_path(str(LANGUAGE))["MISSING"] is None


def test_an_installer_takes_the_versions_that_were_run():
    oldest, newest = language.OLDEST_TRITON, language.NEWEST_TRITON
    wanted = f"triton>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1};"
    assert wanted in (ROOT / "setup.py").read_text(encoding="utf-8")
