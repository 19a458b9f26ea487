"""Small models: a toy of thirty lines that shows all that the protocol asks, and random decoders."""

from pathlib import Path

import torch

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.dflash import DFlashConfig, DFlashDraft
from eagle_kernels.engine.models.heads import (
    Eagle1Config,
    Eagle1Head,
    EagleConfig,
    EagleHead,
    NextTokenConfig,
    NextTokenModules,
)
from eagle_kernels.engine.models.hydra import HydraConfig, HydraHeads
from eagle_kernels.engine.models.parallel_head import ParallelEagleConfig, ParallelEagleHead
from eagle_kernels.engine.models.protocol import DraftOutput, KVShape, TargetOutput
from eagle_kernels.engine.models.tokenizer import ByteTokenizer
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine import heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class ToyModel:
    """One layer of attention without positions or weights in files: a whole `TargetModel` in thirty lines."""

    def __init__(self, vocab_size=40, hidden_size=32, num_heads=2, max_length=128, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return (torch.randn(*shape, generator=generator) / shape[0] ** 0.5).to(device)

        self.vocab_size, self.hidden_size, self.max_length = vocab_size, hidden_size, max_length
        self.kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=hidden_size // num_heads)
        self.device, self.dtype, self.num_heads = torch.device(device), torch.float32, num_heads
        self.embedding, self.position = 3 * weight(vocab_size, hidden_size), weight(max_length, hidden_size)
        self.query, self.output = weight(hidden_size, hidden_size), weight(hidden_size, hidden_size)
        self.key = weight(hidden_size, hidden_size // num_heads)
        self.value = weight(hidden_size, hidden_size // num_heads)
        self.head = 3 * weight(hidden_size, vocab_size)

    def forward(self, input_ids, positions, attend, *, capture=(), last_only=False):
        hidden = self.embedding[input_ids] + self.position[positions]
        streams = [hidden]
        query = (hidden @ self.query).unflatten(-1, (self.num_heads, -1))
        key, value = (hidden @ self.key)[..., None, :], (hidden @ self.value)[..., None, :]
        hidden = hidden + attend(0, query, key, value).flatten(-2) @ self.output
        streams.append(hidden)
        features = torch.cat([streams[index] for index in capture], dim=-1) if capture else None
        return TargetOutput(hidden[:, -1:] @ self.head if last_only else hidden @ self.head, features)


class Walker(ToyModel):
    """Counts on behind tokens below `walk`, whatever came before; behind others it says what its attention makes of it.

    So drafts can be right for whole blocks, and yet a wrong key, position or history changes the text at a jump.
    """

    def __init__(self, vocab_size=40, walk=28, **others):
        super().__init__(vocab_size, **others)
        self.walk, steps = walk, torch.arange(walk, device=self.device)
        self.sure = torch.zeros(vocab_size, vocab_size, device=self.device)
        self.sure[steps, steps + 1] = 100.0

    def forward(self, input_ids, positions, attend, *, capture=(), last_only=False):
        output = super().forward(input_ids, positions, attend, capture=capture, last_only=last_only)
        return output._replace(logits=output.logits + self.sure[input_ids[:, -1:] if last_only else input_ids])


class WalkerHead(Walker):
    """A head that counts as a `Walker` does, and whose jumps are made of the target's features and its own."""

    token_shift, aux_layers, draft_to_target = 1, (1,), None

    def __init__(self, vocab_size=40, walk=28, **others):
        super().__init__(vocab_size, walk, **others)
        self.draft_vocab_size = vocab_size

    def forward(self, input_ids, hidden, positions, attend, *, from_target):
        output = super().forward(input_ids, positions, attend, capture=(1,))
        return DraftOutput(output.logits + hidden @ self.head, output.features + hidden)


class RowWalker(Walker):
    """A `Walker` of which several prompts, and prompts beside the rows of a step, are one batch."""

    def forward(self, input_ids, positions, attend, *, capture=(), last_only=False, last_rows=None):
        output = super().forward(input_ids, positions, attend, capture=capture, last_only=last_only)
        return output if last_rows is None else output._replace(logits=output.logits[:, last_rows])


class WalkerModules(Walker):
    """Next-token modules that count as a `Walker` does; each has a layer of attention of its own."""

    token_shift, aux_layers, draft_to_target = 1, (1,), None

    def __init__(self, num_modules, vocab_size=40, walk=28, **others):
        super().__init__(vocab_size, walk, **others)
        self.num_modules, self.draft_vocab_size = num_modules, vocab_size
        self.kv_shape = self.kv_shape._replace(num_layers=num_modules)

    def advance(self, input_ids, hidden, positions, attend, *, module):
        hidden = self.embedding[input_ids] + self.position[positions] + hidden / 2
        query = (hidden @ self.query).unflatten(-1, (self.num_heads, -1))
        key, value = (hidden @ self.key)[..., None, :], (hidden @ self.value)[..., None, :]
        hidden = hidden + attend(module, query, key, value).flatten(-2) @ self.output
        return hidden + self.sure[input_ids] @ self.head.T

    def project(self, hidden):
        return hidden @ self.head

    def forward(self, input_ids, hidden, positions, attend, *, from_target):
        hidden = self.advance(input_ids, hidden, positions, attend, module=0)
        return DraftOutput(self.project(hidden), hidden)


MASK = 19


class MaskedDraft(Walker):
    """Counts on as a `Walker` does, and over masks: a row of a mask counts on from the last token that is none."""

    token_shift, aux_layers, draft_to_target, mask_features = 0, (), None, None
    mask_token_id = masked_id = MASK

    def __init__(self, vocab_size=40, walk=28, **others):
        super().__init__(vocab_size, walk, **others)
        self.draft_vocab_size = vocab_size

    def forward(self, input_ids, hidden, positions, attend, *, from_target):
        output = super().forward(input_ids, positions, attend, capture=(1,))
        row = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = torch.where(input_ids == MASK, 0, row).cummax(1).values
        behind = row - last
        token = input_ids.gather(1, last)
        is_sure = (behind > 0) & (token + behind + 1 <= self.walk)
        places = (token + behind + 1).clamp(max=self.vocab_size - 1)
        sure = 3.0 * torch.nn.functional.one_hot(places, self.vocab_size)
        logits = output.logits + torch.where(is_sure[..., None], sure, 0.0)
        return DraftOutput(logits + self.from_features(hidden), output.features + hidden.sum(-1, keepdim=True))

    def from_features(self, hidden):
        return 0.0


class MaskedHead(MaskedDraft):
    """A head that does so, with the target's features, and one of its own for masks."""

    token_shift, aux_layers = 1, (1,)

    def __init__(self, vocab_size=40, walk=28, **others):
        super().__init__(vocab_size, walk, **others)
        self.mask_features = self.output[0]

    def from_features(self, hidden):
        return hidden @ self.head


class WalkerBlock(Walker):
    """Counts on from the token that the target's features are of, for several tokens at once, without keys.

    The features are the target's embeddings, before its attention, so drafts are right wherever the target walks, and
    by chance where it jumps.
    """

    token_shift, aux_layers, draft_to_target, block_length = 1, (0,), None, 5

    def __init__(self, vocab_size=40, walk=28, *, of, **others):
        super().__init__(vocab_size, walk, **others)
        self.draft_vocab_size, self.kv_shape, self.table = vocab_size, KVShape(0, 1, 1), of.embedding

    def draft_block(self, hidden, count):
        token = (hidden @ self.table.T - self.table.square().sum(1) / 2).argmax(-1)
        steps = torch.arange(2, 2 + count, device=hidden.device)
        places = (token[:, None] + steps).clamp(max=self.vocab_size - 1)
        is_sure = (token[:, None] + steps <= self.walk)[..., None]
        sure = 3.0 * torch.nn.functional.one_hot(places, self.vocab_size)
        noise = (hidden @ self.head)[:, None] / steps[:, None]
        return noise + torch.where(is_sure, sure, 0.0)


class Markov:
    """Its next token depends on the last one alone, so that every place of a long text is a draw from a known law.

    A `TargetModel` without attention. near: its table is that one's, a little sharper, and some noise.
    """

    hidden_size, kv_shape, dtype = 16, KVShape(1, 1, 16), torch.float32

    def __init__(self, *, vocab_size, max_length, seed=0, near=None, device="cpu"):
        self.vocab_size, self.max_length, self.device = vocab_size, max_length, torch.device(device)
        table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)).to(device)
        self.table = 1.2 * table if near is None else 1.3 * near.table + 0.6 * table

    def forward(self, input_ids, positions, attend, *, capture=(), last_only=False):
        # the features tell the token
        features = torch.nn.functional.one_hot(input_ids, self.hidden_size).float() if capture else None
        return TargetOutput(self.table[input_ids[:, -1:] if last_only else input_ids], features)

    def get_input_embeddings(self):
        return torch.nn.Embedding.from_pretrained(torch.eye(self.vocab_size, self.hidden_size, device=self.device))

    def get_output_embeddings(self):
        output = torch.nn.Linear(self.hidden_size, self.vocab_size, bias=False, device=self.device)
        output.weight.data = torch.nn.functional.pad(self.table.T, (0, self.hidden_size - self.vocab_size))
        return output


class MarkovBlock(Markov):
    """Drafts several tokens at once by the powers of its table, from the features of a `Markov`; it has no keys."""

    token_shift, aux_layers, draft_to_target, block_length, kv_shape = 1, (0,), None, 4, KVShape(0, 1, 1)

    def __init__(self, **others):
        super().__init__(**others)
        self.draft_vocab_size, law = self.vocab_size, torch.softmax(self.table, dim=-1)
        self.powers = torch.stack([torch.linalg.matrix_power(law, power).log() for power in range(2, 6)])

    def draft_block(self, hidden, count):
        token = hidden.argmax(-1).clamp(max=self.vocab_size - 1)
        return self.powers[:count, token].transpose(0, 1).contiguous()


class MarkovMasked(Markov):
    """Drafts several tokens at once by the powers of its table, one for each mask after the last token of the text."""

    token_shift, aux_layers, draft_to_target, mask_features, masked_id = 0, (), None, None, None

    def __init__(self, **others):
        super().__init__(**others)
        # a token of its own for masks, which is not one of the text's
        self.draft_vocab_size = self.mask_token_id = self.vocab_size
        law = torch.softmax(self.table, dim=-1)
        self.powers = torch.stack([torch.linalg.matrix_power(law, power).log() for power in range(1, 12)])

    def forward(self, input_ids, hidden, positions, attend, *, from_target):
        is_mask = input_ids == self.mask_token_id
        row = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = torch.where(is_mask, 0, row).cummax(1).values
        token = input_ids.gather(1, last).clamp(max=self.vocab_size - 1)
        return DraftOutput(self.powers[(row - last).clamp(max=10), token], hidden)


def random_llama(
    *, hidden_size=32, num_layers=2, vocab_size=61, max_length=256, std=0.3, seed=0, device="cpu"
) -> Decoder:
    torch.manual_seed(seed)
    config = DecoderConfig.from_dict({
        "model_type": "llama", "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 48,
        "num_hidden_layers": num_layers, "num_attention_heads": hidden_size // 16, "num_key_value_heads": 1,
        "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": max_length,
    })  # fmt: skip
    model = Decoder(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=std)
    return model.to(device)  # so that it is the same model everywhere


def write_decoder(model: Decoder, folder: Path, **settings) -> Path:
    """The folder of a `random_llama`."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    sizes = {name: getattr(model.config, name) for name in names}
    return heads.save_folder(model, {"model_type": "llama"} | sizes | settings, folder)


def random_head(target: Decoder, *, aux_layers=heads.STREAMS, seed=0) -> EagleHead:
    """An EAGLE-3 head, bound to a `random_llama` that has these streams; it guesses nothing right but by chance."""
    sizes = {"draft_vocab_size": heads.DRAFT_VOCAB, "max_position_embeddings": target.max_length}
    head = EagleHead(EagleConfig.from_dict(heads.WIDTHS | sizes))
    head.use_aux_layers(aux_layers)
    head.load_state_dict(heads.eagle3_tensors(seed=seed))
    return head.to(target.device).eval().requires_grad_(False).bind(target)


def random_eagle1_head(target: Decoder, *, seed=0) -> Eagle1Head:
    """An EAGLE-1 head with all the biases there are, likewise."""
    options = {"max_position_embeddings": target.max_length, "qkv_bias": True}
    head = Eagle1Head(Eagle1Config.from_dict(heads.WIDTHS | options))
    head.load_state_dict(heads.eagle1_tensors(qkv_bias=True, embedding=False, seed=seed))
    return head.to(target.device).eval().requires_grad_(False).bind(target)


def random_modules(target: Decoder, num_modules: int, *, seed=0) -> NextTokenModules:
    """Next-token modules, likewise."""
    sizes = {"max_position_embeddings": target.max_length, "num_nextn_predict_layers": num_modules}
    modules = NextTokenModules(NextTokenConfig.from_dict(heads.WIDTHS | {"model_type": "mimo"} | sizes))
    tensors = heads.module_tensors(num_modules, seed=seed)
    modules.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return modules.to(target.device).eval().requires_grad_(False).bind(target)


def draft_of_markov(method: str, target: Markov, *, seed=0):
    """Hydra heads, a DFlash draft or (eagle) a P-EAGLE head of random weights, bound to a `Markov`, whose last token is
    the mask."""
    sizes = {"vocab_size": target.vocab_size, "hidden_size": 16, "max_position_embeddings": target.max_length}
    if method == "hydra":
        draft = HydraHeads(HydraConfig(vocab_size=target.vocab_size, hidden_size=16, num_heads=4, num_layers=1,
                                       hidden_state_offset=0), None)  # fmt: skip
    elif method == "dflash":
        own = {"model_type": "qwen3", "block_size": 4, "mask_token_id": target.vocab_size - 1, "target_layer_ids": [0]}
        draft = DFlashDraft(DFlashConfig.from_dict(heads.WIDTHS | sizes | own), feature_size=16)
    else:
        own = {"mask_token_id": target.vocab_size - 1, "use_aux_hidden_state": False, "num_hidden_layers": 2}
        draft = ParallelEagleHead(ParallelEagleConfig.from_dict(heads.WIDTHS | sizes | own))
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return draft.to(target.device).eval().requires_grad_(False).bind(target)


def plain_logits(engine, tokens: list[int]) -> torch.Tensor:
    """Logits [L, V] of one causal pass, without pool or tree."""

    with torch.inference_mode():
        ids = torch.tensor([tokens], device=engine.device)
        positions = torch.arange(len(tokens), device=engine.device)[None]
        return engine.target.forward(ids, positions, causal_attend).logits[0].float()


class LetterTokenizer(ByteTokenizer):
    """Every id below 61 is a letter, some are two."""

    def encode(self, text):
        return [ord(letter) - 64 for letter in text]

    def decode(self, token_ids):
        return "".join(chr(64 + token) * (2 if token % 5 == 0 else 1) for token in token_ids)

    def detokenizer(self, context=()):
        decode = self.decode

        class Detokenizer:
            def push(self, token_ids):
                return decode(token_ids)

            def finish(self):
                return ""

        return Detokenizer()
