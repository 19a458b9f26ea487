"""Models by name: `python -m bench.lab.loader --model gpt2 --dtype float16 --n-tokens 20` loads one and tries it.

A name is a folder, a model of the Hugging Face hub, which is fetched, or `embedded/target`.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models import tokenizer as tokenizers
from eagle_kernels.engine.models.checkpoint import read_json
from eagle_kernels.engine.models.end_tokens import read_eos_token_ids
from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.models.transformers_target import TransformersTarget
from eagle_kernels.runtime.values import first_line

from .registry import EMBEDDED, ModelPair, get_pair

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
DTYPES = (*TORCH_DTYPES, "int4")
_FILES = ["*.json", "*.safetensors", "*.txt", "tokenizer.model"]


def read_dtype(caller: str, dtype: str) -> str:
    """The long name of one of `DTYPES`."""
    name = _SHORT.get(dtype, dtype)
    if name not in DTYPES:
        raise ValueError(f"{caller}: dtype must be one of {', '.join((*DTYPES, *_SHORT))}, got {dtype!r}")
    return name


def resolve(model_id: str | Path) -> Path:
    """The folder of a model; fetched from the hub where it is not on this machine."""
    if str(model_id).startswith(EMBEDDED):
        folders = dict(zip(("target", "draft"), demo_pair()))
        name = str(model_id).removeprefix(EMBEDDED)
        if name not in folders:
            raise ModelError(f"resolve: model_id must be {EMBEDDED}target or {EMBEDDED}draft, got {model_id!r}")
        return folders[name]
    if Path(model_id).is_dir():
        return Path(model_id)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"resolve: {model_id!r} is no folder, and fetching it needs transformers: "
            "pip install 'eagle_kernels[transformers]'"
        ) from None
    try:
        folder = Path(snapshot_download(str(model_id), allow_patterns=_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(str(model_id), allow_patterns=[*_FILES, "pytorch_model*.bin*"]))
    except Exception as error:  # whatever the hub's HTTP library raises
        raise ModelError(
            f"resolve: {model_id!r} is no folder and could not be fetched from the Hugging Face hub (gated models need "
            f"`hf auth login`): {first_line(error)}"
        ) from None
    return folder


def load_tokenizer(model_id: str | Path) -> Any:
    """With `encode` and `decode`: of bytes where the folder says so, else transformers' own, whose padding is its end
    token where it has none."""
    folder = resolve(model_id)
    if read_json(folder / "config.json", is_optional=True).get("tokenizer_class") == "ByteTokenizer":
        return tokenizers.ByteTokenizer()
    transformers = _transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise ModelError(f"load_tokenizer: {model_id}: transformers finds no tokenizer: {first_line(error)}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    model_id: str | Path,
    dtype: str = "float32",
    device: str | torch.device | None = None,
    compute_dtype: torch.dtype = torch.float16,
) -> tuple[torch.nn.Module, Any]:
    """A causal language model of transformers and its tokenizer.

    dtype          float16, bfloat16, float32 (or fp16, bf16, fp32), or int4: NF4 weights of bitsandbytes, on a GPU
    device         None: the GPU where there is one
    compute_dtype  of int4: what it is computed in
    """
    name, device = read_dtype("load_model", dtype), _device(device)
    if name == "int4":
        _check_int4(device)
    transformers, options = _transformers(), {"dtype": TORCH_DTYPES.get(name)}
    if name == "int4":
        quantized = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype
        )
        options = {"dtype": compute_dtype, "quantization_config": quantized, "device_map": {"": device}}
    folder = resolve(model_id)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"load_model: {model_id}: transformers cannot load it: {first_line(error)}") from None
    model = model.eval().requires_grad_(False)
    return model if name == "int4" else model.to(device), load_tokenizer(folder)


def load_pair(
    pair: str | ModelPair, device: str | torch.device | None = None, dtype: str | None = None, **config: Any
) -> EAGLEInference:
    """An engine of a pair; its calls take other methods and trees, see `config.BenchmarkConfig.stream_options`.

    dtype   of both models; None: what the pair says
    config  fields of `EAGLEConfig`
    """
    pair = get_pair(pair) if isinstance(pair, str) else pair
    pair.check()
    device = _device(device)
    of_draft, of_target = (read_dtype("load_pair", dtype or each) for each in (pair.draft_dtype, pair.target_dtype))
    if of_target == "int4" or (of_draft == "int4" and pair.method != "draft_model"):
        raise ValueError("load_pair: dtype must not be int4 but of a draft that is a language model")
    if of_draft == "int4":
        _check_int4(device)  # before anything is fetched
    if pair.method == "draft_model":
        config.setdefault("method", "draft_model")
    settings = EAGLEConfig(**{"share_prefixes": False} | config)  # prompts are read each time they are measured
    draft, target = resolve(pair.draft_model_id), resolve(pair.target_model_id)
    placed = {"device": device, "dtype": TORCH_DTYPES[of_target]}
    if of_draft != "int4":
        return EAGLEInference.from_pretrained(draft, target, settings, **placed)
    tokenizers.check_same_vocabulary(draft, target)
    model, _ = load_model(draft, "int4", device, TORCH_DTYPES[of_target])
    if settings.eos_token_ids is None:
        settings = replace(settings, eos_token_ids=read_eos_token_ids(target))
    tokenizer = tokenizers.load_tokenizer(target)
    return EAGLEInference(TransformersTarget(model), load_target(target, **placed), settings, tokenizer=tokenizer)


def _check_int4(device: torch.device) -> None:
    missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"load_model: dtype='int4' needs {' and '.join(missing)}, not installed: pip install {' '.join(missing)}"
        )
    if device.type != "cuda":
        raise ValueError(f"load_model: dtype='int4' must be on a GPU, got device {device}")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError("load_model: transformers is missing: pip install 'eagle_kernels[transformers]'") from None
    return transformers


def _device(device: str | torch.device | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Loads a model and lets it write; returns the exit status."""
    from .autoregressive import AutoregressiveDecoder
    from .wrapper import ModelWrapper

    parser = argparse.ArgumentParser(prog="python -m bench.lab.loader", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder, model of the Hugging Face hub, or embedded/target")
    parser.add_argument("--dtype", choices=(*DTYPES, *_SHORT), default="float16")
    parser.add_argument("--n-tokens", type=int, default=10, help="to generate, greedily (default: 10)")
    parser.add_argument("--prompt", default="The quick brown fox")
    parser.add_argument("--device", help="default: the GPU where there is one")
    options = parser.parse_args(arguments)
    try:
        wrapper = ModelWrapper(*load_model(options.model, options.dtype, options.device))
        print(f"{options.model} as {options.dtype} on {wrapper.device}")
        print(f"  parameters  {wrapper.param_count / 1e6:.1f} M")
        print(f"  memory      {wrapper.memory_footprint_mb:.0f} MB")
        text = AutoregressiveDecoder(wrapper).generate_text(options.prompt, options.n_tokens, temperature=0.0)
        print(f"  {options.n_tokens} tokens: {text!r}")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
