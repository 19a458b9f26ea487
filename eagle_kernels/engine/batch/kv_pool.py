"""The paged keys and values of one model, their owners, and the `attend` functions that write and read them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...runtime.values import is_integer, shown
from ..models.protocol import Angles, KVShape, LatentShape, ModelError
from .transfer import to_device

# a plan takes a launch, and saves less than a microsecond a layer
_LEAST_PLANNED_LAYERS = 8


class KVPool:
    """Holds the pages of one model: `k_cache, v_cache [L, num_pages, page_size, Hkv, D]`.

    Of a model with latents, `latent_cache [L, num_pages, page_size, D]`: k_cache and v_cache are the halves of its
    rows, so that what moves keys and values moves latents.
    scales: of caches of 8 bits, for keys and values, [2, L, Hkv] or [2, L, 1] fp32; rows of latents take those of keys.
        None: they are 1.
    """

    def __init__(
        self, shape: KVShape | LatentShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device,
        scales: Tensor | None = None,
    ):  # fmt: skip
        self.page_size, self.num_layers = page_size, shape.num_layers
        self.latent_dim, self.latent_cache = getattr(shape, "latent_dim", None), None
        names = ("k_scale", "v_scale") if self.latent_dim is None else ("latent_scale",)
        self._scales = [] if scales is None else [dict(zip(names, of_layer)) for of_layer in zip(*scales)]
        if self.latent_dim is not None:
            self.parts = self.latent_dim, shape.head_dim - self.latent_dim
            size = (shape.num_layers, num_pages, page_size, shape.head_dim)
            self.latent_cache = torch.zeros(size, dtype=dtype, device=device)
            halves = self.latent_cache.unflatten(-1, (2, -1))
            self.k_cache, self.v_cache = halves[..., :1, :], halves[..., 1:, :]
            return
        size = (shape.num_layers, num_pages, page_size, shape.num_kv_heads, shape.head_dim)
        self.k_cache = torch.zeros(size, dtype=dtype, device=device)
        self.v_cache = torch.zeros(size, dtype=dtype, device=device)

    def scales(self, layer: int) -> dict[str, Tensor]:
        """Returns the ops' arguments k_scale and v_scale, or latent_scale, for a layer, where it has scales."""
        return self._scales[layer] if self._scales else {}


class _PoolAttend:
    """Writes a layer's new keys and values into the pool; its queries read them there with all others.
    block_table: [B, max_pages]. slots: [B, T], or [T] of a batch of one; of the new keys, -1: not written.
    deterministic: see `protocol.Attend`."""

    def __init__(self, pool: KVPool, block_table: Tensor, slots: Tensor, deterministic: bool = False):
        self._pool, self._block_table, self._slots = pool, block_table, slots
        self.deterministic = deterministic
        self._plans: dict[int | None, Tensor | None] = {}  # by window

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, *,
        angles: Angles | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """See `protocol.Attend`; scales, soft caps and sinks go to the ops under the names that they have there."""
        if angles is None:
            self.store(layer, key, value)
        else:
            query = self._write(layer, key, value, angles, query).view(query.shape)
        caches = {"k_cache": self._pool.k_cache[layer], "v_cache": self._pool.v_cache[layer]}
        caches |= self._pool.scales(layer)
        return self._read(query, **caches, block_table=self._block_table, window=window, **options)

    def store(self, layer: int, key: Tensor, value: Tensor, *, angles: Angles | None = None) -> None:
        """See `protocol.StoringAttend`."""
        self._write(layer, key, value, angles)

    def latents(
        self, layer: int, query: Tensor, latent: Tensor, rope_key: Tensor, *, angles: Angles, is_interleaved: bool,
        sm_scale: float,
    ) -> Tensor:  # fmt: skip
        """See `protocol.LatentAttend`."""
        turned = query[..., self._pool.latent_dim :]
        self._write_latents(layer, latent, rope_key, angles, is_interleaved, turned)
        cache = {"latent_cache": self._pool.latent_cache[layer], "latent_dim": self._pool.latent_dim}
        cache |= self._pool.scales(layer)
        return self._read(query, **cache, sm_scale=sm_scale, block_table=self._block_table, window=None)

    def store_latents(
        self, layer: int, latent: Tensor, rope_key: Tensor, *, angles: Angles, is_interleaved: bool
    ) -> None:
        """See `protocol.LatentAttend`."""
        self._write_latents(layer, latent, rope_key, angles, is_interleaved)

    def _write_latents(
        self, layer: int, latent: Tensor, rope_key: Tensor, angles: Angles, is_interleaved: bool,
        turned: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Writes rows, and turns part of the queries in place."""
        pool = self._pool
        self._check(layer)
        # the op steps in whole units, which rows of odd sizes beside others are not
        rows = [_in_units(each.flatten(0, 1), math.gcd(*pool.parts)) for each in (latent, rope_key)]
        query = None if turned is None else _in_units(turned.flatten(0, 1), pool.parts[1])
        is_view = query is not None and query.data_ptr() == turned.data_ptr()
        options = {"query": query, "out": query if is_view else None, "is_interleaved": is_interleaved}
        options |= pool.scales(layer)
        made = ops.write_latent_kv(*rows, pool.latent_cache[layer], self._slots, **angles._asdict(), **options)
        if query is not None and not is_view:
            turned.flatten(0, 1).copy_(made)

    def _check(self, layer: int) -> None:
        pool = self._pool
        if not (is_integer(layer) and 0 <= layer < pool.num_layers):  # -1 would be the last one
            rule = f"lie in 0..{pool.num_layers - 1}, below num_layers of the model's kv_shape"
            raise ModelError(f"EAGLEInference: layer of attend must {rule}, got {shown(layer)}")

    def _write(
        self, layer: int, key: Tensor, value: Tensor, angles: Angles | None, query: Tensor | None = None
    ) -> Tensor:
        pool = self._pool
        self._check(layer)
        rows = key.flatten(0, 1), value.flatten(0, 1)
        rotation = {} if angles is None else angles._asdict()
        if query is not None:
            rotation["query"] = query.flatten(0, 1)
        caches = pool.k_cache[layer], pool.v_cache[layer]
        return ops.write_kv(*rows, *caches, self._slots, **rotation, **pool.scales(layer))

    def _schedule(self, seq_lens: Tensor, window: int | None, num_drafts: int = 0) -> dict[str, Any]:
        """Returns `deterministic` and the plan of all layers that have this window, None where few would use it."""
        if window not in self._plans:
            is_planned = not self.deterministic and self._pool.num_layers >= _LEAST_PLANNED_LAYERS
            plan = ops.plan_attention(seq_lens, num_drafts=num_drafts, window=window) if is_planned else None
            self._plans[window] = plan
        return {"deterministic": self.deterministic, "plan": self._plans[window]}

    def _read(self, query: Tensor, **options: Any) -> Tensor:
        raise NotImplementedError


def _in_units(rows: Tensor, unit: int) -> Tensor:
    """Returns the rows, or a copy of them where their strides are not whole units."""
    return rows if all(stride % unit == 0 for stride in rows.stride()[:-1]) else rows.contiguous()


def _op_for(options: dict[str, Any], of_heads: Callable, of_latents: Callable) -> Callable:
    """Returns the op that reads the cache in `options`: of keys and values, or of latents."""
    return of_latents if "latent_cache" in options else of_heads


class PrefillAttend(_PoolAttend):
    """Attends for parts of prompts, which are one after another in the rows of a batch of one: causal, each to its own.
    block_table: [R, max_pages], a row for each part.
    parts: [(start, count)]: a part has the tokens start .. start + count - 1 of its prompt."""

    def __init__(self, pool: KVPool, block_table: Tensor, parts: Sequence[tuple[int, int]]):
        device, most = block_table.device, max(count for _, count in parts)
        if len(parts) == 1:  # filled, as the host would wait for the device to copy it
            starts, counts = (torch.full((1,), number, dtype=torch.int64, device=device) for number in parts[0])
        else:
            starts, counts = to_device(list(zip(*parts)), device)
        slots = ops.find_slots(block_table, starts, count=most, page_size=pool.page_size).slots
        slots = torch.cat([row[:count] for row, (_, count) in zip(slots, parts)])
        super().__init__(pool, block_table, slots)
        self._sizes = {"seq_lens": starts + counts, "max_query": most}
        self._bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def _read(self, query: Tensor, **options: Any) -> Tensor:
        op = _op_for(options, ops.prefill_attention, ops.mla_prefill)
        return op(query[0], self._bounds, **self._sizes, **options).output[None]


class RaggedAttend(_PoolAttend):
    """Attends for few rows in a batch of one, of which the device knows whose they are. They are parts of prompts, as
    those of `PrefillAttend`, or trees of different sizes, as those of `TreeAttend`.

    block_table  [R, max_pages]
    lengths      [R]      tokens of each request before its rows
    bounds       [R + 1]  the rows where each request's begin and end
    slots, positions  [1, P]  of the rows; those of no request have slot -1, and what is attended for them means nothing
    most_rows    of a request
    tree_mask    [P, W]   packed words over the rows of the same request; None: chains, causal
    """

    def __init__(
        self, pool: KVPool, block_table: Tensor, lengths: Tensor, bounds: Tensor, slots: Tensor, positions: Tensor,
        most_rows: int, tree_mask: Tensor | None = None, *, deterministic: bool = False,
    ):  # fmt: skip
        super().__init__(pool, block_table, slots, deterministic)
        self._positions = positions
        self._sizes = {"seq_lens": lengths, "qo_indptr": bounds, "max_query": most_rows}
        self._sees = {"is_causal": True} if tree_mask is None else {"tree_mask": tree_mask}

    def _read(self, query: Tensor, **options: Any) -> Tensor:
        if options["window"] is not None:
            options["positions"] = self._positions[0]
        mean_rows = self._slots.numel() // max(len(self._block_table), 1)
        options |= self._schedule(self._sizes["seq_lens"], options["window"], mean_rows)
        op = _op_for(options, ops.tree_attention, ops.mla_tree_attention)
        return op(query[0], **self._sizes, **self._sees, **options).output[None]


class TreeAttend(_PoolAttend):
    """Attends for T tree rows per request, which see the committed prefix and the draft keys that the mask names.

    lengths        [B]          committed tokens; draft keys before the rows have been written
    tree_mask      [B, T, W]    packed words over draft keys 0 .. num_draft_keys - 1; None: a chain, causal
    positions      [B, T]       of the rows, for sliding windows
    key_positions  [B, num_draft_keys]  of the draft keys, for the same; None where these are the rows
    """

    def __init__(
        self, pool: KVPool, block_table: Tensor, lengths: Tensor, slots: Tensor, num_draft_keys: int,
        tree_mask: Tensor | None, positions: Tensor, key_positions: Tensor | None = None, *,
        deterministic: bool = False,
    ):  # fmt: skip
        super().__init__(pool, block_table, slots, deterministic)
        self.tree_mask, self._positions, self._key_positions = tree_mask, positions, key_positions
        self._sizes = {"seq_lens": lengths, "num_draft_keys": num_draft_keys, "is_causal": tree_mask is None}

    def _read(self, query: Tensor, **options: Any) -> Tensor:
        if options["window"] is not None:
            options["positions"] = self._positions.flatten().contiguous()
            if self._key_positions is not None:
                options["key_positions"] = self._key_positions.flatten().contiguous()
        options |= self._schedule(self._sizes["seq_lens"], options["window"], self._sizes["num_draft_keys"])
        op = _op_for(options, ops.tree_attention, ops.mla_tree_attention)
        return op(query, tree_mask=self.tree_mask, **self._sizes, **options).output


class DecodeAttend(_PoolAttend):
    """Attends for plain decoding: one new row per request, after its prefix; slots [B, 1]."""

    def __init__(
        self, pool: KVPool, block_table: Tensor, lengths: Tensor, slots: Tensor, *, deterministic: bool = False
    ):
        super().__init__(pool, block_table, slots, deterministic)
        self._seq_lens = lengths + 1

    def _read(self, query: Tensor, **options: Any) -> Tensor:
        options |= self._schedule(self._seq_lens, options["window"])
        op = _op_for(options, ops.gqa_decode, ops.mla_decode)
        return op(query[:, 0], seq_lens=self._seq_lens, **options).output[:, None]


class JointAttend(_PoolAttend):
    """Attends for the rows of a step [B, T], and for those of other requests behind them, in one batch of one."""

    def __init__(self, step: TreeAttend | DecodeAttend | RaggedAttend, others: RaggedAttend):
        super().__init__(step._pool, step._block_table, torch.cat([step._slots.flatten(), others._slots[0]]))
        self._step, self._others = step, others

    def _read(self, query: Tensor, **options: Any) -> Tensor:
        shape = self._step._slots.shape
        rows, others = query[0].split([shape.numel(), self._others._slots.numel()])
        output = self._step._read(rows.unflatten(0, shape), **options)
        others_output = self._others._read(others[None], **options | {"block_table": self._others._block_table})
        return torch.cat([output.flatten(0, 1), others_output[0]])[None]
