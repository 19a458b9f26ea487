"""What the engine needs from a model. Any class with these members will do; it needs no base class.

The engine owns the KV pool, the tree masks and the token bookkeeping. A model owns its weights and its positions: it
projects, rotates, and calls `attend` once per layer.

Notation: B requests, T new tokens (rows) per request, H hidden width, V vocabulary, Vd draft vocabulary,
Hq / Hkv query / key-value heads, D head dim, F feature width.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...runtime import check
from ...runtime.placement import is_same_device

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


def is_deterministic(attend: Attend) -> bool:
    """Returns whether a row's bits must not depend on the rows beside it."""
    return getattr(attend, "deterministic", False)


class KVShape(NamedTuple):
    """Holds the sizes of a KV cache: a token takes `num_layers` × 2 × `num_kv_heads` × `head_dim` elements."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


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


_Output = TypeVar("_Output", TargetOutput, DraftOutput)


def checked(
    model: Any, kind: type[_Output], output: Any, rows: Sequence[int], width: int,
    second: tuple[int | None, ...] | None, dtype_of_second: torch.dtype | None = None,
) -> _Output:  # fmt: skip
    """Returns what a model's forward returned; raises ModelError where it is not what the engine asked for.

    rows: the first sizes of its logits, whose last one is `width`. second: the shape of its features or hidden, with
    None for any size; None: nobody reads them. NaN is looked for with EAGLE_KERNELS_DEBUG=1 alone, since that waits for
    the device.
    """
    wanted = f"{kind.__name__}({', '.join(kind._fields)})"

    def refuse(rule: str, got: str) -> ModelError:
        model_class = type(getattr(model, "model", model)).__name__
        return ModelError(f"EAGLEInference: forward of {model_class} must return {wanted} {rule}, got {got}")

    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor)):
        raise refuse("with tensors in it", _told(output))
    logits, other = output
    if logits.shape != (*rows, width):
        raise refuse(f"with logits {[*rows, width]}", _told(logits))
    dtype, device = getattr(model, "dtype", None), getattr(model, "device", None)
    if logits.dtype not in (dtype or logits.dtype, torch.float32) or not logits.is_floating_point():
        raise refuse(f"with logits in its dtype, {dtype}, or in float32", _told(logits))
    if device is not None and not is_same_device(logits.device, device):
        raise refuse(f"with logits on its device, {device}", _told(logits))
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise refuse("with logits without gaps in their last axis", f"strides {list(logits.stride())}")
    if second is not None:
        name, sizes = kind._fields[1], other.shape if isinstance(other, Tensor) else ()
        if len(sizes) != len(second) or any(size not in (None, got) for size, got in zip(second, sizes)):
            told = str([*second]).replace("None", "H")
            raise refuse(f"with {name} {told}", _told(other))
        if other.dtype != dtype_of_second:
            raise refuse(f"with {name} in {dtype_of_second}", _told(other))
        if not is_same_device(other.device, logits.device):
            raise refuse(f"with {name} on {logits.device}", _told(other))
    if check.can_read(logits) and logits.isnan().any():
        raise refuse("without NaN in its logits", f"{int(logits.isnan().sum())} of them")
    return output if isinstance(output, kind) else kind(logits, other)


def _told(value: Any) -> str:
    """Tells a value that a model returned."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype} on {value.device}"
    if isinstance(value, tuple):
        return f"{type(value).__name__} of {', '.join(map(_told, value)) or 'nothing'}"
    return "None" if value is None else type(value).__name__


def run_target(
    target: TargetModel, tokens: Tensor, positions: Tensor, attend: Attend, capture: Sequence[int] = (), **which: Any
) -> TargetOutput:
    """Runs a target and checks what it returns; which: `last_only` or `last_rows`."""
    output = target.forward(tokens, positions, attend, capture=capture, **which)
    size, count = tokens.shape
    if which.get("last_only"):
        count = 1
    elif which.get("last_rows") is not None:
        count = len(which["last_rows"])
    features = (*tokens.shape, len(capture) * target.hidden_size) if capture else None
    return checked(target, TargetOutput, output, (size, count), target.vocab_size, features, target.dtype)


def run_draft(
    model: DraftModel, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
) -> DraftOutput:
    """Runs a draft and checks what it returns."""
    output = model.forward(tokens, hidden, positions, attend, from_target=from_target)
    is_free = from_target or getattr(model, "hidden_grows", False)
    second = (*tokens.shape, None if is_free else hidden.shape[-1])
    return checked(model, DraftOutput, output, tokens.shape, model.draft_vocab_size, second, hidden.dtype)


class TargetModel(Protocol):
    """Computes the distribution of the text, which speculation does not change.

    A draft head without an embedding calls `get_input_embeddings() -> nn.Embedding`, and one without an output layer
    `get_output_embeddings() -> nn.Linear`, as Hugging Face names them. A model whose forward waits for the device sets
    `can_be_captured = False`; its steps are not captured as CUDA graphs. One that honors `Attend.deterministic` sets
    `can_be_deterministic = True`. One whose keys and values were calibrated has their largest magnitudes for each layer
    and head as `kv_limits` [2, L, Hkv], keys first: caches of 8 bits are scaled by them.

    `forward` may take `last_rows: Tensor | None = None`, [R] int64: the rows of a batch of one for which to compute
    logits [1, R, V], without waiting for the device. Then one pass reads the prompts of several requests, one after
    another or after a step's rows, and `attend` tells them apart; without it they are read one by one.

    Attributes:
        vocab_size, hidden_size: V and H.
        max_length: Most positions that the model supports; the engine never exceeds it.
        kv_shape: Sizes of the KV pool.
        device, dtype: Those of the weights.
    """

    vocab_size: int
    hidden_size: int
    max_length: int
    kv_shape: KVShape

    @property  # or an attribute, as all of these
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
        kv_shape: Sizes of the KV pool.
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
    """

    vocab_size: int
    draft_vocab_size: int
    max_length: int
    kv_shape: KVShape
    token_shift: int

    @property  # or an attribute, as all of these
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


def run_block(model: BlockDraft, hidden: Tensor, count: int) -> Tensor:
    """Runs a draft of blocks and checks what it returns."""
    logits, wanted = model.draft_block(hidden, count), [len(hidden), count, model.draft_vocab_size]
    name = f"EAGLEInference: draft_block of {type(model).__name__}"
    if not (isinstance(logits, Tensor) and list(logits.shape) == wanted and logits.is_contiguous()):
        raise ModelError(f"{name} must return logits {wanted} without gaps, got {_told(logits)}")
    if logits.dtype not in (hidden.dtype, torch.float32):
        raise ModelError(f"{name} must return logits in {hidden.dtype} or float32, got {_told(logits)}")
    if check.can_read(logits) and logits.isnan().any():
        raise ModelError(f"{name} must return logits without NaN, got {int(logits.isnan().sum())} of them")
    return logits
