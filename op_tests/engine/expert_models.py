"""Tiny random models with experts, of four families, as transformers makes and saves them.

    python -m op_tests.engine.expert_models FOLDER --family "gpt oss"
    python -m eagle_kernels generate "a prompt" --target FOLDER --draft FOLDER --compare

writes one whose tokens are bytes, and compares its text with and without drafts, which it makes itself.
"""

import argparse
import json
from pathlib import Path

from op_tests.engine.families import CASES, write_target

FAMILIES = ("qwen3 moe", "mixtral", "gpt oss", "ernie moe")
# a vocabulary of bytes, and sizes that tiles and graphs of GPUs take
SERVED = {
    "vocab_size": 257, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 2048,
}  # fmt: skip
OF_FAMILY = {
    "qwen3 moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "mixtral": {"num_local_experts": 8}, "gpt oss": {"num_local_experts": 32, "num_experts_per_tok": 4},
    "ernie moe": {"moe_num_experts": 32, "moe_k": 4, "moe_intermediate_size": 128},
}  # fmt: skip


def write(folder: Path, family: str) -> None:
    """Writes a model of bytes, with a tokenizer of its own."""
    name, changes = CASES[family]
    write_target(name, changes | SERVED | OF_FAMILY[family], folder)
    written = {"tokenizer_class": "ByteTokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a tiny random model with experts.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default=FAMILIES[0], choices=FAMILIES)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.family)


if __name__ == "__main__":
    main()
