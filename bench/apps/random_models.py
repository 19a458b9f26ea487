"""Models of published shapes with random weights: speed does not depend on what the weights are."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from eagle_kernels.engine.models.checkpoint import Checkpoint, StoredTensor
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.dflash import DFlashConfig, DFlashDraft
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead, NextTokenConfig, NextTokenModules
from eagle_kernels.engine.models.hydra import HydraConfig, HydraHeads
from eagle_kernels.engine.models.medusa import MedusaConfig, MedusaHeads
from eagle_kernels.engine.models.parallel_head import ParallelEagleConfig, ParallelEagleHead
from eagle_kernels.engine.models.protocol import DraftOutput, TargetModel, TargetOutput
from eagle_kernels.engine.models.quantised_linears import quantise_linears
from eagle_kernels.engine.models.quantising import quantise_at_load, read_quantize

# Standard deviation of a draft's logits: the best one takes most of the probability, as a trained head's does, and
# trees are deep. With all tokens nearly equal the best 64 paths would all end on the first two levels.
LOGITS_STD = 8.0
WEIGHT_STD = 0.02

# a row a model, as its config.json has them
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rope_theta", "max_position_embeddings", "draft_vocab_size",
)  # fmt: skip
_QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_QWEN3_MOE = _QWEN3 | {"model_type": "qwen3_moe"} | _EXPERTS
SHAPES = {
    name: dict(zip(_SIZES, sizes)) | others
    for name, sizes, others in (
        ("llama-3.1-8b", (128256, 4096, 14336, 32, 32, 8, 128, 500000.0, 8192, 32000), {}),
        ("qwen3-4b", (151936, 2560, 9728, 36, 32, 8, 128, 1e6, 40960, 32000), _QWEN3 | {"tie_word_embeddings": True}),
        ("qwen3-8b", (151936, 4096, 12288, 36, 32, 8, 128, 1e6, 40960, 32000), _QWEN3),
        ("qwen3-14b", (151936, 5120, 17408, 40, 40, 8, 128, 1e6, 40960, 32000), _QWEN3),
        ("qwen3-32b", (151936, 5120, 25600, 64, 64, 8, 128, 1e6, 40960, 32000), _QWEN3),
        ("qwen3-30b-a3b", (151936, 2048, 6144, 48, 32, 4, 128, 1e6, 40960, 32000), _QWEN3_MOE),
        ("small", (512, 64, 96, 8, 4, 2, 16, 10000.0, 1024, 256), {}),
    )
}


def target_config(shape: str) -> dict:
    """A config.json."""
    sizes = {name: value for name, value in SHAPES[shape].items() if name != "draft_vocab_size"}
    return {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False} | sizes


def random_target(shape: str, device: torch.device, dtype: torch.dtype, **others: int) -> Decoder:
    """others: sizes that are not those of the shape."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(target_config(shape) | others))
    return _filled(model, device, dtype)


class DrawnCheckpoint(Checkpoint):
    """Holds the tensors of a module on the meta device as a folder in bfloat16 would, and draws each as it is read."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors = {
            name: StoredTensor("drawn", name, list(tensor.shape), "BF16" if tensor.is_floating_point() else "I64")
            for name, tensor in module.state_dict().items()
        }

    def read(self) -> Iterator[tuple[str, Tensor]]:
        for name, stored in self.tensors.items():
            # embedding and output lie in a file's pages, and are only copied
            place = torch.device("cpu") if math.prod(stored.shape) >= 2**28 else self.device
            generator = torch.Generator(place).manual_seed(0)
            made = torch.empty(stored.shape, dtype=torch.bfloat16, device=place)
            yield name, made.normal_(std=WEIGHT_STD, generator=generator) if made.dim() > 1 else made.fill_(1.0)


def quantised_target(
    shape: str, device: torch.device, dtype: torch.dtype, quantize: str | dict[str, str], **others: int
) -> Decoder:
    """A target that is quantised at loading, weight by weight, as `load_target` does with a folder."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(target_config(shape) | others))
    checkpoint = DrawnCheckpoint(model, device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = None
        checkpoint.tensors.pop("lm_head.weight", None)
    model.quantize = read_quantize("quantize", quantize)
    quantise_linears(model, checkpoint.tensors, checkpoint.get, quantise_at_load(None, model.quantize))
    checkpoint.fill(model, device, dtype, check_weights=False)
    model.tie_weights()
    return model


def quantised_head(whole: EagleHead, quantize: str | dict[str, str]) -> EagleHead:
    """The head `whole` with its own weights, quantised."""
    with torch.device("meta"):
        head = EagleHead(whole.config)
    tensors, checkpoint = whole.state_dict(), DrawnCheckpoint(head, whole.device)
    checkpoint.tensors = {name: stored for name, stored in checkpoint.tensors.items() if name in tensors}
    checkpoint.read = lambda: ((name, tensors[name]) for name in checkpoint.tensors)
    head.quantize = read_quantize("draft_quantize", quantize)
    quantise_linears(head, checkpoint.tensors, checkpoint.get, quantise_at_load(None, head.quantize))
    checkpoint.fill(head, whole.device, whole.dtype, check_weights=False)
    return head


def head_config(shape: str) -> dict:
    """The config.json of an EAGLE-3 head, which is one layer of Llama's kind beside any target."""
    own = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
    dense = {name: value for name, value in target_config(shape).items() if name not in _EXPERTS}
    return dense | own | {"draft_vocab_size": SHAPES[shape]["draft_vocab_size"]}


def random_head(shape: str, device: torch.device, dtype: torch.dtype, **others: int) -> EagleHead:
    """An EAGLE-3 head whose draft vocabulary is spread evenly over the target's."""
    with torch.device("meta"):
        head = EagleHead(EagleConfig.from_dict(head_config(shape) | others))
    return _spread(_filled(head, device, dtype), SHAPES[shape])


def _spread(head: EagleHead, sizes: dict) -> EagleHead:
    device = head.lm_head.weight.device
    head.lm_head.weight *= LOGITS_STD / (WEIGHT_STD * sizes["hidden_size"] ** 0.5)
    draft_ids = torch.arange(sizes["draft_vocab_size"], device=device)
    step = sizes["vocab_size"] // sizes["draft_vocab_size"]
    head.d2t.copy_(draft_ids * (step - 1))
    head.t2d.zero_()[draft_ids * step] = True
    return head


def random_modules(
    shape: str, num_modules: int, target: TargetModel, dtype: torch.dtype, **others: int
) -> NextTokenModules:
    """Next-token modules, bound to a target of that shape."""
    sizes = {"model_type": "mimo", "num_nextn_predict_layers": num_modules}
    with torch.device("meta"):
        modules = NextTokenModules(NextTokenConfig.from_dict(target_config(shape) | sizes | others))
    return _filled(modules, target.device, dtype).bind(target)


def random_drafts(
    shape: str, num_levels: int, target: TargetModel, dtype: torch.dtype, **others: int
) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Yields drafts of each kind, bound to a target of that shape: what the kind is called, the draft, and the bytes of
    weights that it reads for so many levels. P-EAGLE's has one layer, as EAGLE-3's, and DFlash's has five."""
    sizes = target_config(shape) | others
    vocab_size, hidden_size = sizes["vocab_size"], sizes["hidden_size"]
    mask, layers = vocab_size - 1, [1, sizes["num_hidden_layers"] // 2 - 1, sizes["num_hidden_layers"] - 4]
    own = {"num_hidden_layers": 5, "model_type": "qwen3", "block_size": num_levels + 1}
    heads = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_heads": num_levels, "num_layers": 1}
    shared = {"draft_vocab_size": vocab_size, "num_outputs": 0, "num_rows": vocab_size, "has_bias": True}
    makers = {
        "eagle3": lambda: EagleHead(EagleConfig.from_dict(head_config(shape) | others)),
        "p-eagle": lambda: ParallelEagleHead(
            ParallelEagleConfig.from_dict(head_config(shape) | others | {"ptd_token_id": mask})
        ),
        "medusa": lambda: MedusaHeads(MedusaConfig(**heads, **shared)),
        "hydra": lambda: HydraHeads(HydraConfig(**heads, hidden_state_offset=0), None),
        "dflash": lambda: DFlashDraft(
            DFlashConfig.from_dict(sizes | own | {"mask_token_id": mask, "target_layer_ids": layers}), 3 * hidden_size
        ),
    }
    for name, make in makers.items():
        with torch.device("meta"):
            draft = make()
        draft = _filled(draft, target.device, dtype)
        draft = _spread(draft, SHAPES[shape]) if isinstance(draft, EagleHead) else draft
        num_bytes = sum(weight.nbytes for weight in draft.parameters())
        if name == "eagle3":
            num_bytes += (num_levels - 1) * (num_bytes - draft.fc.weight.nbytes)
        elif name in ("medusa", "dflash"):
            num_bytes += target.get_output_embeddings().weight.nbytes
        yield name, draft.bind(target), num_bytes


def _filled(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    module = module.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=WEIGHT_STD, generator=generator)
        else:
            parameter.fill_(1.0)
    return module


class Hollow:
    """A model whose forward costs nothing: what a step takes with it is the step's own. Also a draft's.

    Answers with random logits and features that are made once, for each shape that is asked for.
    """

    def __init__(self, model: Decoder | EagleHead):
        self._model = model
        self._made: dict[tuple[int, ...], Tensor] = {}

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def forward(self, input_ids, *arguments, capture=(), last_only=False, from_target=None):
        model, shape = self._model, input_ids.shape
        if from_target is None:
            logits = self._random(shape[0], 1 if last_only else shape[1], model.vocab_size)
            features = self._random(*shape, len(capture) * model.hidden_size) if capture else None
            return TargetOutput(logits, features)
        logits = self._random(*shape, model.draft_vocab_size, scale=LOGITS_STD)
        return DraftOutput(logits, self._random(*shape, model.config.hidden_size))

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        if shape not in self._made:
            self._made[shape] = (scale * torch.randn(shape, device=self._model.device)).to(self._model.dtype)
        return self._made[shape]
