"""Inspection of a draft: its properties, its fit to a target, and the target's streams that a head was trained on. A
head whose auxiliary layer ids follow the wrong convention (off by one) still gives the target's text. Only its
acceptance shows the fault, so `sweep_aux_layers` measures it with the ids as they are and shifted by one either way."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engine.config.eagle_config import EAGLEConfig
from ..engine.config.pairing import tell_sizes
from ..engine.inference import EAGLEInference
from ..engine.models.checkpoint import Checkpoint, brief, read_folder
from ..engine.models.draft_head import DraftHead
from ..engine.models.head_formats import KINDS
from ..engine.models.heads import NextTokenModules
from ..engine.models.loading import HeadFile, load_draft, load_target, read_head, read_kind, tell_capture
from ..engine.models.medusa import MedusaHeads
from ..engine.models.protocol import FINAL_NORM, ModelError, TargetModel
from ..engine.models.tokenizer import check_same_vocabulary, load_tokenizer
from ..runtime.placement import read_placement
from ..runtime.values import parse_json

SHIFTS = (-1, 0, 1)
# The drafts are chains, which suffer more from wrong streams than trees do.
SWEEP_STEPS = 5
# The least best mean length, and its least lead over the next, for a verdict.
LEAST_LENGTH, LEAST_LEAD = 1.05, 0.05

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
          "draft_vocab_size")  # fmt: skip
_OPTIONS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "fc_bias")


@dataclass
class SweepRow:
    """Holds the mean acceptance length (with bonus) for ids shifted by `shift`; None if they leave the target."""

    shift: int
    aux_layers: tuple[int, ...]
    mean_accept_length: float | None


@dataclass
class HeadReport:
    """Holds the report of `inspect`."""

    folder: str
    format: str
    kind: str  # EAGLE-1 includes EAGLE-2, whose network is the same; of a language model its class
    dtypes: list[str]  # of the tensors in the file, in the words of safetensors, such as BF16
    parameters: int  # in the file
    hidden_size: int
    intermediate_size: int  # this and the next three: 0 without attention
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    has_embedding: bool
    has_output: bool
    max_positions: int
    options: list[str]  # those that are on
    written_aux_layers: list[int] | None  # the ids in config.json; None: it has none
    written_aux_meaning: str  # what these ids number
    # The same streams as hidden_states indices; FINAL_NORM is the stream after the final norm. None: they depend on the
    # target, and none was given; []: a language model reads none.
    hidden_states: list[int] | None
    layer_outputs: list[int] | None  # the same streams as layers whose output is read, -1 being the embedding
    target: str | None = None
    fits: bool | None = None  # None: no target was given
    misfits: list[str] = field(default_factory=list)  # why the head does not fit, and every fault of the head itself
    remarks: list[str] = field(default_factory=list)  # notes that are not faults
    sweep: list[SweepRow] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dictionary for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Returns (name, value) lines to print."""
        share = self.draft_vocab_size / self.vocab_size
        sources = {True: "its own", False: "the target's"}
        rows = [
            ("format", self.format),
            ("kind", self.kind + (" (EAGLE-2 is the same network)" if self.kind == "EAGLE-1" else "")),
            ("parameters", f"{self.parameters:,} ({', '.join(self.dtypes)})"),
            ("hidden size", f"{self.hidden_size}, MLP {self.intermediate_size}"),
            ("heads", f"{self.num_attention_heads} query, {self.num_key_value_heads} key-value, of {self.head_dim}"),
            ("layers", "no attention, so no keys and no positions"),
            ("vocabulary", f"{self.draft_vocab_size} of {self.vocab_size} tokens ({share:.0%})"),
            ("embedding, lm_head", f"{sources[self.has_embedding]}, {sources[self.has_output]}"),
            ("max positions", str(self.max_positions)),
            ("options", ", ".join(self.options) or "none"),
            ("reads", self._tell_streams()),
        ]
        of_attention = ("hidden size", "heads", "max positions") if self.num_attention_heads == 0 else ("layers",)
        rows = [row for row in rows if row[0] not in of_attention]
        if self.fits is not None:
            rows.append(("fits the target", "yes" if self.fits else "no"))
        rows += [("misfit", text) for text in self.misfits] + [("remark", text) for text in self.remarks]
        return rows + [(f"acceptance, ids {row.shift:+d}", _told(row)) for row in self.sweep]

    def _tell_streams(self) -> str:
        if self.hidden_states == []:
            return "nothing of its target but the tokens"
        if self.hidden_states is None:
            return "the default streams of its target, hidden_states 2, n // 2, n - 3 of n layers"
        if self.hidden_states == [FINAL_NORM]:
            return tell_capture(self.hidden_states)
        streams = f"{tell_capture(self.hidden_states)} = outputs of layers {self.layer_outputs}"
        if self.written_aux_layers is None:
            return f"{streams} (default)"
        return f"{streams} (written as {self.written_aux_meaning} {self.written_aux_layers})"


def _told(row: SweepRow) -> str:
    length = "not measured" if row.mean_accept_length is None else f"{row.mean_accept_length:.2f} (bonus included)"
    return f"{length}, hidden_states {list(row.aux_layers)}"


def inspect_head(
    draft: str | Path, target: str | Path | None = None, *, prompts: Sequence[str] | None = None,
    max_new_tokens: int = 64, device: str | torch.device | None = None, dtype: torch.dtype | None = None,
    check_weights: bool = True,
) -> HeadReport:  # fmt: skip
    """Reads the head, compares it with the target and, given prompts, measures the shifted layer ids. A language model,
    which can draft as well, has no layer ids; its weights are not read.
    device, dtype: those of the measurement, as in `EAGLEInference.from_pretrained`."""
    draft = read_folder("inspect_head: draft", draft)
    if target is None and prompts is not None:
        raise ValueError("--sweep needs the target as well: --target TARGET")
    kind = read_kind(draft)
    if kind in ("Hydra", "DFlash"):
        told = f"holds {KINDS[kind].called}, which load_{kind.lower()} checks: inspect does not describe it"
        raise ModelError(f"{brief(str(draft), 250)}: {told}")
    if kind == "language model":
        return _inspect_language_model(draft, target, prompts)
    file = read_head(draft, check_weights=check_weights)
    report = _describe(Path(draft), file)
    if target is None:
        report.misfits = file.head.vocabulary_faults()
        return report
    # without a sweep, names and sizes suffice, which need no memory
    place = ("meta", torch.float32) if prompts is None else read_placement("inspect_head", device, dtype)
    target_model = load_target(target, *place, check_weights=check_weights)
    report.target = str(target)
    _hold_against(report, file.head, target_model)
    if prompts is not None and report.hidden_states == [FINAL_NORM]:
        report.remarks.append("nothing to sweep: the head reads the target's last feature")
    elif prompts is not None and report.fits:
        tokenizer = load_tokenizer(target)
        tokens = [tokenizer.encode(prompt) for prompt in prompts]
        head = load_draft(draft, target_model, check_weights=check_weights)
        report.sweep = sweep_aux_layers(head, target_model, tokens, max_new_tokens)
        report.remarks += judge(report.sweep)
    return report


def _describe(folder: Path, file: HeadFile) -> HeadReport:
    head, config = file.head, file.head.config
    return HeadReport(
        folder=str(folder), format=file.format_name, kind=file.kind, dtypes=file.dtypes,
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        **{name: getattr(config, name, 0) for name in _SIZES},
        has_embedding=getattr(head, "embed_tokens", None) is not None,
        has_output=bool(head.lm_heads) if isinstance(head, MedusaHeads) else head.lm_head is not None,
        max_positions=head.max_length,
        options=[name for name in _OPTIONS if getattr(config, name, False)] + _told_modules(head),
        written_aux_layers=None if file.written_aux.written is None else list(file.written_aux.written),
        written_aux_meaning=file.written_aux.meaning, **_streams(config.aux_layers), remarks=list(file.remarks),
    )  # fmt: skip


def _inspect_language_model(draft: Path, target: str | Path | None, prompts: Sequence[str] | None) -> HeadReport:
    """Returns the report of a language model as a draft, from its names and sizes."""
    model, stored = load_target(draft, "meta"), Checkpoint(draft).tensors.values()
    # a model of transformers has its names in a config of its own
    config, shape = model.config, model.kv_shape
    report = HeadReport(
        folder=str(draft),
        format="Hugging Face",
        kind=f"a language model ({type(model).__name__}), which drafts as method draft_model",
        dtypes=sorted({tensor.dtype for tensor in stored if tensor.is_floating_point}),
        parameters=sum(math.prod(tensor.shape) for tensor in stored if tensor.is_floating_point),
        hidden_size=model.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * model.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=model.vocab_size,
        draft_vocab_size=model.vocab_size,
        max_positions=model.max_length,
        has_embedding=True, has_output=True, options=[],
        written_aux_layers=None, written_aux_meaning="", hidden_states=[], layer_outputs=[],
    )  # fmt: skip
    if target is None:
        return report
    report.target, target_model = str(target), load_target(target, "meta")
    try:
        if not check_same_vocabulary(draft, target) and model.vocab_size != target_model.vocab_size:
            report.misfits.append(tell_sizes(draft, model.vocab_size, target_model.vocab_size))
    except ModelError as error:
        report.misfits.append(str(error))
    report.fits = not report.misfits
    _compare_lengths(report, target_model)
    if prompts is not None:
        report.remarks.append("nothing to sweep: a language model reads no streams of the target")
    return report


def _told_modules(head: DraftHead | MedusaHeads) -> list[str]:
    if isinstance(head, MedusaHeads):
        return [f"num_heads={head.config.num_heads}", f"num_layers={head.config.num_layers}"]
    return [f"num_modules={head.num_modules}"] if isinstance(head, NextTokenModules) else []


def _streams(aux_layers: tuple[int, ...] | None) -> dict[str, list[int] | None]:
    """Returns the streams in both conventions; a layer reads the output of the one before."""
    if aux_layers is None:
        return {"hidden_states": None, "layer_outputs": None}
    outputs = None if aux_layers == (FINAL_NORM,) else [layer - 1 for layer in aux_layers]
    return {"hidden_states": list(aux_layers), "layer_outputs": outputs}


def _hold_against(report: HeadReport, head: DraftHead | MedusaHeads, target: TargetModel) -> None:
    report.misfits = head.misfits(target)
    report.fits = not report.misfits
    if report.fits:
        head.bind(target)
        for name, value in _streams(head.aux_layers).items():
            setattr(report, name, value)
    _compare_lengths(report, target)


def _compare_lengths(report: HeadReport, target: TargetModel) -> None:
    own, theirs = report.max_positions, target.max_length
    if own < theirs:
        what = "model" if report.hidden_states == [] else "head"
        report.remarks.append(
            f"the {what} was made for {own} positions, the target for {theirs}: requests end at {own} tokens"
        )


def sweep_aux_layers(
    head: DraftHead, target: TargetModel, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[SweepRow]:
    """Decodes the prompts greedily with the auxiliary layer ids as they are and shifted; leaves the head unchanged."""
    if head.aux_layers == (FINAL_NORM,):
        raise ModelError("the head reads the target's last feature: there are no layer ids to sweep")
    as_they_are, rows = head.aux_layers, []
    config = EAGLEConfig(topk=1, num_steps=SWEEP_STEPS, eos_token_ids=())
    try:
        for shift in SHIFTS:
            head.use_aux_layers([layer + shift for layer in as_they_are])
            length = None
            if not head.misfits(target):
                engine = EAGLEInference(head, target, config)
                length = engine.generate(list(prompts), max_new_tokens, progress=False)[1].mean_accept_length
            rows.append(SweepRow(shift, head.aux_layers, length))
    finally:
        head.use_aux_layers(as_they_are)
    return rows


def judge(sweep: list[SweepRow]) -> list[str]:
    """Returns the verdict of a sweep on the ids."""
    measured = [row for row in sweep if row.mean_accept_length is not None]
    best, *others = sorted(measured, key=lambda row: -row.mean_accept_length)
    if best.mean_accept_length < LEAST_LENGTH:
        return ["the sweep cannot tell: the head is accepted (almost) never"]
    if not others:
        return ["the sweep cannot tell: no other layer ids fit the target"]
    if best.mean_accept_length < (1 + LEAST_LEAD) * others[0].mean_accept_length:
        return ["the sweep cannot tell: the lengths are too close"]
    if best.shift == 0:
        return ["the sweep finds the layer ids right as they are"]
    return [
        f"the sweep finds the layer ids better when shifted by {best.shift:+d}: they may be of the other convention; "
        f"load_draft(..., aux_layers={best.aux_layers}) reads these"
    ]


def read_prompts_file(path: str | Path) -> list[str]:
    """Returns the prompts of a JSON file (a list of texts) or of any other file (one a line; `-` is standard input)."""
    path = Path(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
        # `splitlines` would split at U+2028 and its like too
        prompts = parse_json(text) if path.suffix == ".json" else text.split("\n")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file of prompts") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as a file of prompts: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: must be a JSON list of texts, or UTF-8 text: {error}") from None
    if not (isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)):
        raise ValueError(f"{path}: must hold a JSON list of texts")
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise ValueError(f"{path}: holds no prompt")
    return prompts
