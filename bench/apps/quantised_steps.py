"""Steps of a quantised target beside those in 16 bit: the section `quantised` of `--app generation --quantize NAME`.

The target is quantised at loading, as `--quantize` of the commands does it, from weights that are drawn as they are
read; its output stays in 16 bit. A tree step is timed with the head in 16 bit and quantised like the target.

    loading    memory of the weights, and the most that was held while they were loaded, and without one layer in 16 bit
    plain      a step of plain decoding, and what it takes of one in 16 bit
    tree       a step of 8/5/64, and what it takes of the target's own plain step
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from .random_models import quantised_head, quantised_target

if TYPE_CHECKING:
    from .generation import Bench

BATCHES = (1, 8, 32)
TREE, ACCEPT = (8, 5, 64), 4.0


def weight_bytes(module: nn.Module) -> int:
    """Returns the bytes of a model's weights, quantised ones included."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())


def quantised(bench: Bench, name: str) -> None:
    """Times a quantised target beside the bench's own."""
    whole_ms = {}
    for batch_size in BATCHES:
        whole_ms[batch_size], _ = bench.step_ms(bench.engine(batch_size), batch_size, is_plain=True)
        bench.record("quantised", f"plain B={batch_size}", "16 bit", whole_ms[batch_size])
    target = _load(bench, name)
    heads = {"16 bit": bench.draft, name: quantised_head(bench.draft, _with_output(name))}
    plain_ms = {}
    for batch_size in BATCHES:
        engine = bench.engine(batch_size, target=target)
        plain_ms[batch_size], _ = bench.step_ms(engine, batch_size, is_plain=True)
        ratio = plain_ms[batch_size] / whole_ms[batch_size]
        bench.record("quantised", f"plain B={batch_size}", name, plain_ms[batch_size], of_16_bit=ratio)
        del engine
    for head_name, head in heads.items():
        engine = bench.engine(1, TREE, ACCEPT, target=target, draft=head)
        step_ms, length = bench.step_ms(engine, 1, is_plain=False)
        case = f"tree B=1 8/5/64, head in {head_name}"
        bench.record("quantised", case, name, step_ms, accept_length=length, of_plain=step_ms / plain_ms[1])
        del engine


def _with_output(method: str) -> dict[str, str]:
    """Returns how a head is quantised: its output, which is most of it, as well."""
    return {"dense": method, "lm_head": method}


def _load(bench: Bench, name: str) -> nn.Module:
    """Returns the quantised target; records what loading takes."""
    device, is_measured = bench.device, bench.device.type == "cuda"
    if is_measured:
        gc.collect()  # the pools of engines that are gone
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start_s = time.perf_counter()
    target = quantised_target(bench.shape, device, bench.dtype, name, max_position_embeddings=bench.max_length)
    numbers = {"weights_gib": weight_bytes(target) / 2**30}
    if is_measured:
        torch.cuda.synchronize(device)
        most = torch.cuda.max_memory_allocated(device) - before
        # one layer of the decoder, as it is in the file
        layer = sum(parameter.nbytes for parameter in bench.target.model.layers[0].parameters())
        numbers |= {"most_gib": most / 2**30, "most_less_a_layer_of_weights": (most - layer) / weight_bytes(target)}
    bench.record("quantised", "loading", name, 1e3 * (time.perf_counter() - start_s), **numbers)
    return target
