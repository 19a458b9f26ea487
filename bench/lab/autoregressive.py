"""The baseline of every comparison: the engine's own plain decoding, a token a step."""

from typing import Any

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.requests.inputs import Prompts
from eagle_kernels.tools.measure import GenerationResult

from .wrapper import ModelWrapper


class AutoregressiveDecoder:
    """`generate(speculative=False)` of one prompt at a time, with the time of the first token and of each other one.

    model   a `ModelWrapper`, or any `TargetModel` or model of transformers, which is wrapped
    config  fields of `EAGLEConfig`
    """

    def __init__(self, model: Any, **config: Any):
        self.model = model if isinstance(model, ModelWrapper) else ModelWrapper(model)
        ends = {"eos_token_ids": self.model.eos_token_ids, "max_length": self.model.max_length}
        # a prompt is read each time, also one that was read before
        settings = EAGLEConfig(**{"method": "naive", "max_batch": 1, "share_prefixes": False} | ends | config)
        self.engine = EAGLEInference(None, self.model.target, settings)

    def generate(
        self, prompt_ids: Prompts, max_new_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> GenerationResult:
        """prompt_ids [S] or [1, S]; temperature 0: greedy."""
        options = {"seeds": seed, "speculative": False, "temperature": temperature}
        stream = self.engine.stream(prompt_ids, max_new_tokens, **options)
        return GenerationResult.from_stream(stream)

    def generate_text(self, prompt: str, max_new_tokens: int, temperature: float = 1.0, seed: int | None = None) -> str:
        """The prompt and what follows it, without an end token."""
        prompt_ids, decode = self.model.tokenizer.encode(prompt), self.model.tokenizer.decode
        ids = self.generate(prompt_ids, max_new_tokens, temperature, seed).generated_ids
        ids = ids[:-1] if ids[-1] in self.model.eos_token_ids else ids
        # together: the text of a first token may depend on what is before it
        return prompt + decode(prompt_ids + ids)[len(decode(prompt_ids)) :]
