"""What the engine needs from a model. Any class with these members will do; it needs no base class.

The engine owns the KV pool, the tree masks and the token bookkeeping. A model owns its weights and its positions: it
projects, rotates, and calls `attend` once per layer.

Notation: B requests, T new tokens (rows) per request, H hidden width, V vocabulary, Vd draft vocabulary,
Hq / Hkv query / key-value heads, D head dim, F feature width.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# In `capture`: the stream after the final norm, which is the input of lm_head (Hugging Face's hidden_states[-1]).
FINAL_NORM = -1


class ModelError(ValueError):
    """Reports an unusable model, file or configuration, in one line that says what to change."""


class Angles(NamedTuple):
    """Holds RoPE's arguments: the rows' `positions` [B, T] int64, tables `cos` and `sin` [max_length, D / 2] fp32."""

    positions: Tensor
    cos: Tensor
    sin: Tensor


class Attend(Protocol):
    """Writes the keys and values of the new tokens into the KV pool, and attends to all tokens that each row sees.

    The engine supplies this function. Prefill, tree verification, draft levels and training differ only in it. If it
    has an attribute `deterministic` that is True, the model should compute each row's bits from that row alone.

    Args:
        layer: Index of the layer, below `KVShape.num_layers`.
        query: [B, T, Hq, D], in the model's dtype.
        key, value: [B, T, Hkv, D], in the model's dtype.
        window: A row at position p sees keys at positions above p - window. None: all.
        angles: RoPE for query and key, applied in the launch that writes them. None: they are already rotated.
        sm_scale: Factor of query keyᵀ; None: 1 / sqrt(D).
        soft_cap: Replaces each score by soft_cap · tanh(score / soft_cap); None: off.
        sinks: [Hq]. An extra score per query head, which takes part in the softmax without a value; None: off.

    Returns:
        [B, T, Hq, D]: softmax(query keyᵀ · sm_scale) value. Query head h reads key-value head h // (Hq // Hkv).
    """

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, *,
        angles: Angles | None = None, sm_scale: float | None = None, soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class StoringAttend(Attend, Protocol):
    """Adds to `Attend` the method that a draft model's `store` calls."""

    def store(self, layer: int, key: Tensor, value: Tensor, *, angles: Angles | None = None) -> None:
        """Writes `key` and `value` as a call with `layer` and `angles` would, without attending to anything."""


class LatentAttend(StoringAttend, Protocol):
    """Adds to `StoringAttend` the methods that models with latent attention (MLA) call, whose `kv_shape` is a
    `LatentShape`: a token's row in the pool is a latent of L elements and a key of R, and all heads read it."""

    def latents(
        self, layer: int, query: Tensor, latent: Tensor, rope_key: Tensor, *, angles: Angles, is_interleaved: bool,
        sm_scale: float,
    ) -> Tensor:  # fmt: skip
        """Writes the rows of the new tokens, and attends to all rows that each of them sees.

        Args:
            layer: As for `Attend`.
            query: [B, T, Hq, L + R], in the model's dtype, without gaps. Of each head the query times the weights of
                its keys (absorbed), and the part that `angles` turns; it may be turned in place.
            latent: [B, T, L]. Keys and values at once.
            rope_key: [B, T, R]. The part of all keys that `angles` turns.
            angles, sm_scale: As for `Attend`.
            is_interleaved: Whether pairs that turn are neighbours, the coordinates 2 i and 2 i + 1; otherwise they are
                i and R / 2 + i.

        Returns:
            [B, T, Hq, L]: softmax(sm_scale · query rowᵀ) latent.
        """

    def store_latents(
        self, layer: int, latent: Tensor, rope_key: Tensor, *, angles: Angles, is_interleaved: bool
    ) -> None:
        """Writes `latent` and `rope_key` as a call of `latents` with `layer`, `angles` and `is_interleaved` would,
        without attending to anything."""


def is_deterministic(attend: Attend) -> bool:
    """Returns whether a row's bits must not depend on the rows beside it."""
    return getattr(attend, "deterministic", False)


class KVShape(NamedTuple):
    """Holds the sizes of a KV cache: a token takes `num_layers` × 2 × `num_kv_heads` × `head_dim` elements."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class LatentShape(NamedTuple):
    """Holds the sizes of a cache of latents (`LatentAttend`): a token takes `num_layers` × `head_dim` elements, the
    first `latent_dim` of each layer's being the latent; `num_kv_heads` is 1."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int


def sizes_of(shape: KVShape | LatentShape) -> list[int | None]:
    """Returns all sizes of a shape; None for what a model's own kind of shape lacks."""
    names = LatentShape._fields if hasattr(shape, "latent_dim") else KVShape._fields
    return [getattr(shape, name, None) for name in names]


def elements_of(shape: KVShape | LatentShape) -> int:
    """Returns the elements that a token takes."""
    parts = 2 if getattr(shape, "latent_dim", None) is None else 1
    return parts * shape.num_layers * shape.num_kv_heads * shape.head_dim


class TargetOutput(NamedTuple):
    """Holds what a target returns.

    Attributes:
        logits: [B, T, V], [B, 1, V] with `last_only`, or [1, R, V] with `last_rows`; in the model's dtype or float32.
            Rows with NaN give meaningless tokens, and are refused with EAGLE_KERNELS_DEBUG=1.
        features: [B, T, len(capture)·H]; None if `capture` is empty.
    """

    logits: Tensor
    features: Tensor | None


class DraftOutput(NamedTuple):
    """Holds `logits` [B, T, Vd] and `hidden` [B, T, H], which the children of these rows receive as `hidden`."""

    logits: Tensor
    hidden: Tensor


class TargetModel(Protocol):
    """Computes the distribution of the text, which speculation does not change.

    A draft head without an embedding calls `get_input_embeddings() -> nn.Embedding`, and one without an output layer
    `get_output_embeddings() -> nn.Linear`, as Hugging Face names them. A model whose forward waits for the device sets
    `can_be_captured = False`; its steps are not captured as CUDA graphs. One that honors `Attend.deterministic` sets
    `can_be_deterministic = True`. One whose keys and values were calibrated has their largest magnitudes for each layer
    and head as `kv_limits` [2, L, Hkv], keys first: 8-bit caches are scaled by them, rows of latents by those of keys
    alone.

    `forward` may take `last_rows: Tensor | None = None`, [R] int64: the rows of a batch of one for which to compute
    logits [1, R, V], without waiting for the device. Then one pass reads the prompts of several requests, one after
    another or after a step's rows, and `attend` tells them apart; without it they are read one by one.

    Attributes:
        vocab_size, hidden_size: V and H.
        max_length: Most positions that the model supports; the engine never exceeds it.
        kv_shape: Sizes of the KV pool; of a model with latent attention a LatentShape.
        device, dtype: Those of the weights.
    """

    vocab_size: int
    hidden_size: int
    max_length: int

    @property  # or an attribute, as all of these
    def kv_shape(self) -> KVShape | LatentShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, capture: Sequence[int] = (),
        last_only: bool = False,
    ) -> TargetOutput:  # fmt: skip
        """Runs the T new tokens of each request.

        Args:
            input_ids: [B, T] int64. The tokens.
            positions: [B, T] int64. Absolute positions; nodes of a tree may share one.
            attend: To be called once per layer.
            capture: Residual streams to return as features, concatenated in this order. 0 is the embedding's output
                and i that of layer i - 1, all before the final norm; FINAL_NORM is the stream after it.
            last_only: Whether to compute only the last row's logits.
        """


def takes_rows(target: TargetModel) -> bool:
    """Returns whether a target takes rows of several requests as a batch of one, and `last_rows`."""
    return "last_rows" in inspect.signature(target.forward).parameters


class DraftModel(Protocol):
    """Drafts tokens. A draft with one module per level of a chain is a `DraftModules`.

    Attributes:
        vocab_size: The target's V; `input_ids` are below it.
        draft_vocab_size: Vd, the width of the logits.
        max_length: Most positions that the draft supports.
        kv_shape: Sizes of the KV pool; of a model with latent attention a LatentShape.
        aux_layers: The `capture` that gives the draft its features of the target; () if it reads none.
        draft_to_target: [Vd] int64 *offsets*: target id = draft id + draft_to_target[draft id]. None if Vd = V.
        token_shift: 1 for EAGLE: the row of token t_i has the feature of t_{i-1} and draft position i - 1; t_0 has no
            row. 0 for a plain language model: t_i has position i.
        device, dtype: Optional, compared with the target's.
        method: Optional, compared with the configuration's: "eagle", "mtp", "medusa", "hydra", "dflash" or
            "draft_model".
        max_levels: Optional, the most levels that it drafts.
        hidden_grows: Optional, whether `DraftOutput.hidden` may be wider for each level, as it holds the whole path.
        reads_several: Optional, whether `forward` and `store` take rows of several requests as a batch of one, one
            after another; `attend` tells them apart. Prompts are then read at once.
        store: Optional, `store(input_ids, hidden, positions, attend: StoringAttend) -> None`, for a draft with a single
            layer, whose keys depend on no attention. It writes what `forward(..., from_target=True)` writes and
            computes nothing else, so the draft stays up to date during plain decoding at little cost.
        output_weight: Optional, [Vd, H]: the logits are rows [B, T, H] times it and nothing else; None if they are not.
            If `forward` takes `projects: bool = True`, it returns those rows as logits where `projects` is False, and
            the engine may select drafts from them and the weight.
    """

    vocab_size: int
    draft_vocab_size: int
    max_length: int
    token_shift: int

    @property  # or an attribute, as all of these
    def kv_shape(self) -> KVShape | LatentShape: ...
    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def draft_to_target(self) -> Tensor | None: ...

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """Runs T rows of each request.

        Args:
            input_ids: [B, T] int64. Tokens of the target's vocabulary.
            hidden: [B, T, F]. With `from_target` the target's features, F = len(aux_layers)·H of the target; otherwise
                the `DraftOutput.hidden` of each row's parent.
            positions: [B, T] int64. Draft positions: token index - token_shift.
            attend: To be called once per layer.
            from_target: Which of the two `hidden` is; they may have the same width.
        """


class DraftModules(DraftModel, Protocol):
    """Drafts with several next-token modules: module k predicts t_{i + k + 2} from row i.

    Attributes:
        num_modules: How many there are, above 1. `aux_layers`, `token_shift` and `forward` are those of the first
            module; `kv_shape` has a layer per module.
    """

    num_modules: int

    def advance(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, module: int) -> Tensor:
        """Runs T rows of each request through one module; returns [B, T, H], the `hidden` of the next module.

        Args:
            input_ids: [B, T] int64. Row i holds t_{i + 1 + module}.
            hidden: [B, T, F]. The target's features for module 0, otherwise the output of the previous module.
            positions: [B, T] int64. Row i holds i, for every module.
            attend: To be called once.
            module: Index of the module.
        """

    def project(self, hidden: Tensor) -> Tensor:
        """Returns the logits [B, T, Vd] of `hidden` [B, T, H], the output of `advance`."""


class MaskedDraft(DraftModel, Protocol):
    """Drafts several tokens in one pass of `forward`, which reads mask tokens in their places (PARD, P-EAGLE).

    Attributes:
        mask_token_id: The token that is read, an id of the draft's own embedding. None: it drafts one by one.
        mask_features: [F]. What is read in place of the target's features. None for a model that reads none.
        masked_id: The draft id of the mask token, which is never a draft; None if the draft vocabulary has no such id.
    """

    mask_token_id: int | None
    mask_features: Tensor | None
    masked_id: int | None


class ContextDraft(DraftModel, Protocol):
    """Drafts a block in one pass, and has the text as keys of the target's features (DFlash). `forward` is not called.

    Attributes:
        block_size: Rows of a block, the root's included, 2..64.
    """

    block_size: int

    def store_features(self, features: Tensor, positions: Tensor, attend: StoringAttend) -> None:
        """Writes the keys and values of tokens from the target's features [B, T, F] at positions [B, T]."""

    def fill_block(self, roots: Tensor, count: int, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the logits [B, count, Vd] of the first `count` tokens after the roots [B].

        Args:
            roots: [B] int64. The first tokens of the blocks; mask tokens follow.
            count: From 1 to block_size - 1.
            positions: [B, block_size] int64. Those of the blocks.
            attend: To be called once per layer, for all rows of the blocks.
        """


class BlockDraft(DraftModel, Protocol):
    """Drafts several tokens in one pass, from the target's features of the last token alone: it reads no other tokens
    and has no keys. So kv_shape is KVShape(0, 1, 1), and `forward` is not called.

    Attributes:
        block_length: The most tokens that it drafts at once.
    """

    block_length: int

    def draft_block(self, hidden: Tensor, count: int) -> Tensor:
        """Returns the logits [B, count, Vd] of the `count` tokens after the root.

        Args:
            hidden: [B, F], F = len(aux_layers)·H of the target. Its features of the token before the root.
            count: From 1 to block_length.
        """
