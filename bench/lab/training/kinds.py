"""The kinds of drafts that learn from the same states: an EAGLE-3 head, Medusa heads, a P-EAGLE head, a DFlash block.

Depth i of a draft that has read the tokens up to t_{j+1} (features up to row j) predicts t_{j+2+i}, as the target does
in row j + 1 + i. The kinds differ in what they compute this from:

    eagle3     its own outputs of the depths before, and the true tokens (`unrolled.py`)
    medusa     the feature of row j alone, by a head for each depth
    parallel   mask tokens after t_{j+1}, which see the true tokens up to it and the masks before them
    block      a block of t_{j+1} and masks, all of which see each other and the features up to row j

So all lose the same cross-entropy, of the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle_kernels.engine.models.checkpoint import safetensors
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.dflash import DFlashConfig, DFlashDraft, load_dflash
from eagle_kernels.engine.models.head_formats import LAYER_IDS
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead
from eagle_kernels.engine.models.loading import load_draft, load_medusa
from eagle_kernels.engine.models.medusa import MedusaConfig, MedusaHeads
from eagle_kernels.engine.models.parallel_head import ParallelEagleConfig, ParallelEagleHead
from eagle_kernels.engine.models.protocol import FINAL_NORM, Angles
from eagle_kernels.reference.causal_attend import positions_of, rotate

from .states import View
from .trainer import initialise, save_folder, write_json
from .unrolled import DEPTH_DISCOUNT, Lesson, UnrolledAttend, draft_vocabulary_of, set_draft_vocabulary, unroll

# from this vocabulary on, Medusa heads share the target's output: their own would be most of the pair
_SHARED_OUTPUT_FROM = 4096


class Plan(NamedTuple):
    """Holds what decides the shape of a draft, besides its target."""

    levels: int  # drafts of a pass
    aux_layers: tuple[int, ...]  # hidden_states indices that drafts read, but Medusa heads
    draft_ids: Tensor | None  # the tokens that EAGLE heads draft, ascending; None: all
    mask_token: int  # one that the text never has
    seed: int


class Guess(NamedTuple):
    """Holds the logits [B, R, Vd] of one depth, and the rows of the lesson that they guess."""

    logits: Tensor
    rows: slice | Tensor


class Kind(NamedTuple):
    """Tells how drafts of a kind are made, learn, and are stored."""

    levels: int  # drafts of a pass, unless told otherwise
    make: Callable[[Decoder, dict[str, Any], Plan], tuple[nn.Module, dict[str, Any]]]  # bound; with its config.json
    guesses: Callable[[nn.Module, View, int, Tensor], Iterator[Guess]]
    save: Callable[[nn.Module, dict[str, Any], Path], None]
    load: Callable[..., Any]  # (folder, target)


def loss_of(guesses: Iterator[Guess], lesson: Lesson, teaches: Tensor) -> Tensor:
    """Computes the discounted soft cross-entropy of all depths; teaches [B, T]: rows that count."""
    loss = torch.zeros((), dtype=torch.float32, device=teaches.device)
    for depth, (logits, rows) in enumerate(guesses):
        log_probs = logits.float().log_softmax(-1)
        # a draft's mask token has the logit -inf, and what the target gives to it teaches nothing
        log_probs = log_probs.masked_fill(log_probs == float("-inf"), 0.0)
        cross_entropy = -(lesson.probs[:, rows] * log_probs).sum(-1)
        loss = loss + DEPTH_DISCOUNT**depth * (cross_entropy * teaches[:, rows]).mean()
    return loss


def draft_ids_of(draft: nn.Module) -> Tensor | None:
    """Returns the target's ids of the draft's tokens; None: all, in order."""
    return draft_vocabulary_of(draft) if getattr(draft, "d2t", None) is not None else None


def last_anchor(window: int, levels: int) -> int:
    """Returns the last row of a window after which all drafts of a pass have a row of the lesson."""
    return window - 2 - levels


class BlockAttend:
    """`protocol.StoringAttend` of a DFlash draft that learns: block a of a window sees the stored rows up to anchors[a]
    and itself, whole."""

    def __init__(self, anchors: Tensor) -> None:
        self._anchors = anchors
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, [B, T, Hkv, D]

    def store(self, layer: int, key: Tensor, value: Tensor, *, angles: Angles | None = None) -> None:
        self._stored[layer] = (key if angles is None else rotate(key, key, angles)[1]), value

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None,
        *, angles: Angles | None = None,
    ) -> Tensor:  # fmt: skip
        if angles is not None:
            query, key = rotate(query, key, angles)
        count, size, num_heads, head_dim = len(self._anchors), *query.shape[1:]
        query = query.unflatten(0, (-1, count)) * head_dim**-0.5  # [B, A, S, Hq, D]
        group = num_heads // key.shape[2]
        context, seen = (each.repeat_interleave(group, dim=2) for each in self._stored[layer])
        own, own_value = (each.unflatten(0, (-1, count)).repeat_interleave(group, dim=3) for each in (key, value))
        scores = torch.einsum("bashd,bthd->bahst", query, context)
        rows = torch.arange(context.shape[1], device=query.device)
        is_future = rows > self._anchors[:, None]  # [A, T]
        scores = scores.masked_fill(is_future[:, None, None], float("-inf"))
        own_scores = torch.einsum("bashd,bauhd->bahsu", query, own)
        probs = torch.cat((scores, own_scores), dim=-1).float().softmax(-1).to(value.dtype)
        past, block = probs.split((context.shape[1], size), dim=-1)
        attended = torch.einsum("bahst,bthd->bashd", past, seen) + torch.einsum("bahsu,bauhd->bashd", block, own_value)
        return attended.flatten(0, 1)


class LayeredAttend:
    """`UnrolledAttend` of a head with several layers."""

    def __init__(self) -> None:
        self._layers: dict[int, UnrolledAttend] = {}

    def __call__(self, layer: int, *arguments: Any, **options: Any) -> Tensor:
        return self._layers.setdefault(layer, UnrolledAttend())(layer, *arguments, **options)


def _shared(theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns what drafts have in common with their target's config.json."""
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
             "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "max_position_embeddings",
             "bos_token_id", "eos_token_id")  # fmt: skip
    own = {name: theirs[name] for name in names if theirs.get(name) is not None}
    return own | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def _eagle_config(theirs: dict[str, Any], plan: Plan, **more: Any) -> dict[str, Any]:
    ids = [layer - 1 for layer in plan.aux_layers]  # named by outputs: one below the hidden_states indices
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": theirs["vocab_size"] if plan.draft_ids is None else len(plan.draft_ids),
        "target_hidden_size": theirs["hidden_size"],
        "norm_before_residual": False,
        "norm_output": False,
        "eagle_config": {LAYER_IDS: ids, "use_aux_hidden_state": True},
        **_shared(theirs),
        **more,
    }


def _start_eagle(head: EagleHead, target: Decoder, plan: Plan, num_layers: int) -> EagleHead:
    initialise(head, num_layers, plan.seed)
    if head.d2t is not None:
        set_draft_vocabulary(head, plan.draft_ids.cpu())
    head.to(target.device).bind(target)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[draft_vocabulary_of(head)])
    return head


def _make_eagle3(target: Decoder, theirs: dict[str, Any], plan: Plan) -> tuple[nn.Module, dict[str, Any]]:
    config = _eagle_config(theirs, plan)
    return _start_eagle(EagleHead(EagleConfig.from_dict(config)), target, plan, 1), config


def _eagle3_guesses(head: EagleHead, view: View, levels: int, anchors: Tensor) -> Iterator[Guess]:
    for depth, logits in enumerate(unroll(head, view.tokens, view.features, levels)):
        yield Guess(logits, slice(1 + depth, None))


def _make_medusa(target: Decoder, theirs: dict[str, Any], plan: Plan) -> tuple[nn.Module, dict[str, Any]]:
    size, vocab = theirs["hidden_size"], theirs["vocab_size"]
    num_outputs = 0 if vocab >= _SHARED_OUTPUT_FROM else plan.levels
    heads = MedusaHeads(MedusaConfig(
        vocab_size=vocab, draft_vocab_size=vocab, hidden_size=size, num_heads=plan.levels, num_layers=1,
        num_outputs=num_outputs, num_rows=vocab, has_bias=True,
    ))  # fmt: skip
    for block in heads.blocks:  # as the official code begins: every head says what the target says next
        for layer in block.layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    for output in heads.lm_heads:
        output.weight.data.copy_(target.lm_head.weight.cpu())
    config = {"architectures": ["MedusaModel"], "medusa_num_heads": plan.levels, "medusa_num_layers": 1,
              "hidden_size": size, "vocab_size": vocab, "torch_dtype": "bfloat16"}  # fmt: skip
    return heads.to(target.device).bind(target), config


def _medusa_guesses(heads: MedusaHeads, view: View, levels: int, anchors: Tensor) -> Iterator[Guess]:
    window = view.tokens.shape[1]
    logits = heads.draft_block(view.features.flatten(0, 1).to(heads.dtype), levels).unflatten(0, (-1, window))
    for depth in range(levels):
        yield Guess(logits[:, : window - 1 - depth, depth], slice(1 + depth, None))


def _make_parallel(target: Decoder, theirs: dict[str, Any], plan: Plan) -> tuple[nn.Module, dict[str, Any]]:
    config = _eagle_config(theirs, plan, num_hidden_layers=2, ptd_token_id=plan.mask_token)
    head = ParallelEagleHead(ParallelEagleConfig.from_dict(config))
    return _start_eagle(head, target, plan, config["num_hidden_layers"]), config


def _parallel_guesses(head: ParallelEagleHead, view: View, levels: int, anchors: Tensor) -> Iterator[Guess]:
    attend, tokens = LayeredAttend(), view.tokens[:, 1:]
    features, positions = view.features[:, :-1], positions_of(tokens)
    for depth in range(levels):
        if depth:
            tokens = torch.full_like(tokens, head.config.mask_token_id)
            features = head.mask_features.to(features.dtype).expand_as(features)
        logits = head(tokens, features, positions + depth, attend, from_target=True).logits
        yield Guess(logits[:, : logits.shape[1] - depth], slice(1 + depth, None))


def _make_block(target: Decoder, theirs: dict[str, Any], plan: Plan) -> tuple[nn.Module, dict[str, Any]]:
    ids = [layer - 1 for layer in plan.aux_layers]
    config = _shared(theirs) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": plan.levels + 1,
        "dflash_config": {"mask_token_id": plan.mask_token, "target_layer_ids": ids},
    }
    draft = DFlashDraft(DFlashConfig.from_dict(config), len(ids) * theirs["hidden_size"])
    initialise(draft, config["num_hidden_layers"], plan.seed)
    return draft.to(target.device).bind(target), config


def _block_guesses(draft: DFlashDraft, view: View, levels: int, anchors: Tensor) -> Iterator[Guess]:
    anchors = anchors.to(view.tokens.device)
    attend, size = BlockAttend(anchors), draft.block_size
    draft.store_features(view.features.to(draft.fc.weight.dtype), positions_of(view.tokens), attend)
    roots = view.tokens[:, anchors + 1].flatten()
    positions = anchors[:, None] + 1 + torch.arange(size, device=anchors.device)
    positions = positions.expand(len(view.tokens), -1, -1).flatten(0, 1)
    logits = draft.fill_block(roots, levels, positions, attend).unflatten(0, (-1, len(anchors)))
    for depth in range(levels):
        yield Guess(logits[:, :, depth], anchors + 1 + depth)


def _save_medusa(heads: MedusaHeads, config: dict[str, Any], folder: Path) -> None:
    """Writes the official layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for number, block in enumerate(heads.blocks):
        for place, layer in enumerate(block.layers):
            tensors |= {f"{number}.{place}.linear.{name}": each for name, each in layer.state_dict().items()}
        if len(heads.lm_heads):
            tensors[f"{number}.{len(block.layers)}.weight"] = heads.lm_heads[number].weight
    stored = {name: each.detach().to(torch.bfloat16).cpu().contiguous() for name, each in tensors.items()}
    contents = safetensors().torch.save(stored, metadata={"format": "pt"})
    (folder / "medusa_lm_head.safetensors").write_bytes(contents)
    write_json(folder / "config.json", config)


KINDS = {
    "eagle3": Kind(5, _make_eagle3, _eagle3_guesses, save_folder, load_draft),
    "medusa": Kind(5, _make_medusa, _medusa_guesses, _save_medusa, load_medusa),
    "parallel": Kind(7, _make_parallel, _parallel_guesses, save_folder, load_draft),
    "block": Kind(7, _make_block, _block_guesses, save_folder, load_dflash),
}


def layers_of(kind: str, plan: Plan) -> tuple[int, ...]:
    """Returns the streams that a kind reads."""
    return (FINAL_NORM,) if kind == "medusa" else plan.aux_layers


def read_target_config(folder: Path) -> dict[str, Any]:
    """Returns config.json of the target, with the sizes that it may leave out."""
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = theirs["num_attention_heads"]
    usual = {"num_key_value_heads": heads, "head_dim": theirs["hidden_size"] // heads}
    return usual | {name: value for name, value in theirs.items() if value is not None}
