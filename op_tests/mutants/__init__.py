"""Bugs to plant, each with the tests that must see it; `python -m op_tests.mutants` plants them."""

from . import engine, kernels, laws, models, plug_ins

MUTANTS = [*laws.MUTANTS, *kernels.MUTANTS, *engine.MUTANTS, *models.MUTANTS, *plug_ins.MUTANTS]
