"""Bugs of models, of drafters on the host, of examples and of tools."""

from __future__ import annotations

from .mutant import ENGINE, Mutant

_MODELS = ENGINE + "models/"
_FORMULA = "op_tests/engine/test_decoder_formula.py::test_"

MUTANTS = [
    Mutant(
        "long waves by the bound of short ones",
        [(_MODELS + "rotary.py", "is_long = wavelengths > length / low", "is_long = wavelengths > length / high")],
        [_FORMULA + "a_decoder_is_the_formula[llama, llama3]"],
    ),
    Mutant(
        "a window of one key more without a pool",
        [(_MODELS + "causal_attend.py", "(distance < (len", "(distance <= (len")],
        [_FORMULA + "attention_without_a_pool"],
    ),
]  # fmt: skip
