"""A laboratory on top of the public engine: model pairs, prompts, measurements. `python -m bench.lab.loader --help`."""
