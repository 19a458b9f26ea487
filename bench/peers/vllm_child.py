"""vLLM's engine, and a plug-in, for engine_child.py, which says what each method is for; copied beside it."""

import importlib

PACKAGE = "vllm"
PACKAGES = {"vllm": ("vllm",)}
DRAFTS = "vllm:spec_decode_num_drafts"  # vLLM's counter of steps with drafts, of all requests


class Engine:
    """See engine_child.py."""

    def __init__(self, arguments: dict):
        self._vllm = importlib.import_module(PACKAGE)
        self._engine = self._vllm.LLM(**arguments)
        backend = self._engine.llm_engine.vllm_config.attention_config.backend
        self.backend = getattr(backend, "name", backend)

    def generate(self, prompts: list[list[int]], sampling: dict, length: int | list[int]) -> list[list[int]]:
        lengths = length if isinstance(length, list) else [length] * len(prompts)
        more = sampling | {"ignore_eos": True, "detokenize": False}
        parameters = [self._vllm.SamplingParams(max_tokens=each, **more) for each in lengths]
        outputs = self._engine.generate([{"prompt_token_ids": each} for each in prompts], parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def steps(self) -> float:
        return sum(metric.value for metric in self._engine.get_metrics() if metric.name == DRAFTS)

    def serve(self, traffic: dict, write) -> None:
        """Generates greedy texts, all `requests` together, and some `alone`: indices into them."""
        requests, alone = traffic["requests"], traffic["alone"]
        write("texts", wave="together", texts=self._texts(requests, range(len(requests))))
        write("texts", wave="alone", texts=[text for index in alone for text in self._texts(requests, [index])])

    def _texts(self, requests: list[dict], batch) -> list[dict]:
        wanted, before = [requests[index] for index in batch], self.steps()
        lengths = [request["max_new_tokens"] for request in wanted]
        texts = self.generate([request["prompt"] for request in wanted], {"temperature": 0.0}, lengths)
        # vLLM counts the steps of all requests together
        about = {"steps": (self.steps() - before) / len(batch), "is_cut": False, "is_greedy": True}
        return [{"index": index, "tokens": tokens} | about for index, tokens in zip(batch, texts)]

    def stop(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()


def register() -> None:
    """Leaves an EAGLE-3 head its own LM head, as a plug-in of vLLM: with dummy weights nothing says that it has one, so
    vLLM would give it the target's, which is four times as large."""
    importlib.import_module("vllm.model_executor.models.llama_eagle3").Eagle3LlamaForCausalLM.has_own_lm_head = True
