"""What the tests of all adapters share."""

import importlib

import pytest


@pytest.fixture(params=["reference", "triton"])
def backend(request, monkeypatch):
    """Both backends on every device: CPU tensors run the kernels through the interpreter too."""
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", request.param)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(name, version)` makes a distribution with files and entry points, ahead of others with its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, version: str, entries: str = "", files: dict[str, str] | None = None) -> None:
        info = {f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
        info[f"{name}-{version}.dist-info/entry_points.txt"] = entries
        for path, text in (info | (files or {})).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        importlib.invalidate_caches()

    return make
