"""vLLM's Triton attention, out of the wheel vllm 0.26.0: `.peers/vllm_triton/*.py`.

One kernel for all ops, which reads keys from pages, without tensor descriptors, as vLLM runs it on NVIDIA's and AMD's
GPUs. vLLM's default on Hopper is not this one but FlashAttention 3 (`fa3`).
"""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace

import torch

from eagle_kernels.runtime.language import tl, triton

from ..harness.declaration import Run, Unavailable
from ..harness.inputs import is_chain, visible_drafts
from ..harness.timing import quick_us
from . import FOLDER
from .wheel_files import Stub, import_file

_OPS = "vllm.v1.attention.ops"
_NEEDS = {"triton_unified_attention": ("triton_attention_helpers",)}
_KV_QUANT_MODES = {
    "NONE": 0, "FP8_PER_TENSOR": 1, "INT8_PER_TOKEN_HEAD": 2, "FP8_PER_TOKEN_HEAD": 3, "INT4_PER_TOKEN_HEAD": 4
}  # fmt: skip
# Into how many segments the keys of a request are split where each has one query: None is the kernel without segments.
# vLLM's backend takes 16, or None from 128 programs (requests times KV heads) on.
_SEGMENTS = (None, 8, 16, 32, 64)
# more than a tile has: the kernel looks up pages, and rows of the bias, for whole tiles
_MARGIN = 128


def gqa_decode(values: dict) -> Run:
    return _attention(values, _bounds(values, 1), values["seq_lens"], 1)


def tree_attention(values: dict) -> Run:
    """Chains are causal. A tree is a bias on the scores of drafts by drafts, the same one for all requests."""
    num_nodes, visible = values["query"].shape[1], visible_drafts(values)
    bias = None
    if not is_chain(visible):
        if not torch.equal(visible, visible[:1].expand_as(visible)):
            raise Unavailable("takes one tree for all requests")
        bias = torch.zeros(num_nodes + _MARGIN, num_nodes, device=visible.device)
        bias[:num_nodes].masked_fill_(~visible[0], float("-inf"))
    return _attention(values, _bounds(values, num_nodes), values["seq_lens"] + num_nodes, num_nodes, bias)


def prefill_attention(values: dict) -> Run:
    if "key" in values:
        raise Unavailable("reads keys from pages only")
    return _attention(values, values["qo_indptr"], values["seq_lens"], values["max_query"])


def _attention(values: dict, bounds, lengths, longest_query: int, bias=None) -> Run:
    """Returns the call with the number of segments that is fastest for the case, which is searched once."""
    attention = _module("triton_unified_attention").unified_attention
    query, key, value = values["query"].flatten(0, -3), values["k_cache"], values["v_cache"]
    table = torch.nn.functional.pad(values["block_table"].clamp(min=0), (0, _MARGIN))
    longest_key, (num_tokens, num_heads, head_dim) = int(lengths.max()), query.shape
    mode = _KV_QUANT_MODES["FP8_PER_TENSOR" if key.dtype.itemsize == 1 else "NONE"]
    output = torch.empty_like(query)

    def prepared(segments: int | None) -> Run:
        split = {}
        if segments:
            # as vLLM's backend allocates them, for all layers
            shape = (num_tokens, num_heads, segments)
            split = {"seq_threshold_3D": num_tokens, "num_par_softmax_segments": segments} | {
                f"softmax_segm_{name}": torch.empty(*shape, *more, device=query.device)
                for name, more in (("output", (triton.next_power_of_2(head_dim),)), ("max", ()), ("expsum", ()))
            }

        def run():
            attention(
                query, key, value, output, bounds, longest_query, lengths, longest_key, head_dim**-0.5, True, (-1, -1),
                table, 0, None, values.get("k_scale"), values.get("v_scale"), **split, qq_bias=bias, kv_quant_mode=mode,
            )  # fmt: skip
            return {"output": output.view_as(values["query"])}

        return run

    if longest_query > 1:  # which vLLM's launcher never splits
        return prepared(None)
    return min(map(prepared, _SEGMENTS), key=quick_us)


def mla_decode(values: dict) -> Run:
    """Takes the number of splits that is fastest for the case, which is searched once."""
    return _latent_attention(values, values["query"], values["block_table"], values["seq_lens"])


def mla_tree_attention(values: dict) -> Run:
    """Of chains each token as a request of its own, as vLLM's backend has them: it reads the latents once per token."""
    query, visible = values["query"], visible_drafts(values)
    batch_size, num_nodes = query.shape[:2]
    if not is_chain(visible):
        raise Unavailable("knows no trees on latents")
    lengths = (values["seq_lens"][:, None] + 1 + torch.arange(num_nodes, device=query.device)).flatten().int()
    table = values["block_table"].repeat_interleave(num_nodes, 0)
    run = _latent_attention(values, query.flatten(0, 1), table, lengths)
    return lambda: {"output": run()["output"].unflatten(0, (batch_size, num_nodes))}


def _latent_attention(values: dict, query, table, lengths) -> Run:
    decode = _module("triton_decode_attention").decode_attention_fwd
    cache, latent_dim = values["latent_cache"][:, :, None], values["latent_dim"]
    if cache.dtype.itemsize == 1:
        raise Unavailable("8-bit latents are multiplied in 8 bits here, which is another result")
    batch_size, num_heads, _ = query.shape
    table, output = table.clamp(min=0), query.new_empty(batch_size, num_heads, latent_dim)
    lse = torch.empty(batch_size, num_heads, device=query.device)
    one = torch.ones((), device=query.device)

    def prepared(num_splits: int) -> Run:
        logits = torch.empty(batch_size, num_heads, num_splits, latent_dim + 1, device=query.device)

        def run():
            decode(query, cache, cache[..., :latent_dim], output, lse, table, lengths, logits, num_splits,
                   values["sm_scale"], cache.shape[1], k_scale=one, v_scale=one, is_mla=True)  # fmt: skip
            return {"output": output}

        return run

    return min((prepared(num_splits) for num_splits in (1, 2, 4, 8, 16, 32, 64)), key=quick_us)


def _bounds(values: dict, num_tokens: int) -> torch.Tensor:
    query = values["query"]
    return torch.arange(len(query) + 1, dtype=torch.int32, device=query.device) * num_tokens


@functools.cache
def _module(name: str) -> ModuleType:
    """One of the files, imported with what it asks of vLLM about the platform, and the other file."""
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_rocm=lambda: torch.version.hip is not None,
        is_device_capability_family=lambda family: torch.cuda.get_device_capability()[0] == family // 10,
    )
    envs = Stub("vllm.envs", VLLM_BATCH_INVARIANT=False)
    stubs = [
        Stub("vllm", envs=envs),
        envs,
        Stub("vllm.logger"),
        Stub("vllm.platforms", current_platform=platform),
        Stub("vllm.triton_utils", tl=tl, triton=triton),
        Stub("vllm.v1.kv_cache_interface", KVQuantMode=SimpleNamespace(**_KV_QUANT_MODES)),
    ]
    needed = {f"{_OPS}.{other}": _module(other) for other in _NEEDS.get(name, ())}
    return import_file(FOLDER / "vllm_triton" / f"{name}.py", {stub.__name__: stub for stub in stubs} | needed)
