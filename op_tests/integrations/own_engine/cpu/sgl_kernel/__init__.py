"""Stands in for sgl_kernel where there is no GPU: what SGLang's speculative decoding calls on the CPU, in PyTorch.

SGLang's own package of this name loads CUDA libraries. Other names of it can be imported, and raise where they are
called. Nothing here is fast.
"""

import ctypes
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.5"


class _Missing:
    """A function, type or namespace that nothing here needs."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str):
        return _missing(f"{self._name}.{name}")

    def __call__(self, *arguments, **options):
        raise NotImplementedError(f"{self._name} has no stand-in on the CPU")


def _missing(name: str) -> _Missing:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


def __getattr__(name: str) -> _Missing:
    return _missing(f"sgl_kernel.{name}")


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below this one."""

    def find_spec(self, name, path, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _missing(f"{spec.name}.{name}")
        return module

    def exec_module(self, module):
        """Does nothing: such a module is empty."""


sys.meta_path.insert(0, _Modules())


def _spans(*tensors):
    return zip(*(tensor.tolist() for tensor in tensors))


def assign_req_to_token_pool_cpu(rows, table, starts, stops, slots, width):
    at = 0
    for row, start, stop in _spans(rows, starts, stops):
        table[row, start:stop] = slots[at : at + stop - start].to(table.dtype)
        at += stop - start


def assign_extend_cache_locs_cpu(rows, table, starts, stops, slots, width):
    at = 0
    for row, start, stop in _spans(rows, starts, stops):
        slots[at : at + stop - start] = table[row, start:stop]
        at += stop - start


def assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, slots, width, topk, steps):
    size = topk * steps
    for place, (row, length) in enumerate(_spans(rows, lengths)):
        slots[place * size : (place + 1) * size] = table[row, length : length + size]


def fill_bonus_tokens_cpu(tokens, lengths, bonus, stride):
    for place, (length,) in enumerate(_spans(lengths)):
        bonus[place] = tokens.flatten()[place * stride + length - 1]


def fill_accept_out_cache_loc_cpu(paths, slots, accepted):
    nodes = paths.flatten()
    nodes = nodes[nodes >= 0].long()
    accepted[: len(nodes)] = slots[nodes]


def copy_all_layer_kv_cache_cpu(addresses, row_bytes, targets, sources):
    for address, size in _spans(addresses, row_bytes):
        rows = [ctypes.string_at(address + source * size, size) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows):
            ctypes.memmove(address + target * size, row, size)
