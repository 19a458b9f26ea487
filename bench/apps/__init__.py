"""Benchmarks of the whole engine, by name: `python -m bench.run --app generation`.

`main` of each is its command line; `tables`, where there is one, returns the sections that the README of a GPU's
results has about the file that it writes.
"""

from . import drafters, experiment, generation, load, prefixes, requests, server, suffix_cache

# in the order of their tables
_MODULES = (generation, load, prefixes, requests, server, drafters, suffix_cache, experiment)
APPS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}
