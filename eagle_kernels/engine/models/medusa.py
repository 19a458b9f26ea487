"""Medusa heads (Cai et al., arXiv 2401.10774): each predicts a token further on, from one feature of the target.

The feature h_t is the target's stream after its final norm, from which its own lm_head predicts t_{t+1}. Head k = 0, 1,
.. predicts t_{t+2+k}; it has one or more blocks, and an output of its own or the target's:

    x      = h_t;  x = x + silu(blocks[k].layers[j](x))  for j = 0, 1, ..
    logits = lm_heads[k](x)

Two layouts are published. The official one (FasterDecoding/Medusa, medusa/model/medusa_model.py, and the servers that
read it) has config.json with `medusa_num_heads` and `medusa_num_layers` and a file `medusa_lm_head.safetensors` or
`medusa_lm_head.pt`, whose tensors are k.j.linear.weight, k.j.linear.bias and, after the blocks, k.J.weight. Its reader
takes the number of heads from the file, since published configs name fewer. vLLM's (model_executor/models/medusa.py, up
to 0.32) has model_type "medusa" with num_heads, num_hidden_layers, medusa_fc_bias, original_lm_head and
truncated_vocab_size, and `model.safetensors` with the names above, at times after "medusa_heads.", and token_map, the
ids of the tokens that the heads know.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.values import is_integer, shown
from .checkpoint import Checkpoint, brief
from .layers.linear import Linear
from .protocol import FINAL_NORM, Attend, DraftOutput, KVShape, ModelError, TargetModel
from .quantisation import refuse_quantised
from .settings import MOST_LAYERS, check_implemented, is_empty

# the files of the official layout
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_COUNTS = ("medusa_num_heads", "num_heads")
_OFFICIAL_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_OFFICIAL_OUTPUT = re.compile(r"^(\d+)\.\d+\.weight$")
_TENSOR = re.compile(r"^(?:blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)|lm_heads\.(\d+)\.weight)$")
# before its head and target are known, a draft without positions limits nothing
_NO_LIMIT = 2**31 - 1


@dataclass(kw_only=True)
class MedusaConfig:
    """Holds the sizes of the heads, as their tensors and config.json tell them."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    num_outputs: int  # 0: the target's, 1: one for all heads
    num_rows: int  # of an output in the file, which may have one for each token of the target
    has_bias: bool
    aux_layers: tuple[int, ...] = (FINAL_NORM,)


class MedusaBlock(nn.Module):
    """Holds the residual layers of one head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(Linear(size, size, bias=config.has_bias) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """Computes the heads of a folder (`protocol.BlockDraft`); `bind` them to their target before use."""

    method = "medusa"
    token_shift = 1
    kv_shape = KVShape(0, 1, 1)
    max_length = _NO_LIMIT
    aux_layers = (FINAL_NORM,)

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config, self.block_length = config, config.num_heads
        self.vocab_size, self.draft_vocab_size = config.vocab_size, config.draft_vocab_size
        self.blocks = nn.ModuleList(MedusaBlock(config) for _ in range(config.num_heads))
        output = config.hidden_size, config.num_rows
        self.lm_heads = nn.ModuleList(Linear(*output, bias=False) for _ in range(config.num_outputs))
        whole = config.draft_vocab_size == config.vocab_size
        self.register_buffer("token_map", None if whole else torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.draft_to_target: Tensor | None = None  # until `bind`
        self._outputs: list[nn.Module] = []

    @property
    def device(self) -> torch.device:
        return self.blocks[0].layers[0].weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].layers[0].weight.dtype

    def draft_block(self, hidden: Tensor, count: int) -> Tensor:
        """See `protocol.BlockDraft`."""
        return torch.cat([self._logits(hidden[:, None], head) for head in range(count)], dim=1)

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """Computes the first head alone, for every row; see `protocol.DraftModel.forward`."""
        return DraftOutput(self._logits(hidden, 0), hidden)

    def _logits(self, x: Tensor, head: int) -> Tensor:
        """Returns the logits [B, T, Vd] of one head."""
        if not self._outputs:
            raise ModelError("the heads are not bound: call bind(target) first")
        return self._outputs[head](self.blocks[head](x))

    def misfits(self, target: TargetModel) -> list[str]:
        """Returns every reason why the heads and the target do not belong together, a line each."""
        config, found = self.config, []
        if config.hidden_size != target.hidden_size:
            sizes = f"{config.hidden_size}, the target's are {target.hidden_size}"
            found.append(f"the heads read features of width {sizes}")
        if config.vocab_size != target.vocab_size:
            found.append(f"the heads' vocab_size {config.vocab_size} is not the target's {target.vocab_size}")
        if not self.lm_heads and not hasattr(target, "get_output_embeddings"):
            found.append("the heads hold no output and the target has no get_output_embeddings()")
        return found + self.vocabulary_faults()

    def vocabulary_faults(self) -> list[str]:
        """Returns what is wrong with the draft vocabulary for any target: the first bad id of each fault."""
        ids, vocab_size, found = self.token_map, self.vocab_size, []
        if ids is None or ids.is_meta:
            return []
        for draft_id in ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()[:1]:
            fault = f"outside the {vocab_size} there are"
            found.append(f"token_map: draft id {draft_id} maps to target id {ids[draft_id]}, {fault}")
        kept, counts = ids.unique(return_counts=True)
        for number in (counts > 1).nonzero().flatten()[:1]:
            found.append(f"token_map: target id {kept[number]} is there {counts[number]} times")
        if not self.lm_heads:
            of = f"over {self.draft_vocab_size} of {vocab_size} tokens"
            found.append(f"heads {of} cannot share the target's output and must hold lm_heads.*.weight")
        return found

    def bind(self, target: TargetModel) -> MedusaHeads:
        """Checks that the heads fit the target, takes its output if they have none, and returns the heads."""
        for misfit in self.misfits(target):
            raise ModelError(misfit)
        outputs = [*self.lm_heads] or [target.get_output_embeddings()]
        self._outputs = outputs * self.block_length if len(outputs) == 1 else outputs
        self.max_length = target.max_length
        if self.token_map is not None:
            self.draft_to_target = self.token_map - torch.arange(self.draft_vocab_size, device=self.token_map.device)
        return self


def are_medusa(config: dict[str, Any]) -> bool:
    """Returns whether a parsed config.json is that of Medusa heads."""
    names = config.get("architectures")
    told = [*(names if isinstance(names, list) else ()), config.get("model_type")]
    told += [name for name, value in config.items() if not is_empty(value)]
    return any(isinstance(name, str) and name.lower().startswith("medusa") for name in told)


def name_layout(config: dict[str, Any]) -> str:
    """Returns the name of the layout of a config.json."""
    return "vLLM" if config.get("model_type") == "medusa" else "official (FasterDecoding)"


def read_medusa(
    config: dict[str, Any], checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, check_weights: bool
) -> tuple[MedusaHeads, list[str]]:
    """Reads the heads of a folder; returns them, and what their files leave open or contradict."""
    check_implemented(config, {"logit_scale": 1.0, "hidden_act": "silu"}, " for Medusa heads")
    refuse_quantised(checkpoint, "Medusa heads")
    checkpoint.rename(_our_name)
    tensors = checkpoint.tensors
    num_layers, num_outputs = _count(tensors)
    num_heads, remarks = len(num_layers), []
    wanted = next((config[name] for name in _COUNTS if not is_empty(config.get(name))), num_heads)
    if not (is_integer(wanted) and 0 < wanted <= num_heads):
        raise ModelError(f"config.json: the number of heads must lie in 1..{num_heads}, those with tensors, "
                         f"got {shown(wanted)}")  # fmt: skip
    if wanted < num_heads:
        remarks.append(f"config.json names {wanted} heads, and the file holds {num_heads}: all are used")
    for name in ("medusa_num_layers", "num_hidden_layers"):
        value = config.get(name)
        is_of_heads = name == "medusa_num_layers" or config.get("model_type") == "medusa"  # or of the target's
        if is_of_heads and not is_empty(value) and value != num_layers[0]:
            rule = f"must be {num_layers[0]} to match the tensors blocks.*.layers.*"
            raise ModelError(f"config.json: {name} {rule}, got {shown(value)}")
    hidden_size = _shape(checkpoint, "blocks.0.layers.0.weight")[0]
    rows = _shape(checkpoint, "lm_heads.0.weight")[0] if num_outputs else None
    known = _shape(checkpoint, "token_map", 1)[0] if "token_map" in tensors else None
    vocab_size = config.get("vocab_size") if rows is None or known is not None else rows
    if not (is_integer(vocab_size) and vocab_size > 0):
        raise ModelError(f"config.json: vocab_size must be a positive integer, got {shown(vocab_size)}")
    for name, value in (("vocab_size", vocab_size), ("hidden_size", hidden_size)):
        written = config.get(name)
        if not is_empty(written) and written != value:
            raise ModelError(f"config.json: {name} must be {value} to match the tensors, got {shown(written)}")
    if known == vocab_size:
        del tensors["token_map"]  # every token, in the order of its rows
        known = None
    settings = MedusaConfig(
        vocab_size=vocab_size, draft_vocab_size=known or vocab_size, hidden_size=hidden_size, num_heads=num_heads,
        num_layers=num_layers[0], num_outputs=num_outputs, num_rows=rows or known or vocab_size,
        has_bias="blocks.0.layers.0.bias" in tensors,
    )  # fmt: skip
    if settings.num_rows not in (settings.draft_vocab_size, vocab_size):
        rule = f"must have {settings.draft_vocab_size} rows, one for each token of token_map"
        raise ModelError(f"tensor lm_heads.0.weight {rule}, got {settings.num_rows}")
    with torch.device("meta"):
        heads = MedusaHeads(settings)
    checkpoint.fill(heads, device, dtype, check_weights)
    if known is not None and settings.num_rows > known and not heads.vocabulary_faults():
        for output in heads.lm_heads:  # as vLLM reads them
            output.weight = nn.Parameter(output.weight[heads.token_map], requires_grad=False)
    return heads, remarks


def _our_name(name: str) -> str:
    """Returns our name of a tensor, which is vLLM's."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.").removeprefix("heads.")
    name = _OFFICIAL_BLOCK.sub(r"blocks.\1.layers.\2.\3", name)
    name = _OFFICIAL_OUTPUT.sub(r"lm_heads.\1.weight", name)
    return "lm_heads.0.weight" if name == "lm_head.weight" else name


def _count(names: Collection[str]) -> tuple[list[int], int]:
    """Returns the number of layers of each head, and how many outputs there are."""
    layers, outputs = {}, set()
    for found in filter(None, map(_TENSOR.match, names)):
        head, layer, output = (None if group is None else int(group) for group in found.groups())
        if output is not None:
            outputs.add(output)
        else:
            layers.setdefault(head, set()).add(layer)
    sizes = Counter(map(len, layers.values()))
    are_whole = all(numbers == set(range(len(numbers))) for numbers in (layers.keys(), outputs, *layers.values()))
    if not layers or len(sizes) > 1 or not are_whole or max(len(layers), *sizes) > MOST_LAYERS:
        given = brief(", ".join(sorted(names)[:4]))
        raise ModelError(
            f"must hold tensors k.j.linear.weight of Medusa heads k with as many layers j each, got {given}"
        )
    if len(outputs) not in (0, 1, len(layers)):
        raise ModelError(f"must hold one output, or one for each of the {len(layers)} heads, got {len(outputs)}")
    return [len(layers[head]) for head in range(len(layers))], len(outputs)


def _shape(checkpoint: Checkpoint, name: str, num_axes: int = 2) -> list[int]:
    shape = checkpoint.tensors[name].shape
    if len(shape) != num_axes or 0 in shape:
        raise ModelError(f"tensor {name} must have {num_axes} axes of at least 1, got shape {shown(shape)}")
    return shape
