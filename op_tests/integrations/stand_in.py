"""What the stand-ins for servers share: modules put under other names, and what attention must give."""

import contextlib
import sys
import types

import torch


def made(modules: dict[str, dict]) -> dict[str, types.ModuleType]:
    """Makes modules with these attributes, and the packages that they are in, which come first."""
    names = {".".join(path.split(".")[:size]) for path in modules for size in range(1, path.count(".") + 2)}
    result = {name: types.ModuleType(name) for name in sorted(names)}
    for name, module in result.items():
        vars(module).update(modules.get(name, {}))
    return result


@contextlib.contextmanager
def installed(modules: dict[str, dict], *ours: str):
    """Makes modules under a server's names; ours, which import them, are imported anew, and left behind with them."""
    stand_ins = made(modules)
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name in stand_ins or name in ours}
    try:
        sys.modules.update(stand_ins)
        yield
    finally:
        for name in (*stand_ins, *ours):
            sys.modules.pop(name, None)
        sys.modules.update(before)


def attend(query, keys, values, seen, *, scale, cap=None, sinks=None) -> torch.Tensor:
    """Softmax attention in float64 of each row of query [T, Hq, D] over the slots of keys [S, Hkv, D] that it sees."""
    group, result = query.shape[1] // keys.shape[1], []
    for row, slots in zip(query.double(), seen):
        own_keys, own_values = (each[slots].double().repeat_interleave(group, 1) for each in (keys, values))
        logits = torch.einsum("hd,shd->hs", row, own_keys) * scale
        if cap:
            logits = cap * torch.tanh(logits / cap)
        if sinks is not None:
            logits = torch.cat([logits, sinks.double()[:, None]], 1)
        result.append(torch.einsum("hs,shd->hd", logits.softmax(-1)[:, : len(slots)], own_values))
    return torch.stack(result)
