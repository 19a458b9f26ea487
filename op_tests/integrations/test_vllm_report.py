"""What `python -m eagle_kernels env` prints of vLLM."""

import sys

import pytest

from eagle_kernels.integrations.vllm import hooks
from eagle_kernels.tools.cli.main import main

OURS = "[eagle_kernels.reports]\nvllm = eagle_kernels.integrations.vllm.report:lines\n"


def printed(capsys) -> list[str]:
    assert main(["env"]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("vllm")]


def test_it_lists_hooks_and_what_differs(install, capsys):
    """Of a vLLM that would not import."""
    install("eagle_kernels", "9.9", OURS)
    source = "class EngineArgs:\n    attention_backend = None\n    def create_engine_config(self): ...\n"
    files = {"vllm/__init__.py": "raise RuntimeError", "vllm/engine/arg_utils.py": source}
    install("vllm", hooks.TESTED[-1], files=files)
    first, *rest = printed(capsys)
    assert first == (
        "vllm: 0.33.0 (checked, not run), within 0.26.0..0.27.1 and 0.31.0..0.33.0, which the plug-in was checked with"
    )
    told = [line for line in rest if line.startswith("vllm hook ")]
    assert len(told) == len(hooks.GUARDS) + len(hooks.HOOKS)
    assert "vllm hook EngineArgs.create_engine_config: found (guard)" in told
    missing = "vllm.v1.worker.gpu.model_runner.init_model_state is not a function"
    assert f"vllm hook model_runner.init_model_state: {missing}" in told
    differs = [line for line in rest if line.startswith("vllm differs: ")]
    assert told + differs == rest
    assert len(differs) > 100 and not any("attention_backend" in line for line in differs if "EngineArgs" in line)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(("allowed", "is_out"), [
    (None, False), ("", True), ("other", True), ("eagle_kernels", False), ("other,eagle_kernels", False),
    ("other, eagle_kernels", True),
])  # fmt: skip
def test_it_says_that_the_plug_in_is_left_out(install, capsys, monkeypatch, allowed, is_out):
    """As vLLM's own loading of plug-ins leaves it out, which strips no names."""
    install("eagle_kernels", "9.9", OURS)
    install("vllm", "0.28.0", files={"vllm/__init__.py": ""})
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    lines = printed(capsys)
    assert lines[0].startswith("vllm: 0.28.0, outside of ")
    assert ("vllm plug-in: VLLM_PLUGINS leaves eagle_kernels out" in lines) == is_out
