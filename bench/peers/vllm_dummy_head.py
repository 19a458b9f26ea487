"""A plug-in of vLLM with which an EAGLE-3 head of dummy weights keeps an LM head of its own.

Without weights to load nothing says that it has one, so vLLM would give it the target's, which is four times as large.
It is copied to a folder of its own before it is used, and imports nothing of this repository.
"""


def register() -> None:
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True
