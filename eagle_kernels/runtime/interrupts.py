"""Ctrl-C while the command line is imported, which may take seconds: one line instead of a traceback.
`eagle_kernels/__init__.py` imports this module before all others, since `python -m eagle_kernels` imports the package
before its `__main__`. The command's `main` then calls `give_back`. In any other program nothing happens here."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType

EXIT_INTERRUPTED = 130  # the status that a shell gives a program that SIGINT ended


def give_back() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)  # nothing has begun that would have to be ended


def _is_command() -> bool:
    """Returns whether this process is `python -m eagle_kernels` or `eagle-kernels`, in its imports."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module, whose name follows, perhaps in one word: -mNAME
        return re.fullmatch(r"(-\w*m)?eagle_kernels", sys.orig_argv[-len(sys.argv)]) is not None
    return bool(sys.argv) and Path(sys.argv[0]).stem == "eagle-kernels"


IS_COMMAND = _is_command()
if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
