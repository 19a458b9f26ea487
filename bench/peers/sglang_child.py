"""SGLang's engine in the process of engine_child.py, which says what each method is for.

It is copied beside that script, and imports nothing of this repository but `sglang_traffic.py`, which may lie beside.
"""

import importlib
import os

PACKAGE = "sglang"
PACKAGES = {
    "sglang": ("sglang",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
    "fa3": ("vllm_fa3",),  # where it takes the place of SGLang's own
}
if os.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE") != "false":  # else SGLang is told to leave it
    PACKAGES["flashinfer"] = ("flashinfer-python",)


class Engine:
    """See engine_child.py."""

    def __init__(self, arguments: dict):
        self._engine = importlib.import_module(PACKAGE).Engine(**arguments)
        self.backend = getattr(self._engine.server_args, "attention_backend", None)
        self._steps = 0

    def generate(self, prompts: list[list[int]], sampling: dict, length: int | list[int]) -> list[list[int]]:
        lengths = length if isinstance(length, list) else [length]
        parameters = [sampling | {"max_new_tokens": each, "ignore_eos": True} for each in lengths]
        parameters = parameters if isinstance(length, list) else parameters[0]
        outputs = self._engine.generate(input_ids=prompts, sampling_params=parameters)
        outputs = [outputs] if isinstance(outputs, dict) else outputs
        self._steps += sum(output["meta_info"].get("spec_verify_ct") or 0 for output in outputs)
        return [output["output_ids"] for output in outputs]

    def steps(self) -> float:
        return self._steps

    def serve(self, traffic: dict, write) -> None:
        importlib.import_module("sglang_traffic").serve(self._engine, traffic, write)

    def stop(self) -> None:
        self._engine.shutdown()
