"""Runs pytest in forks of one process that has imported torch, which takes longer than most mutants' tests.

`__main__.py` starts it as a program of its own, so that nothing of the repository is imported before the fork. A line
of stdin is JSON: a folder, for how many seconds at most, and pytest's arguments. A line of stdout is pytest's exit
code there, negative where a signal ended it; what it printed is in the folder's output.txt.
"""

import gc
import json
import os
import signal
import sys

import pytest
import torch  # noqa: F401

gc.freeze()  # no collection in a fork looks at what torch holds
for line in sys.stdin:
    folder, seconds, *arguments = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

signal.alarm(seconds)
os.chdir(folder)
os.environ["PYTHONPATH"] = sys.path[0] = folder  # there was this file's folder
for descriptor, path in enumerate((os.devnull, "output.txt")):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
os.dup2(1, 2)
sys.exit(pytest.main(arguments))
