"""FlashInfer's paged decode attention and its filters of probabilities; compiles its kernels on first use."""

from __future__ import annotations

import torch

from ..harness.declaration import Run, Unavailable
from ..harness.inputs import visible_drafts


def gqa_decode(values: dict) -> Run:
    """Planned once outside of the timed call, as a server does once a step for all layers."""
    flashinfer = _flashinfer(values["query"])
    query, k_cache, v_cache = values["query"], values["k_cache"], values["v_cache"]
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    # sizes as a server's host knows them
    seq_lens = values["seq_lens"].cpu()
    pages = (seq_lens + page_size - 1) // page_size
    kv_indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    table = values["block_table"].cpu()
    kv_indices = torch.cat([row[:count] for row, count in zip(table, pages.tolist())])
    last_page_len = (seq_lens - (pages - 1) * page_size).to(torch.int32)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=query.device)
    # as SGLang decides
    use_tensor_cores = query.shape[1] // num_kv_heads >= 4
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores)
    wrapper.plan(
        *(tensor.to(query.device) for tensor in (kv_indptr, kv_indices, last_page_len)),
        query.shape[1], num_kv_heads, head_dim, page_size, q_data_type=query.dtype, kv_data_type=k_cache.dtype,
    )  # fmt: skip
    return lambda: {"output": wrapper.run(query, (k_cache, v_cache))}


def tree_attention(values: dict) -> Run:
    """Prefill with a custom mask over the prefix and the tree, planned once as above."""
    flashinfer = _flashinfer(values["query"])
    query, k_cache, v_cache = values["query"], values["k_cache"], values["v_cache"]
    batch_size, num_nodes, num_heads, head_dim = query.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    prefixes = values["seq_lens"].cpu()
    lengths = prefixes + num_nodes
    pages = (lengths + page_size - 1) // page_size
    kv_indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    table = values["block_table"].cpu()
    kv_indices = torch.cat([row[:count] for row, count in zip(table, pages.tolist())])
    last_page_len = (lengths - (pages - 1) * page_size).to(torch.int32)
    qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32) * num_nodes
    visible = visible_drafts(values)
    mask = torch.cat([
        torch.nn.functional.pad(visible[request], (prefix, 0), value=True).flatten()
        for request, prefix in enumerate(prefixes.tolist())
    ])  # fmt: skip
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        *(tensor.to(query.device) for tensor in (qo_indptr, kv_indptr, kv_indices, last_page_len)),
        num_heads, num_kv_heads, head_dim, page_size, custom_mask=mask, q_data_type=query.dtype,
        kv_data_type=query.dtype,
    )  # fmt: skip
    flat = query.flatten(0, 1)
    return lambda: {"output": wrapper.run(flat, (k_cache, v_cache)).view_as(query)}


def top_k_renorm(values: dict) -> Run:
    flashinfer = _flashinfer(values["probs"])
    return lambda: flashinfer.sampling.top_k_renorm_probs(values["probs"], values["top_k"])


def top_p_renorm(values: dict) -> Run:
    flashinfer = _flashinfer(values["probs"])
    return lambda: flashinfer.sampling.top_p_renorm_probs(values["probs"], values["top_p"])


def renorms(values: dict) -> tuple:
    """Its functions (probs, top_k) and (probs, top_p), which a pipeline of several projects' ops is made of."""
    sampling = _flashinfer(values["target_logits"]).sampling
    return sampling.top_k_renorm_probs, sampling.top_p_renorm_probs


def _flashinfer(tensor: torch.Tensor):
    try:
        import flashinfer
    except ImportError as error:
        raise Unavailable(f"flashinfer is not installed ({error})") from None
    if tensor.device.type != "cuda":
        raise Unavailable("flashinfer needs a GPU")
    return flashinfer
