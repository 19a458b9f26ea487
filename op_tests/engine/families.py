"""Models of transformers, of every family, rotary scaling, bias and window, written to folders."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 83, "hidden_size": 60, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,  # deliberately neither hidden_size / num_attention_heads nor a power of two
    "max_position_embeddings": 96,
    "initializer_range": 0.15,  # attention far from uniform
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
THETA = {"rope_theta": 3000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | THETA
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24} | THETA
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
QWEN_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
ERNIE_EXPERTS = {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 20, "moe_num_shared_experts": 2}
# of latent attention and experts, small; a head's query and its value have other sizes than its latent
LATENT = {
    "num_key_value_heads": None, "head_dim": 8, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 28, "n_routed_experts": 6,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
GROUPS = {"n_group": 3, "topk_group": 2}
# what Kimi-K2's config.json has, in the words of the transformers of its time, and what these mean
OF_KIMI = {"model_type": "kimi_k2", "rope_parameters": None, "rope_theta": 3000.0, "rope_scaling": {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 1.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}}  # fmt: skip
KIMI = LATENT | {
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827,
    "rope_parameters": {"rope_type": "yarn"} | THETA | {
        name: value for name, value in OF_KIMI["rope_scaling"].items() if name != "type"
    },
}  # fmt: skip
LITE = LATENT | {"n_group": 1, "topk_group": 1, "num_key_value_heads": SIZES["num_attention_heads"]}
GLM_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "use_qk_norm": True}
CASES = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama heads of 4": ("Llama", {"head_dim": 4}),
    "llama heads of 10": ("Llama", {"head_dim": 10, "rope_parameters": YARN}),
    "qwen3 heads of 40": ("Qwen3", {"head_dim": 40}),
    "llama one key head": ("Llama", {"num_key_value_heads": 1, "rope_parameters": THETA}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0} | THETA}),
    "llama llama3": ("Llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 40}}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn, not truncated": ("Llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0}}),
    "llama yarn, attention factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 0.7}}),
    "llama yarn, mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama yarn, one ramp": ("Llama", {"rope_parameters": YARN | {"beta_fast": 1.5, "beta_slow": 1.4}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 5}),
    "mistral window, shorter than a path": ("Mistral", {"sliding_window": 2}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("Qwen2", SLIDING | {"max_window_layers": 1}),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3 biases": ("Qwen3", {"attention_bias": True}),
    "qwen3 moe": ("Qwen3Moe", QWEN_EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3 moe, weights that sum to anything": ("Qwen3Moe", QWEN_EXPERTS | {"norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": ("Mixtral", {"num_local_experts": 3, "sliding_window": 5}),
    "gpt oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "rope_parameters": YARN,
        },
    ),
    "ernie": ("Ernie4_5", {}),
    "ernie biases": ("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie moe": ("Ernie4_5_Moe", ERNIE_EXPERTS),
    "ernie moe, every other layer": (
        "Ernie4_5_Moe",
        ERNIE_EXPERTS
        | {
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
        },
    ),
    "qwen3 layer types": ("Qwen3", SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v2 lite": ("DeepseekV2", LATENT | {"q_lora_rank": None, "qk_nope_head_dim": 6, "kv_lora_rank": 20}),
    "deepseek_v2 groups": ("DeepseekV2", LATENT | GROUPS | {
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0, "attention_bias": True, "mlp_bias": True,
    }),
    "deepseek_v2 dense": ("DeepseekV2", LATENT | {"first_k_dense_replace": 9, "rope_parameters": YARN}),
    "deepseek_v3": ("DeepseekV3", LATENT | GROUPS),
    "kimi_k2": ("DeepseekV3", KIMI | {"written": OF_KIMI}),
    "deepseek_v3 yarn, mscale": ("DeepseekV3", LATENT | GROUPS | {
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, "attention_bias": True,
        "norm_topk_prob": False,
    }),
    "glm": ("Glm", {"attention_bias": False, "tie_word_embeddings": True}),
    "glm4": ("Glm4", {}),
    "glm4, a quarter turns": ("Glm4", {"attention_bias": False, "rope_parameters": YARN | {
        "partial_rotary_factor": 0.25,
    }}),
    "glm moe": ("Glm4Moe", GLM_EXPERTS | {"attention_bias": True, "routed_scaling_factor": 2.5}),
    "glm moe lite": ("Glm4MoeLite", LITE),
    "glm moe lite, layers by name": ("Glm4MoeLite", LITE | GROUPS | {
        "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": YARN,
    }),
    "glm moe, groups, a quarter turns": ("Glm4Moe", GLM_EXPERTS | GROUPS | {
        "use_qk_norm": False, "n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 0,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.25},
    }),
    "deepseek_v3 halves": ("DeepseekV3", LATENT | GROUPS | {"rope_interleave": False, "q_lora_rank": None}),
}  # fmt: skip


def write_target(family: str, changes: dict, folder) -> torch.nn.Module:
    """A random model of transformers, which has written itself to `folder`; `written` of the changes: keys of its
    config.json alone."""
    torch.manual_seed(0)
    changes = dict(changes)
    written = changes.pop("written", {})
    if "layer_types" in changes:
        changes["num_hidden_layers"] = len(changes["layer_types"])
    config = getattr(transformers, family + "Config")(**SIZES | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, family + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1 if "correction" in name else 0.5)
    model.save_pretrained(folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | written))
    return model
