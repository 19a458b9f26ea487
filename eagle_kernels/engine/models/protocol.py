"""The members that the engine uses of a model.

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

# In `capture`: the stream after the final norm, which is the input of lm_head (Hugging Face's hidden_states[-1]).
FINAL_NORM = -1


class ModelError(ValueError):
    """Reports a model, files or a configuration that cannot be used, in one line that says what to change."""


class Angles(NamedTuple):
    """Holds RoPE's arguments for B * T rows: positions [B, T], and the tables cos and sin [max_length, D / 2] fp32."""

    positions: Tensor
    cos: Tensor
    sin: Tensor


class Attend(Protocol):
    """Writes the keys and values of the new tokens into the KV pool and attends to all visible tokens.

    The engine supplies this function. Prefill, tree verification, draft levels and training differ only in it.

    Arguments
        layer   index below `KVShape.num_layers`
        query   [B, T, Hq, D]; key and value [B, T, Hkv, D]
        window  the layer's sliding window: a row at position p sees keys at positions above p - window; None: all
        angles  RoPE to be applied to query and key, in the same launch that writes them; None: nothing is to be done
    Arguments for models other than ours
        sm_scale  factor of query keyᵀ; None: 1 / sqrt(D)
        soft_cap  scores become soft_cap · tanh(score / soft_cap); None: they are left as they are
        sinks     [Hq], a score per query head that takes part in the softmax without a value; None: there is none
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
    """Adds the method that `DraftModel.store` calls."""

    def store(self, layer: int, key: Tensor, value: Tensor, *, angles: Angles | None = None) -> None:
        """Writes the keys and values as a call does, and attends to nothing."""


class KVShape(NamedTuple):
    """Describes the KV cache of one token: `num_layers` × 2 × `num_kv_heads` × `head_dim` numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class TargetOutput(NamedTuple):
    """Holds logits [B, T, V], or [B, 1, V] with `last_only`; features [B, T, len(capture)·H], None for no capture."""

    logits: Tensor
    features: Tensor | None


class DraftOutput(NamedTuple):
    """Holds logits [B, T, Vd]; hidden [B, T, H], which the children of these rows receive as `hidden`."""

    logits: Tensor
    hidden: Tensor


class TargetModel(Protocol):
    """Computes the distribution that speculation keeps.

    vocab_size, hidden_size   V and H
    max_length                the number of positions that the model was made for; the engine never exceeds it
    kv_shape                  the shape of the KV pool
    device, dtype             those of the weights

    A draft head without an embedding calls `get_input_embeddings() -> nn.Embedding`, and one without an output
    `get_output_embeddings() -> nn.Linear` (Hugging Face's names); other drafts need neither. A model whose forward
    waits for the device has `can_be_captured = False`: its steps are no CUDA graphs.
    """

    vocab_size: int
    hidden_size: int
    max_length: int
    kv_shape: KVShape
    device: torch.device
    dtype: torch.dtype

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: Sequence[int] = (),
        last_only: bool = False,
    ) -> TargetOutput:
        """Runs the T new tokens of each request.

        input_ids   [B, T] int64
        positions   [B, T] int64, the absolute position of each row; rows of a tree may share one
        capture     the residual streams to return as features, concatenated in this order: 0 is the embedding's
                    output, i the output of layer i - 1, all before the final norm; FINAL_NORM the stream after it
        last_only   computes the logits of the last row only (a prompt needs no others)
        """


class DraftModel(Protocol):
    """Drafts tokens.

    vocab_size          the target's V, from which `input_ids` come
    draft_vocab_size    Vd, the width of the logits
    max_length          the number of positions that the draft was made for
    kv_shape            the shape of the KV pool
    aux_layers          the target's `capture` that gives its features; () if it reads none
    draft_to_target     [Vd] int64 *offsets*, target id = draft id + draft_to_target[draft id]; None if Vd = V
    token_shift         1 for EAGLE: the row of token t_i carries the feature of t_{i-1} and sits at draft position
                        i - 1, so t_0 has no row. 0 for a plain language model: t_i sits at position i.

    Optional members: `device` and `dtype`, which are compared with the target's; `method` (`eagle`, `mtp` or
    `draft_model`), which is compared with the configuration's; and, for a draft of a single layer, whose keys depend on
    no attention,
        store(input_ids, hidden, positions, attend: StoringAttend) -> None
    which writes what `forward(..., from_target=True)` writes and computes nothing else. It keeps the draft ready during
    plain decoding at little cost. A draft with a module for each level of a chain is a `DraftModules`.
    """

    vocab_size: int
    draft_vocab_size: int
    max_length: int
    kv_shape: KVShape
    aux_layers: tuple[int, ...]
    draft_to_target: Tensor | None
    token_shift: int

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """Runs T rows of each request.

        input_ids     [B, T] int64, target vocabulary
        hidden        [B, T, F]: target features (F = len(aux_layers)·H of the target) if `from_target`,
                      else the `DraftOutput.hidden` of each row's parent
        positions     [B, T] int64 draft positions (token index - token_shift)
        from_target   which of the two `hidden` is; their widths may be equal
        """


class DraftModules(DraftModel, Protocol):
    """Drafts with `num_modules` > 1 next-token modules: module k predicts t_{i + k + 2} from row i.

    `aux_layers`, `token_shift` and `forward` are those of the first module; `kv_shape` has a layer for each module.
    """

    num_modules: int

    def advance(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, module: int) -> Tensor:
        """Runs T rows of each request through one module; returns [B, T, H], the `hidden` of the next module.

        input_ids  [B, T] int64, t_{i + 1 + module} in row i
        hidden     [B, T, F], the target's features for module 0, else the output of the module before
        positions  [B, T] int64, i in row i for every module
        """

    def project(self, hidden: Tensor) -> Tensor:
        """Computes logits [B, T, Vd] of the output of `advance`."""
