"""vLLM's engine, and a plug-in, for engine_child.py, which says what each method is for; copied beside it."""

import gzip
import importlib
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

PACKAGE = "vllm"
PACKAGES = {"vllm": ("vllm",)}
# vLLM's counters, of all requests: steps with drafts, accepted drafts, preemptions, tokens that were found in a cache
COUNTERS = {
    "steps": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preempted": "vllm:num_preemptions", "cached": "vllm:prefix_cache_hits",
    "lost": "vllm:kv_cache_usage_perc",  # where no request is left
}  # fmt: skip
READY_TOKENS = 8  # of a request, before the one that waits for it joins
GREEDY = {"temperature": 0.0}


class Engine:
    """See engine_child.py."""

    STEP_KERNEL = "_gather_block_tables_kernel"

    def __init__(self, arguments: dict):
        self._traces = Path(arguments.get("profiler_config", {}).get("torch_profiler_dir", "."))
        self._vllm = importlib.import_module(PACKAGE)
        self._engine = self._vllm.LLM(**arguments)
        backend = self._engine.llm_engine.vllm_config.attention_config.backend
        self.backend = getattr(backend, "name", backend)

    def generate(self, prompts: list[list[int]], sampling: dict, length: int | list[int]) -> list[list[int]]:
        lengths = length if isinstance(length, list) else [length] * len(prompts)
        return self._generate(prompts, [self._parameters(sampling, each) for each in lengths])

    def _generate(self, prompts: list[list[int]], parameters: list) -> list[list[int]]:
        outputs = self._engine.generate([{"prompt_token_ids": each} for each in prompts], parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _parameters(self, sampling: dict, length: int):
        if "logit_bias" in sampling:  # JSON has no keys that are numbers
            sampling = sampling | {"logit_bias": {int(token): bias for token, bias in sampling["logit_bias"].items()}}
        return self._vllm.SamplingParams(**sampling, max_tokens=length, ignore_eos=True, detokenize=False)

    def steps(self) -> float:
        return self.counted()["steps"]

    def traced(self, call: Callable[[], object]) -> list[dict]:
        shutil.rmtree(self._traces, ignore_errors=True)
        self._engine.start_profile()
        try:
            call()
        finally:
            self._engine.stop_profile()
        files = sorted(self._traces.glob("**/*.json.gz"), key=lambda file: file.stat().st_size)
        if not files:
            raise RuntimeError(f"vLLM's profiler left no trace in {self._traces}")
        with gzip.open(files[-1], "rt", encoding="utf-8") as file:  # the worker's is the largest
            return json.load(file)["traceEvents"]

    def counted(self) -> dict[str, float]:
        """Returns the value of each counter so far."""
        found = self._engine.get_metrics()
        return {
            name: sum(metric.value for metric in found if metric.name == counter) for name, counter in COUNTERS.items()
        }

    def serve(self, traffic: dict, write) -> None:
        """Generates texts of `requests`, a record `texts` for each wave that there is, and one of all counters.

        `together`, `alone`, `samples`: indices into them; `joining`: as `sglang_traffic.serve` takes it.
        """
        requests = traffic["requests"]
        if "together" in traffic:
            write("texts", wave="together", texts=self._texts(requests, traffic["together"]))
        if "soak_s" in traffic:
            found = self._soak(requests, traffic["soak_s"], traffic["at_once"])
            write("texts", wave="soak", texts=found)
        if "alone" in traffic:
            found = [text for index in traffic["alone"] for text in self._texts(requests, [index])]
            write("texts", wave="alone", texts=found)
        if "joining" in traffic:
            found = self._join(traffic["joining"], requests, traffic["sampling"])
            write("texts", wave="joining", texts=found)
        if "samples" in traffic:
            write("texts", wave="samples", texts=self._texts(requests, traffic["samples"]))
        self._texts(requests, [0])  # vLLM counts blocks in its steps, of which an aborted request has none
        write("counted", **self.counted())

    def _texts(self, requests: list[dict], batch: list[int]) -> list[dict]:
        wanted, before = [requests[index] for index in batch], self.steps()
        parameters = [self._parameters(each.get("sampling", GREEDY), each["max_new_tokens"]) for each in wanted]
        texts = self._generate([each["prompt"] for each in wanted], parameters)
        steps = (self.steps() - before) / len(batch)  # vLLM counts those of all requests together
        return [
            {"index": index, "tokens": tokens, "steps": steps} | _about(requests[index].get("sampling", GREEDY))
            for index, tokens in zip(batch, texts, strict=True)
        ]

    def _join(self, joining: list[dict], requests: list[dict], sampling: dict) -> list[dict]:
        """Runs requests that start while others run, and aborts some of them.

        A greedy text that has ended begins once more, from its middle on: right after a step, where a cache of prefixes
        holds what was just written.
        """
        engine, waiting, ready = self._engine.llm_engine, dict(enumerate(joining)), {None}
        texts, running = [], {}  # by name: the place in the wave, its text, and the tokens that it began with

        def add(place: int, begin: list[int]) -> str:
            wanted = requests[joining[place]["index"]]
            chosen, name = sampling if joining[place]["is_sampled"] else GREEDY, f"joining-{len(texts)}"
            texts.append({"index": joining[place]["index"], "tokens": begin, "steps": 0} | _about(chosen))
            running[name] = place, texts[-1], begin
            parameters = self._parameters(chosen, wanted["max_new_tokens"] - len(begin))
            engine.add_request(name, {"prompt_token_ids": wanted["prompt"] + begin}, parameters)
            return name

        def abort(name: str) -> None:
            place, text, _ = running[name]
            text["is_cut"] = True
            ready.add(place)
            engine.abort_request([name])

        while waiting or engine.has_unfinished_requests():
            for place in [place for place, new in waiting.items() if new["waits_for"] in ready]:
                name = add(place, [])
                if waiting.pop(place)["abort_at"] == 0:
                    abort(name)
            for output in engine.step() if engine.has_unfinished_requests() else ():
                place, text, begin = running[output.request_id]
                text["tokens"] = begin + list(output.outputs[0].token_ids)
                number, abort_at = len(text["tokens"]), joining[place]["abort_at"]
                if output.finished or number >= READY_TOKENS:
                    ready.add(place)
                if output.finished and text["is_fixed"] and not begin and number > 1:
                    add(place, text["tokens"][: number // 2])
                elif not output.finished and abort_at and not begin and number >= abort_at:
                    abort(output.request_id)
        return texts

    def _soak(self, requests: list[dict], seconds: float, at_once: int) -> list[dict]:
        """Runs random ones of the requests, of random lengths, and aborts some; most begin like one before."""
        engine, coin, until_s = self._engine.llm_engine, random.Random(1), time.monotonic() + seconds
        texts, running = [], {}
        while running or time.monotonic() < until_s:
            while time.monotonic() < until_s and len(running) < at_once and coin.random() < 0.7:
                index, name = coin.randrange(len(requests)), f"soak-{len(texts)}"
                length = coin.randint(1, requests[index]["max_new_tokens"])
                text = {"index": index, "tokens": [], "steps": 0, "max_new_tokens": length}
                texts.append(text | _about(GREEDY))
                running[name] = texts[-1]
                prompt = {"prompt_token_ids": requests[index]["prompt"]}
                engine.add_request(name, prompt, self._parameters(GREEDY, length))
            for output in engine.step() if running else ():
                if output.request_id not in running:  # it was aborted
                    continue
                running[output.request_id]["tokens"] = list(output.outputs[0].token_ids)
                if output.finished:
                    del running[output.request_id]
            for name in [name for name in running if coin.random() < 0.002]:
                engine.abort_request([name])
                running.pop(name)["is_cut"] = True
        return texts

    def stop(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()


def _about(sampling: dict) -> dict:
    """Returns what is told of a text, which is fixed if it is greedy or has a seed."""
    return {"is_cut": False, "is_fixed": not sampling["temperature"] or "seed" in sampling}


def register() -> None:
    """Leaves an EAGLE-3 head its own LM head, as a plug-in of vLLM: with dummy weights nothing says that it has one, so
    vLLM would give it the target's, which is four times as large."""
    importlib.import_module("vllm.model_executor.models.llama_eagle3").Eagle3LlamaForCausalLM.has_own_lm_head = True
