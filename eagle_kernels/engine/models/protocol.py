"""What the engine asks of a model, and nothing more.

The engine owns the KV pool, the tree masks and the token bookkeeping. A model owns its weights and its positions: it
projects, rotates, and calls `attend` once per layer. Any class with the members below will do; no base class is needed.

Notation: B requests, T new tokens (rows) per request, H hidden width, V vocabulary, Vd draft vocabulary,
Hq / Hkv query / key-value heads, D head dim, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# In `capture`: the stream after the final norm, which the language-model head reads (Hugging Face's hidden_states[-1]).
FINAL_NORM = -1


class ModelError(ValueError):
    """A model, its files or its configuration cannot be used; the message is one line that says what to change."""


class Angles(NamedTuple):
    """What turns the heads of B * T rows: positions [B, T], and cos and sin [max_length, D / 2] fp32 to look up."""

    positions: Tensor
    cos: Tensor
    sin: Tensor


class Attend(Protocol):
    """Writes the keys and values of the new tokens into the KV pool and attends over everything each query may see.

    The engine supplies it. Prefill, tree verification, draft levels and training differ only in this object.

    Arguments
        layer   index below `KVShape.num_layers`
        query   [B, T, Hq, D]
        key     [B, T, Hkv, D]
        value   [B, T, Hkv, D]
        window  the layer's sliding window: a row at position p sees keys at positions above p - window; None: all
        angles  RoPE that is still to be applied to query and key, which takes no launch beside writing them; None: it
                has been, or there is none
    and, of models other than the native ones,
        sm_scale  what query keyᵀ is multiplied by; None: 1 / sqrt(D)
        soft_cap  scores become soft_cap · tanh(score / soft_cap); None: they stay
        sinks     [Hq], a score per query head that takes part in the softmax and brings no value; None: none
    Returns [B, T, Hq, D]: softmax(query keyᵀ · sm_scale) value; query head h reads key-value head h // (Hq // Hkv).
    """

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None = None,
        *,
        angles: Angles | None = None,
        sm_scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class StoringAttend(Attend, Protocol):
    """What `DraftModel.store` is given."""

    def store(self, layer: int, key: Tensor, value: Tensor, *, angles: Angles | None = None) -> None:
        """Writes the keys and values, as a call does, and attends to nothing."""
        ...


class KVShape(NamedTuple):
    """The KV cache one token of the model needs: `num_layers` × 2 × `num_kv_heads` × `head_dim` numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class TargetOutput(NamedTuple):
    """logits [B, T, V], or [B, 1, V] with `last_only`; features [B, T, len(capture)·H], None when capture is empty."""

    logits: Tensor
    features: Tensor | None


class DraftOutput(NamedTuple):
    """logits [B, T, Vd]; hidden [B, T, H], what the children of these rows receive as `hidden`."""

    logits: Tensor
    hidden: Tensor


class TargetModel(Protocol):
    """The model whose distribution must be kept.

    vocab_size, hidden_size   V and H
    max_length                number of positions the model was made for; the engine never goes past it
    kv_shape                  what to allocate
    device, dtype             of the weights

    A draft head without an embedding of its own also calls `get_input_embeddings() -> nn.Embedding`, one without an
    output of its own `get_output_embeddings() -> nn.Linear`, the Hugging Face names; other drafts never ask for them.
    A model whose forward waits for the device has `can_be_captured = False`: its steps are no CUDA graphs.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_length(self) -> int: ...

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: Sequence[int] = (),
        last_only: bool = False,
    ) -> TargetOutput:
        """Run the T new tokens of each request.

        input_ids   [B, T] int64
        positions   [B, T] int64, the absolute position of each row; rows of a tree may share one
        capture     which residual streams to return as features, concatenated in this order: 0 is the embedding
                    output, i the output of layer i - 1, all before the final norm; FINAL_NORM the stream after it
        last_only   compute logits of the last row only (a prompt needs no others)
        """
        ...


class DraftModel(Protocol):
    """The model that guesses.

    vocab_size          the target's V: what `input_ids` are drawn from
    draft_vocab_size    Vd, the width of the logits
    max_length          number of positions the draft was made for
    kv_shape            what to allocate
    aux_layers          the `capture` its features come from, () when it reads none
    draft_to_target     [Vd] int64 *offsets*, target id = draft id + draft_to_target[draft id]; None when Vd = V
    token_shift         1 for EAGLE: the row of token t_i carries the feature of t_{i-1} and sits at draft position
                        i - 1, so t_0 has no row. 0 for a plain language model: t_i sits at position i.

    A draft of several next-token modules, one for each level of a chain, is a `DraftModules`.
    A draft that says its `device` and `dtype` as a target does is checked against the target, and its `method`, one of
    `eagle`, `mtp` and `draft_model`, against the configuration's. One of a single layer, whose keys depend on no
    attention, may have
        store(input_ids, hidden, positions, attend: StoringAttend) -> None
    which writes what `forward(..., from_target=True)` writes and computes nothing else: plain decoding, while it goes
    on, then costs little more than without a draft that may come back.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def draft_vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int: ...

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def draft_to_target(self) -> Tensor | None: ...

    @property
    def token_shift(self) -> int: ...

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """Run T rows of each request.

        input_ids     [B, T] int64, target vocabulary
        hidden        [B, T, F]: target features (F = len(aux_layers)·H of the target) when `from_target`,
                      else the `DraftOutput.hidden` of each row's parent
        positions     [B, T] int64 draft positions (token index - token_shift)
        from_target   which of the two `hidden` is; widths alone cannot tell them apart
        """
        ...


class DraftModules(DraftModel, Protocol):
    """A draft of `num_modules` > 1 next-token modules: module k predicts from row i the token k + 2 places after t_i.

    `aux_layers` and `token_shift` are those of the first one, and `kv_shape` has a layer for each. `forward` is the
    first one alone.
    """

    num_modules: int

    def advance(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, module: int) -> Tensor:
        """Run T rows of each request through module 0, 1, ..; returns [B, T, H], what the next one takes as `hidden`.

        input_ids  [B, T] int64, t_{i + 1 + module} in row i
        hidden     [B, T, F] of the first one the target's features, of the others what the one before returned
        positions  [B, T] int64, of row i the number i, whatever the module
        """
        ...

    def project(self, hidden: Tensor) -> Tensor:
        """Logits [B, T, Vd] of what `advance` returned."""
        ...
