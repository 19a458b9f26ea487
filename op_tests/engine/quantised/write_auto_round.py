"""Writes the checkpoints of AWQ, GPTQ and blocks of fp8 that the tests read, with auto-round, on a CPU:

    python op_tests/engine/quantised/write_auto_round.py

with torch, transformers 5.24, compressed-tensors 0.20.1 and auto-round 0.16.1. Each folder has the logits for `IDS` in
expected.safetensors: those of auto-round's own class in PyTorch, and of blocks of fp8 those of compressed-tensors.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoRoundConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

IDS = torch.tensor([[7, 3, 60, 11, 0, 25, 9, 44]])
_SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_INT4 = {"scheme": "W4A16", "group_size": 32, "sym": True}
FORMATS = {
    "auto_awq": ("auto_awq", _INT4),
    "auto_gptq": ("auto_gptq", _INT4),
    "fp8_blocks": ("llm_compressor", {"scheme": "FP8_BLOCK"}),
}


@torch.no_grad()
def write_base(folder: Path) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES)).to(torch.float16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    words = models.WordLevel({str(token): token for token in range(64)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="0", pad_token="0").save_pretrained(folder)


@torch.no_grad()
def write(name: str, form: str, options: dict, base: Path, scratch: Path) -> None:
    rounding = AutoRound(str(base), iters=0, device_map="cpu", disable_opt_rtn=True, **options)
    rounding.quantize_and_save(str(scratch / name), format=form)
    (written,) = (scratch / name).rglob("model.safetensors")
    folder = Path(__file__).parent / name
    folder.mkdir(exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(written.parent / file, folder / file)
    path, reads_as = written.parent / "config.json", {"quantization_config": AutoRoundConfig(backend="torch")}
    config = json.loads(path.read_text())
    for group in config["quantization_config"].get("config_groups", {}).values():
        group["input_activations"], reads_as = None, {}  # rows that are not rounded, as in the engine
    if form == "auto_awq":  # which transformers cannot read on a CPU: the numbers are those of auto_gptq
        return
    path.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(written.parent, device_map="cpu", dtype=torch.float16, **reads_as)
    save_file({"logits": model(IDS).logits.float().contiguous()}, folder / "expected.safetensors")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        write_base(Path(scratch) / "base")
        for name, (form, options) in FORMATS.items():
            write(name, form, options, Path(scratch) / "base", Path(scratch))
