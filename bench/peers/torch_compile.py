"""torch.compile of the plain torch formulation that a benchmark has anyway."""

import torch

from ..harness.declaration import Prepare, Run, Unavailable


def compiled(prepare: Prepare) -> Prepare:
    """The provider `prepare`, its timed call compiled whole for the case's sizes.

    The compiled call runs once here, so `prepare` must be of an op that returns its outputs, and a formulation that
    cannot be compiled says so before anything is timed.
    """

    def prepare_compiled(values: dict) -> Run:
        if not torch.cuda.is_available():
            raise Unavailable("torch.compile is compared on a GPU only")
        # each case is a program of its own: without this, the eighth runs uncompiled, and silently
        torch._dynamo.reset()
        run = torch.compile(prepare(values), fullgraph=True, dynamic=False)
        try:
            run()
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise Unavailable(f"torch.compile refuses: {type(error).__name__}: {reason}") from None
        return run

    return prepare_compiled
