"""Trains a pair that is less of a toy: `python -m bench.lab.train_small_pair --output DIR --checkpoint-dir WORK`.

A target of at most 24 million parameters over a BPE vocabulary of 8,192 tokens learns the Python sources of installed
packages (BSD, Apache and PSF licences), and a draft of each kind learns from its hidden states. The pair is not
shipped: the command makes it, from the sources that packages.json lists where the same packages are installed.

    DIR/target      the target, bf16 in files of at most 16 MiB, with its tokenizer.json
    DIR/drafts      a folder for each kind, and README.md, the table of what they bring
    DIR/training.json, DIR/README.md

With --time-budget-s it ends in time with status 75, and the same command goes on; two calls of ten minutes are enough
on a data-centre GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_kernels.engine.models.checkpoint import safetensors
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.loading import load_target
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.runtime.placement import choose_device, device_name, read_device
from eagle_kernels.runtime.values import first_line

from .train_kinds import Texts, add_arguments, train_kinds
from .training.corpus import Corpus, SourceFile
from .training.kind_fitting import steps_within
from .training.packages import LIST, corpus_of, listed, read_list, read_packages, tell_differences
from .training.recipe import Stage, random_windows
from .training.trainer import EXIT_UNFINISHED, Run, TimeBudgetReached, initialise, mixed_precision, write_json
from .training.unrolled import target_loss

MAX_PARAMETERS = 24_000_000
SHARD_BYTES = 16 * 2**20
# from there on the output is the embedding: two would be more than half of the parameters
MOST_UNTIED = 10_000
# special tokens whose text no source has
END, MASK = "<|end of file|>", "<|mask of drafts|>"
TOKENIZER_BYTES = 48 * 2**20  # of text that a vocabulary is learnt from
PROMPT_CHARS, PROMPTS_OF_DOMAIN, DOMAINS = 160, 8, 5


def sizes_of(vocab_size: int, tiny: bool) -> dict[str, Any]:
    """Returns config.json of the target."""
    size, layers, heads = (32, 3, 2) if tiny else (384, 10, 6)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": size,
        "intermediate_size": size * 8 // 3 // 16 * 16, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "head_dim": size // heads, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128 if tiny else 2048,
        "tie_word_embeddings": vocab_size > MOST_UNTIED, "bos_token_id": 0, "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


def make_tokenizer(files: Sequence[SourceFile], vocab_size: int, folder: Path) -> None:
    """Learns a byte-level BPE vocabulary, and writes it; token 0 ends a file, token 1 is the mask of drafts."""
    tokenizers = _tokenizers()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END, MASK], initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator(_some_texts(files), trainer)
    if made.get_vocab_size() != vocab_size:
        rule = f"--vocab-size must be at most {made.get_vocab_size()}, which the text gives"
        raise ValueError(f"{rule}, got {vocab_size}")
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": END, "bos_token": END})


def _some_texts(files: Sequence[SourceFile]) -> Iterator[str]:
    """Yields texts in the order of their hashes, up to a total size."""
    total = 0
    for file in sorted(files, key=lambda file: file.path_hash):
        total += len(file.contents)
        yield file.contents.decode("utf-8")
        if total >= TOKENIZER_BYTES:
            return


def encode_files(folder: Path, files: Sequence[SourceFile]) -> Tensor:
    """Returns the tokens of all files, END after each, [tokens] int32."""
    made, pieces = _tokenizers().Tokenizer.from_file(str(folder / "tokenizer.json")), []
    for first in range(0, len(files), 256):
        texts = [file.contents.decode("utf-8") for file in files[first : first + 256]]
        for encoding in made.encode_batch(texts, add_special_tokens=False):
            pieces.append(torch.tensor([*encoding.ids, 0], dtype=torch.int32, device="cpu"))
    return torch.cat(pieces)


def prompts_by_domain(files: Sequence[SourceFile], folder: Path) -> dict[str, list[list[int]]]:
    """Returns prompts for the packages with most held-out files: text from the middle of each, from a line's start."""
    tokenizer, found = load_tokenizer(folder), {}
    for file in sorted(files, key=lambda file: file.path_hash):
        text = file.contents.decode("utf-8")
        start = text.find("\n", len(text) // 2) + 1
        prompt = text[start : start + PROMPT_CHARS]
        if start > 0 and len(prompt) == PROMPT_CHARS:
            found.setdefault(file.path.partition("/")[0].removesuffix(".py"), []).append(tokenizer.encode(prompt))
    most = sorted(found, key=lambda name: (-len(found[name]), name))[:DOMAINS]
    return {name: found[name][:PROMPTS_OF_DOMAIN] for name in sorted(most)}


def train_target(
    run: Run, config: dict[str, Any], stage: Stage, window: int, stream: Tensor, seed: int, seconds: float | None,
    folder: Path,
) -> tuple[Decoder, Stage]:  # fmt: skip
    """Returns the trained target with the values of bf16, and its stage."""
    target = Decoder(DecoderConfig.from_dict(config))
    initialise(target, config["num_hidden_layers"], seed)
    target.to(run.device)
    count = sum(parameter.numel() for parameter in target.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"--vocab-size must leave at most {MAX_PARAMETERS:,} parameters, got {count:,}")
    pieces = random_windows(stream, stage, window + 1, seed)
    loss = lambda tokens: target_loss(target, tokens)  # noqa: E731
    known = _read(folder / "steps.json").get("steps")
    stage = stage.resized(known, None) if known else steps_within(run, target, pieces, loss, stage, seconds)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "steps.json", {"steps": stage.steps})
    run.fit(stage, target, pieces, loss, stage.batch_size * window)
    return target.bfloat16().float().requires_grad_(False).eval(), stage


@torch.no_grad()
def held_out_loss(target: Decoder, stream: Tensor, window: int, count: int) -> float:
    """Returns the loss in nats a token on windows that are spread evenly over the held-out text."""
    starts = torch.linspace(0, len(stream) - window - 1, count, dtype=torch.float64, device="cpu").long()
    losses = []
    for some in starts.split(16):
        offsets = some[:, None] + torch.arange(window + 1, device="cpu")
        with mixed_precision(target.device):
            losses.append((float(target_loss(target, stream[offsets].long().to(target.device))), len(some)))
    return sum(loss * size for loss, size in losses) / count


def save_in_files(module: torch.nn.Module, config: dict[str, Any], folder: Path, most_bytes: int = SHARD_BYTES) -> None:
    """Writes a model in bf16, in files of at most this size and an index; a tensor is in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        stored = tensor.detach().to(torch.bfloat16).cpu().contiguous()
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + stored.nbytes > most_bytes - 2**16:
            shards.append({})
        shards[-1][name] = stored
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / file_name).write_bytes(safetensors().torch.save(shard, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(each.nbytes for shard in shards for each in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", config)


def train_pair(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Trains what is not there yet; returns the contents of training.json."""
    began, tiny, folder = time.monotonic(), options.tiny, options.output / "target"
    deadline = math.inf if options.time_budget_s is None else began + options.time_budget_s
    packages = read_packages(options.packages)
    corpus = corpus_of(packages)
    difference = tell_differences(packages, read_list())
    _tell(difference or f"the packages are those of {LIST.name}")
    vocab_size = options.vocab_size or (280 if tiny else 8192)
    config = sizes_of(vocab_size, tiny)
    window = options.window or (48 if tiny else 512)
    if window >= config["max_position_embeddings"]:
        rule = f"--window must be below the {config['max_position_embeddings']} positions of the target"
        raise ValueError(f"{rule}, got {window}")
    facts = {"corpus": corpus.sha256, "window": window, "seed": options.seed, "config": config}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    train, held_out = _streams(options, corpus, vocab_size, folder, digest)
    _tell(f"{len(train):,} tokens to learn from, {len(held_out):,} held out")
    record = _read(options.output / "training.json")
    if record.get("digest") != digest:
        stage = Stage("target", 10 if tiny else 20_000, 4 if tiny else 32, 1.5e-3, 0.1, 1.0)
        stage = stage.resized(options.steps_target, None)
        work = options.checkpoint_dir / "target"
        run = Run(device, json.dumps({"digest": digest, "batch_size": stage.batch_size}), work, deadline=deadline)
        seconds = None if tiny else options.seconds_target
        target, stage = train_target(run, config, stage, window, train.to(device), options.seed, seconds, work)
        save_in_files(target, config, folder)
        record = {
            "digest": digest, "device": device_name(device), "torch_version": torch.__version__, "seed": options.seed,
            "corpus_sha256": corpus.sha256, "packages": listed(packages), "differs_from_list": difference,
            "train_tokens": len(train), "held_out_tokens": len(held_out), "vocab_size": vocab_size,
            "parameters": sum(parameter.numel() for parameter in target.parameters()), "steps": stage.steps,
            "batch_size": stage.batch_size, "window": window, "training_seconds": run.training_seconds["target"],
            "final_loss": run.final_losses["target"],
            "held_out_loss": held_out_loss(target, held_out, window, 4 if tiny else 256),
        }  # fmt: skip
        write_json(options.output / "training.json", record)
        del target
    texts = Texts(train, held_out, prompts_by_domain(corpus.held_out, folder), corpus.sha256, mask_token=1)
    options.time_budget_s = None if options.time_budget_s is None else deadline - time.monotonic()
    drafts = argparse.Namespace(**vars(options) | {"checkpoint_dir": options.checkpoint_dir / "drafts"})
    record["drafts"] = train_kinds(load_target(folder, device), folder, texts, options.output / "drafts", drafts)
    write_json(options.output / "training.json", record)
    (options.output / "README.md").write_text(card_of(record), encoding="utf-8")
    return record


def _streams(
    options: argparse.Namespace, corpus: Corpus, vocab_size: int, folder: Path, digest: str
) -> tuple[Tensor, Tensor]:
    """Returns the tokens of both sides, from an earlier call of the same command if there was one."""
    kept = options.checkpoint_dir / f"tokens-{digest}.pt"
    if not (kept.is_file() and (folder / "tokenizer.json").is_file()):
        make_tokenizer(corpus.train, vocab_size, folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save([encode_files(folder, side) for side in (corpus.train, corpus.held_out)], kept)
    train, held_out = torch.load(kept, weights_only=True)
    return train, held_out


def card_of(record: dict[str, Any]) -> str:
    """Returns the card of the pair."""
    names = ", ".join(record["packages"])
    return f"""# A small pair: a Llama of {record["parameters"]:,} parameters and drafts of every kind

Made by `python -m bench.lab.train_small_pair`; it is not shipped. The target learnt {record["train_tokens"]:,} tokens,
of a byte-level BPE vocabulary of {record["vocab_size"]:,}, from installed packages under BSD, Apache and PSF licences,
whose hashes `training.json` has: {names}.

Training took {record["training_seconds"]:.0f} s for {record["steps"]} steps on {record["device"]}; the held-out loss is
{record["held_out_loss"]:.4f} nats a token. What the drafts bring: [drafts](drafts/README.md).
"""


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("train_small_pair needs tokenizers: pip install 'eagle_kernels[models]'") from None
    return tokenizers


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.train_small_pair", description="Train a small pair.")
    add_arguments(parser)
    parser.set_defaults(seconds_each=75.0)  # of each kind, so that all fit into the second call
    add = parser.add_argument
    add("--packages", type=Path, help="folder of installed packages (default: those that this Python imports)")
    add("--vocab-size", type=int, help="tokens of the vocabulary, 8192 to 16384 (default: 8192; tiny: 280)")
    add("--steps-target", type=int, help="steps of the target, at most (default: 20000; tiny: 10)")
    add("--seconds-target", type=float, default=420.0, help="training of the target, about (default: %(default)s)")
    add("--write-list", action="store_true", help=f"only write {LIST.name} for the packages that there are")
    options = parser.parse_args(argv)
    try:
        if options.write_list:
            write_json(LIST, listed(read_packages(options.packages)))
            return 0
        if options.checkpoint_dir is None:
            parser.error("--checkpoint-dir must be given: it keeps what the next call goes on with")
        if options.vocab_size is not None and not options.tiny and not 8192 <= options.vocab_size <= 16384:
            raise ValueError(f"--vocab-size must lie in 8192..16384, got {options.vocab_size}")
        device = choose_device() if options.device == "auto" else read_device("--device", options.device, "auto")
        record = train_pair(options, device)
    except TimeBudgetReached as reached:
        print(f"time budget used up at {reached}; give the same command again to go on", file=sys.stderr)
        return EXIT_UNFINISHED
    except (ValueError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1
    print((options.output / "drafts" / "README.md").read_text(encoding="utf-8") if record else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
