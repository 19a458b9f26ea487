"""FlashInfer's paged decode attention and its filters of probabilities; compiles its kernels on first use."""

import torch

from ..harness.declaration import Run, Unavailable
from ..harness.inputs import prefixed_masks


def gqa_decode(values: dict) -> Run:
    """Planned once outside of the timed call, as a server does once a step for all layers."""
    flashinfer = _flashinfer(values["query"])
    query, k_cache, v_cache = values["query"], values["k_cache"], values["v_cache"]
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    # as SGLang decides
    use_tensor_cores = query.shape[1] // num_kv_heads >= 4
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores)
    wrapper.plan(
        *_pages(values, values["seq_lens"]), query.shape[1], num_kv_heads, head_dim, page_size,
        q_data_type=query.dtype, kv_data_type=k_cache.dtype,
    )  # fmt: skip
    return lambda: {"output": wrapper.run(query, (k_cache, v_cache))}


def tree_attention(values: dict) -> Run:
    """Prefill with a custom mask over the prefix and the tree, planned once outside of the timed call."""
    flashinfer = _flashinfer(values["query"])
    query, k_cache, v_cache = values["query"], values["k_cache"], values["v_cache"]
    batch_size, num_nodes, num_heads, head_dim = query.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=query.device) * num_nodes
    mask = torch.cat(prefixed_masks(values))
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        qo_indptr, *_pages(values, values["seq_lens"] + num_nodes), num_heads, num_kv_heads, head_dim, page_size,
        custom_mask=mask, q_data_type=query.dtype, kv_data_type=query.dtype,
    )  # fmt: skip
    flat = query.flatten(0, 1)
    return lambda: {"output": wrapper.run(flat, (k_cache, v_cache)).view_as(query)}


def prefill_attention(values: dict) -> Run:
    """Causal, over contiguous keys or pages, planned once outside of the timed call."""
    flashinfer = _flashinfer(values["query"])
    query, qo_indptr = values["query"], values["qo_indptr"]
    options = {"causal": True, "q_data_type": query.dtype, "kv_data_type": query.dtype}
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=query.device)
    if "key" in values:
        key, value = values["key"], values["value"]
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(qo_indptr, qo_indptr, query.shape[1], *key.shape[1:], **options)
        return lambda: {"output": wrapper.run(query, key, value)}
    k_cache, v_cache = values["k_cache"], values["v_cache"]
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    pages = _pages(values, values["seq_lens"])
    wrapper.plan(qo_indptr, *pages, query.shape[1], num_kv_heads, head_dim, page_size, **options)
    return lambda: {"output": wrapper.run(query, (k_cache, v_cache))}


def _pages(values: dict, lengths: torch.Tensor) -> list[torch.Tensor]:
    """Returns kv_indptr, kv_indices and last_page_len for these lengths, made as a server's host makes them."""
    table, lengths, page_size = values["block_table"], lengths.cpu(), values["k_cache"].shape[1]
    pages = (lengths + page_size - 1) // page_size
    kv_indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    kv_indices = torch.cat([row[:count] for row, count in zip(table.cpu(), pages.tolist())])
    last_page_len = (lengths - (pages - 1) * page_size).to(torch.int32)
    return [tensor.to(table.device) for tensor in (kv_indptr, kv_indices, last_page_len)]


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
