"""SGLang's attention on our kernels: prefill, decode, verification of trees, and the levels of a draft model.

SGLang makes these classes through `plugin.py`; importing this file imports SGLang. B requests, N nodes of a tree, K
beams (topk), S draft steps, P tokens of a page.

What a forward pass reads
    Before each pass one launch lists the pages of all requests (`kv_indices`), as SGLang's own backend does: CUDA
    graphs read this list and not `req_to_token`, which the scheduler may already change for the next batch. A tree's
    nodes and a draft's tokens are the last entries of a request's list. Trees come as packed words (trees.py). The plan
    of a pass reads lengths alone, which belong to the graph: it is a launch of the graph.
Draft levels
    SGLang gives beam k the slots k * S..k * S + S - 1 after the prefix; beam k of step i sees the first i + 1 of them.
    So one list serves all steps, the beams share one reading of the prefix, and a step is a constant mask.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from ...ops import gqa_decode, kv_indices, plan_attention, prefill_attention, tree_attention
from ...ops.kv.kv_indices import Output as Pages
from . import latents
from .latents import op_for
from .trees import PACKED, num_words

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class PageLists:
    """The pages of all requests of a forward pass, in buffers that CUDA graphs can read.
    pages: a `kv_indices.Output` of the current pass. plan: in a graph, for layers without a window."""

    def __init__(self, req_to_token: torch.Tensor, page_size: int, max_batch: int = 0, extra: int = 0):
        self.req_to_token, self.page_size = req_to_token, page_size
        self.max_pages = -(-(req_to_token.shape[1] + extra) // page_size)
        self.buffers = self._allocate(max_batch, max_batch * self.max_pages)
        self.lengths = torch.zeros(max_batch, dtype=torch.int64, device=req_to_token.device)
        self.pages: Pages | None = None
        self.listed, self.plan = self.lengths, None
        self._fronts: dict[int, tuple[Pages, torch.Tensor]] = {}  # of buffers and lengths, by batch size

    def _allocate(self, batch_size: int, capacity: int) -> Pages:
        make = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=self.req_to_token.device)  # noqa: E731
        return Pages(make(batch_size + 1), make(capacity), make(batch_size), make(1))

    def list_static(self, rows: torch.Tensor, seq_lens: torch.Tensor, extra: int = 0) -> None:
        """Lists tokens 0..seq_lens + extra - 1 of these rows in the graph's buffers."""
        batch_size = len(rows)
        if batch_size not in self._fronts:
            bounds, listed, last_page_len, overflow = self.buffers
            listed = listed[: batch_size * self.max_pages]
            pages = Pages(bounds[: batch_size + 1], listed, last_page_len[:batch_size], overflow)
            self._fronts[batch_size] = pages, self.lengths[:batch_size]
        self.pages, lengths = self._fronts[batch_size]
        if extra:
            seq_lens = torch.add(seq_lens, extra, out=lengths)
        self._list(rows, seq_lens, self.pages)

    def plan_static(self) -> None:
        """Plans what was listed, within a graph."""
        self.plan = plan_attention(self.listed)

    def list_fresh(self, rows: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int | None, extra: int = 0) -> None:
        """Lists them in new buffers, for a pass outside of graphs. num_tokens: sum of seq_lens, None if not known."""
        batch_size = len(rows)
        capacity = batch_size * self.max_pages
        if num_tokens is not None:
            capacity = min(capacity, (num_tokens + batch_size * extra) // self.page_size + 2 * batch_size)
        self.pages = self._allocate(batch_size, capacity)
        self._list(rows, seq_lens + extra if extra else seq_lens, self.pages)

    def _list(self, rows: torch.Tensor, lengths: torch.Tensor, out: Pages) -> None:
        self.listed, self.plan = lengths, None
        kv_indices(
            rows, self.req_to_token, lengths, capacity=len(out.kv_indices), page_size=self.page_size, keep_unused=True,
            out=out,
        )  # fmt: skip

    def table(self, window: int | None = None) -> dict[str, torch.Tensor | None]:
        """Returns the page table, and the plan of a layer with this window, as arguments of the attention ops."""
        return self.keys() | {"plan": self.plan if window is None else None}

    def keys(self) -> dict[str, torch.Tensor]:
        """Returns the page table as arguments of the attention ops."""
        pages = self.pages
        return {"kv_indptr": pages.kv_indptr, "kv_indices": pages.kv_indices, "last_page_len": pages.last_page_len}


class EagleKernelsAttnBackend(TritonAttnBackend):
    """Attention of a target model, and of a draft model outside of its levels.
    It inherits from SGLang's Triton backend for its fields, and because SGLang captures the draft's extend in a CUDA
    graph for the classes of a list only.
    reader: the backend of SGLang that reads a draft's prompts, None where this one does (prompts.py)."""

    reader = None

    def __init__(self, model_runner, skip_prefill: bool = False):
        super().__init__(model_runner, skip_prefill=skip_prefill)
        page_size = self.page_size
        is_paged = page_size & (page_size - 1) == 0 and page_size <= 256
        self.lists = PageLists(self.req_to_token, page_size if is_paged else 1)
        self.is_static = False  # the current pass is that of a CUDA graph
        self.max_query, self.has_prefix = 0, True
        self.qo_bounds: torch.Tensor | None = None
        self._verify_mask = self._make_verify_mask(0)

    def _make_verify_mask(self, max_batch: int) -> VerifyMask | None:
        if self.is_draft_runner or self.skip_prefill or not self.num_draft_tokens:
            return None
        shape = (max_batch, self.num_draft_tokens, num_words(self.num_draft_tokens))
        # each node sees the root: what a graph is captured with, and what its padding reads
        return VerifyMask(torch.ones(shape, dtype=torch.int64, device=self.device), PACKED, max_batch)

    # what SGLang calls before a forward pass

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, **_) -> None:
        if max_bs <= len(self.lists.lengths):
            return  # graphs that were captured read these buffers
        self.lists = PageLists(self.req_to_token, self.lists.page_size, max_bs)
        self._verify_mask = self._make_verify_mask(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        batch_size, mode = forward_batch.batch_size, forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            raise ValueError(f"eagle_kernels: forward mode {mode} does not run in a CUDA graph")
        extra = self._num_nodes(forward_batch) if mode.is_target_verify() else 0
        rows, seq_lens = forward_batch.req_pool_indices[:batch_size], forward_batch.seq_lens[:batch_size]
        self.lists.list_static(rows, seq_lens, extra)
        self.is_static = True

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        self.lists.plan_static()

    def init_forward_metadata(self, forward_batch) -> None:
        mode = forward_batch.forward_mode
        self.is_static = False
        if self._is_read_by_another(mode):
            self.reader.init_forward_metadata(forward_batch)
            return
        is_extend = not (mode.is_decode_or_idle() or mode.is_target_verify())
        if is_extend:
            lengths, given = forward_batch.extend_seq_lens, forward_batch.extend_seq_lens_cpu
            self.max_query = max(given) if given is not None else int(lengths.max())
            self.qo_bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(lengths, 0, dtype=torch.int32, out=self.qo_bounds[1:])
            prefixes = getattr(forward_batch, "extend_prefix_lens_cpu", None)
            self.has_prefix = prefixes is None or any(prefixes)
        extra = self._num_nodes(forward_batch) if mode.is_target_verify() else 0
        self.lists.list_fresh(forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.seq_lens_sum, extra)

    def _is_read_by_another(self, mode) -> bool:
        is_ours = mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()
        return self.reader is not None and not is_ours

    def _num_nodes(self, forward_batch) -> int:
        return int(getattr(forward_batch.spec_info, "draft_token_num", None) or self.num_draft_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    # what a layer calls

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **unsupported):
        self._check_layer(layer, sinks, unsupported)
        if save_kv_cache:
            self._save(layer, forward_batch, k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self._read(layer, sinks, self.lists)
        return op_for(gqa_decode, keys)(query, **keys).output.view(len(query), -1)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **unsupported):
        self._check_layer(layer, sinks, unsupported)
        mode = forward_batch.forward_mode
        if self._is_read_by_another(mode):
            more = {} if sinks is None else {"sinks": sinks}
            return self.reader.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)
        if save_kv_cache and k is not None:
            self._save(layer, forward_batch, k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if mode.is_target_verify():
            output = self._verify(query, layer, forward_batch, sinks)
        elif mode.is_draft_extend_v2() and self.is_static:
            rows = query.unflatten(0, (len(self.lists.pages.last_page_len), -1))
            keys = self._read(layer, sinks, self.lists)
            output = op_for(tree_attention, keys)(rows, **keys, is_causal=True).output
        elif latents.are_wide(layer, self.token_to_kv_pool):
            output = latents.attend_wide(query, k, v, layer, self.qo_bounds, self.max_query)
        else:
            keys = self._cache(layer, self.lists)
            is_fresh = k is not None and not self.has_prefix and "k_cache" in keys
            if is_fresh and keys["k_cache"].dtype == query.dtype:
                keys = {"key": k.view(-1, *keys["k_cache"].shape[2:]), "value": v.view(-1, *keys["v_cache"].shape[2:])}
            else:
                keys |= self.lists.keys()
            options = self._logits(layer, sinks) | {"max_query": self.max_query}
            output = op_for(prefill_attention, keys)(query, self.qo_bounds, **keys, **options).output
        return output.reshape(len(query), -1)

    def _verify(self, query, layer, forward_batch, sinks) -> torch.Tensor:
        batch_size = len(self.lists.pages.last_page_len)
        rows = query.unflatten(0, (batch_size, -1))
        mask = self._verify_mask.buffer[:batch_size] if self.is_static else forward_batch.spec_info.custom_mask
        if mask is None or mask.dtype != torch.int64:
            tree = {"is_causal": True}  # no tree: SGLang's warm-up of other kernels
        else:
            tree = {"tree_mask": mask.view(*rows.shape[:2], -1), "positions": forward_batch.positions}
        keys = self._read(layer, sinks, self.lists)
        return op_for(tree_attention, keys)(rows, **tree, **keys).output

    def _save(self, layer, forward_batch, k, v) -> None:
        """Writes keys and values into the pool; SGLang's function divides in place by the scales of an fp8 pool."""
        scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v, *scales)

    def _read(self, layer, sinks: torch.Tensor | None, lists: PageLists) -> dict:
        """Returns what decoding and trees read: the layer's keys and values by these lists, and how to weigh them."""
        return self._cache(layer, lists) | lists.table(_window(layer)) | self._logits(layer, sinks)

    def _logits(self, layer, sinks: torch.Tensor | None) -> dict:
        """Returns what changes logits, as arguments of the ops."""
        if latents.are_absorbed(layer, self.token_to_kv_pool):
            return latents.logits_of(layer, _window(layer))
        soft_cap = layer.logit_cap or None
        return {"sm_scale": layer.scaling, "soft_cap": soft_cap, "window": _window(layer), "sinks": sinks}

    def _check_layer(self, layer, sinks: torch.Tensor | None, unsupported: dict) -> None:
        """Refuses what our attention does not have; this happens at the first forward pass, when SGLang warms up."""
        given = [name for name, value in unsupported.items() if value is not None]
        reason = None
        if given:
            reason = f"{', '.join(given)} (given by the model's attention)"
        elif layer.qk_head_dim != layer.v_head_dim:
            reason = latents.refusal_of(layer, self.token_to_kv_pool, sinks)
        if reason is None:
            reason = _refusal_of(layer)
        if reason is not None:
            raise NotImplementedError(
                f"eagle_kernels: layer {layer.layer_id}: the attention backend eagle_kernels does not support {reason}"
                "; start SGLang with another --attention-backend"
            )

    def _cache(self, layer, lists: PageLists) -> dict:
        """Returns the layer's part of the pool in pages, and the scales of an fp8 pool."""
        both = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if latents.are_absorbed(layer, self.token_to_kv_pool):
            return latents.cache_of(layer, both[0], lists.page_size)
        buffers = zip(("k_cache", "v_cache"), both)
        cache = {name: buffer.unflatten(0, (-1, lists.page_size)) for name, buffer in buffers}
        if cache["k_cache"].dtype in FP8 and layer.k_scale is not None and layer.v_scale is not None:
            cache["k_scale"], cache["v_scale"] = layer.k_scale.float().view(1), layer.v_scale.float().view(1)
        return cache


class DraftStep(EagleKernelsAttnBackend):
    """Attention of one level of drafting; `DraftLevels` lists the pages for all of them."""

    def __init__(self, model_runner, levels: DraftLevels, step: int):
        super().__init__(model_runner, skip_prefill=True)
        self.levels = levels
        topk, num_steps = levels.topk, levels.speculative_num_steps
        bits = [sum(1 << (beam * num_steps + earlier) for earlier in range(step + 1)) for beam in range(topk)]
        words = [[_signed(row >> 64 * word) for word in range(num_words(topk * num_steps))] for row in bits]
        self.request_mask = torch.tensor(words, dtype=torch.int64, device=self.device)[None]
        self.static_masks = self.masks = self.masks_for(0)  # [B, K, W], the same of every request

    def masks_for(self, batch_size: int) -> torch.Tensor:
        """Returns the mask of every request of a batch."""
        return self.request_mask.repeat(batch_size, 1, 1)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **unsupported):
        self._check_layer(layer, sinks, unsupported)
        if save_kv_cache:
            self._save(layer, forward_batch, k, v)
        levels = self.levels
        rows = q.reshape(-1, levels.topk, layer.tp_q_head_num, layer.qk_head_dim)
        positions = {}
        if _window(layer) is not None:
            positions = {"positions": forward_batch.positions, "key_positions": levels.key_positions}
        drafts = {"tree_mask": self.masks, "num_draft_keys": levels.num_keys, **positions}
        keys = self._read(layer, sinks, levels.lists)
        return op_for(tree_attention, keys)(rows, **drafts, **keys).output.view(q.shape[0], -1)


class DraftLevels:
    """The attention of all levels of drafting but the last, which is not run."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.num_keys = topk * speculative_num_steps
        self.attn_backends = [DraftStep(model_runner, self, step) for step in range(speculative_num_steps - 1)]
        first = self.attn_backends[0]
        self.device, self.max_context_len = first.device, first.max_context_len
        # With pages and several beams SGLang puts each beam on pages of its own: the list has the slots that are used.
        self.is_scattered = topk > 1 and first.page_size > 1
        self.page_size = 1 if self.is_scattered else first.lists.page_size
        # near the end of a request's row drafts may reach past it
        self.lists = PageLists(first.req_to_token, self.page_size, extra=self.num_keys)
        self.has_window = first.sliding_window_size is not None
        self.offsets = torch.arange(speculative_num_steps, device=self.device).repeat(topk)
        self.static_positions = self.offsets.new_empty(0)
        self._fronts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # of positions and masks, by batch size
        self.key_positions = self.static_positions  # [B * K * S], of the drafts; read where there is a window

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > len(self.lists.lengths):
            self.lists = PageLists(self.lists.req_to_token, self.page_size, max_bs, self.num_keys)
            self.static_positions, self._fronts = self.offsets.new_empty(max_bs * self.num_keys), {}
            for step in self.attn_backends:
                step.static_masks = step.masks_for(max_bs)

    def init_forward_metadata(self, forward_batch) -> None:
        self.lists.list_fresh(
            forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.seq_lens_sum, self.num_keys
        )
        self.key_positions = torch.empty_like(self.offsets).repeat(len(forward_batch.seq_lens))
        for step in self.attn_backends:
            step.masks = step.masks_for(len(forward_batch.seq_lens))
        self._place_drafts(forward_batch, forward_batch.seq_lens)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        batch_size = forward_batch.batch_size
        seq_lens = forward_batch.seq_lens[:batch_size]
        self.lists.list_static(forward_batch.req_pool_indices[:batch_size], seq_lens, self.num_keys)
        if batch_size not in self._fronts:
            masks = [step.static_masks[:batch_size] for step in self.attn_backends]
            self._fronts[batch_size] = self.static_positions[: batch_size * self.num_keys], masks
        self.key_positions, masks = self._fronts[batch_size]
        for step, mask in zip(self.attn_backends, masks):
            step.masks = mask
        self._place_drafts(forward_batch, seq_lens)

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        self.lists.plan_static()

    def _place_drafts(self, forward_batch, seq_lens: torch.Tensor) -> None:
        """Computes the drafts' positions, and lists their slots where these do not follow the prefix."""
        if self.has_window:
            torch.add(seq_lens[:, None], self.offsets, out=self.key_positions.view(-1, self.num_keys))
        if not self.is_scattered or forward_batch.out_cache_loc is None:
            return
        slots = forward_batch.out_cache_loc.view(-1, self.num_keys)
        ends = self.lists.pages.kv_indptr[1 : len(slots) + 1, None].long()
        places = ends + torch.arange(-self.num_keys, 0, device=ends.device)
        self.lists.pages.kv_indices[places.flatten()] = slots.flatten().to(torch.int32)


def _signed(word: int) -> int:
    """Returns the int64 that has the lower 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _window(layer) -> int | None:
    """Returns how many keys a row sees, itself included; SGLang counts those before it."""
    window = layer.sliding_window_size
    return None if window is None or window < 0 else window + 1


def _refusal_of(layer) -> str | None:
    """Returns what of a layer our attention does not have."""
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        return "cross-attention and attention that is not causal"
    if layer.xai_temperature_len > 0:
        return "logits that are scaled by their position (Grok)"
    if layer.logit_capping_method != "tanh" and layer.logit_cap:
        return f"logit_capping_method={layer.logit_capping_method!r}"
    return None
