"""Layers of models with latent attention (MLA) in SGLang, whose pool holds one row of a latent and a key for all heads.

SGLang absorbs the weights and calls a layer of one key head, whose values are the first elements of its keys; fresh
prompts it multiplies out, to keys that are wider than their values, and writes the rows itself.
"""

from __future__ import annotations

import torch

from ...ops import gqa_decode, mla_decode, mla_prefill, mla_tree_attention, prefill_attention, tree_attention

_OF_LATENTS = {gqa_decode: mla_decode, tree_attention: mla_tree_attention, prefill_attention: mla_prefill}


def are_absorbed(layer, pool) -> bool:
    """Tells whether a layer reads latents."""
    latent_dim = getattr(pool, "kv_lora_rank", None)
    return latent_dim is not None and layer.tp_k_head_num == 1 and layer.v_head_dim == latent_dim < layer.qk_head_dim


def are_wide(layer, pool) -> bool:
    """Tells whether a layer of such a model has keys and values of heads, whose sizes differ."""
    return hasattr(pool, "kv_lora_rank") and not are_absorbed(layer, pool) and layer.v_head_dim < layer.qk_head_dim


def op_for(op, keys: dict):
    """Returns an attention op, or the one of its kind that reads latents, if these are in `keys`."""
    return _OF_LATENTS[op] if "latent_cache" in keys else op


def cache_of(layer, buffer: torch.Tensor, page_size: int) -> dict:
    """Returns the layer's part of the pool [slots, 1, D], in pages."""
    return {"latent_cache": buffer[:, 0].unflatten(0, (-1, page_size)), "latent_dim": layer.v_head_dim}


def logits_of(layer, window: int | None) -> dict:
    return {"sm_scale": layer.scaling, "window": window}


def attend_wide(query, k, v, layer, bounds, max_query: int) -> torch.Tensor:
    """Attends fresh prompts, query [T, Hq, D], to their own keys [T, Hkv, D] and values, which are narrower."""
    key = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
    narrow = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    value = torch.nn.functional.pad(narrow, (0, layer.qk_head_dim - layer.v_head_dim))
    output = prefill_attention(query, bounds, key=key, value=value, sm_scale=layer.scaling, max_query=max_query).output
    return output[..., : layer.v_head_dim]


def refusal_of(layer, pool, sinks: torch.Tensor | None) -> str | None:
    """Returns what of a layer with keys wider than its values ours cannot read."""
    if not (are_absorbed(layer, pool) or are_wide(layer, pool)):
        return f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim} elements a head"
    if sinks is not None or layer.logit_cap:
        return "sinks and soft caps of latent attention"
    return None
