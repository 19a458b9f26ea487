"""Tiny random models with experts, of seven families, as transformers makes and saves them.

    python -m op_tests.engine.expert_models FOLDER --family "gpt oss"
    python -m eagle_kernels generate "a prompt" --target FOLDER --draft FOLDER --compare

writes one whose tokens are bytes, and compares its text with and without drafts. These it makes itself, or its
next-token modules do: `--family "glm moe" --modules 1`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from op_tests.engine.deepseek import write_with_modules
from op_tests.engine.ernie import write_with_module
from op_tests.engine.families import CASES, write_target

WITH_MODULES = ("deepseek_v3", "glm moe", "ernie moe")  # of which ERNIE has one
FAMILIES = ("qwen3 moe", "mixtral", "gpt oss", "deepseek_v2", *WITH_MODULES)
# a vocabulary of bytes, and sizes that tiles and graphs of GPUs take
SERVED = {
    "vocab_size": 257, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 2048,
}  # fmt: skip
OF_FAMILY = {
    "qwen3 moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "mixtral": {"num_local_experts": 8}, "gpt oss": {"num_local_experts": 32, "num_experts_per_tok": 4},
    "ernie moe": {"moe_num_experts": 32, "moe_k": 4, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "num_key_value_heads": 8,
        "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "head_dim": 16,
        "v_head_dim": 32, "bos_token_id": 0,
    },
    "glm moe": {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
}  # fmt: skip
OF_FAMILY["deepseek_v2"] = OF_FAMILY["deepseek_v3"]


def write(folder: Path, family: str, num_modules: int = 0) -> None:
    """Writes a model of bytes, with a tokenizer of its own; num_modules: of families in `WITH_MODULES`."""
    name, changes = CASES[family]
    changes = changes | SERVED | OF_FAMILY[family]
    if num_modules and family == "ernie moe":
        write_with_module(folder, **changes)
    elif num_modules:
        write_with_modules(folder, num_modules, name, **changes)
    else:
        write_target(name, changes, folder)
    written = {"tokenizer_class": "ByteTokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes a tiny random model with experts.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default=FAMILIES[0], choices=FAMILIES)
    parser.add_argument("--modules", type=int, default=0, help=f"next-token modules, of {', '.join(WITH_MODULES)}")
    options = parser.parse_args(arguments)
    if options.modules and options.family not in WITH_MODULES:
        parser.error(f"--modules: of {', '.join(WITH_MODULES)} alone")
    if options.modules > 1 and options.family == "ernie moe":
        parser.error("--modules: ERNIE's is one")
    write(options.folder, options.family, options.modules)


if __name__ == "__main__":
    main()
