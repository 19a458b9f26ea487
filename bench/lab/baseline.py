"""Plain decoding of all prompts of a set, several times: `python -m bench.lab.baseline --model gpt2 --prompts p.json
--output baseline.jsonl`. A line of the output is a prompt in a run; lines of one `config_hash` are one experiment."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_kernels.runtime.values import first_line
from eagle_kernels.tools.measure import GenerationResult

from .autoregressive import AutoregressiveDecoder
from .config import BenchmarkConfig
from .loader import DTYPES, load_model
from .log import EventLog
from .prompts import Prompt, PromptDataset
from .wrapper import ModelWrapper

_WARM_TOKENS = 4


def measure(
    decoder: AutoregressiveDecoder, prompts: Sequence[Prompt], config: BenchmarkConfig, num_runs: int, log: EventLog
) -> list[GenerationResult]:
    """Every prompt once in each run, greedily or with the configuration's seed; a line of the log for each."""
    encode, results = decoder.model.tokenizer.encode, []
    decoder.generate(encode(prompts[0].raw_text), _WARM_TOKENS, config.temperature, config.seed)  # compiles
    for run in range(num_runs):
        for prompt in prompts:
            result = decoder.generate(
                encode(prompt.raw_text), config.max_new_tokens, config.temperature, config.seed
            )  # fmt: skip
            about = {"prompt_id": prompt.prompt_id, "run": run, "config": config.to_dict()}
            log.write("baseline", **about, result=result.to_dict())
            results.append(result)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.baseline", description="Plain decoding of prompts.")
    parser.add_argument("--model", required=True, help="folder, model of the Hugging Face hub, or embedded/target")
    parser.add_argument("--prompts", required=True, help="file of python -m bench.lab.prompts")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-runs", type=int, default=3, help="of every prompt (default: 3)")
    parser.add_argument("--dtype", default="float16", help=f"{', '.join(DTYPES)} (default: float16)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: the GPU where there is one")
    options = parser.parse_args(arguments)
    try:
        if options.num_runs < 1:
            raise ValueError(f"--num-runs must be at least 1, got {options.num_runs}")
        dataset = PromptDataset.load(options.prompts)
        decoder = AutoregressiveDecoder(ModelWrapper(*load_model(options.model, options.dtype, options.device)))
        print(f"{'domain':<16} {'results':>8} {'tok/s':>8} {'first token, ms':>16} {'p50, ms':>8} {'p95, ms':>8}")
        with EventLog(options.output, model=options.model, dtype=options.dtype) as log:
            for domain in dataset.domains:
                config = BenchmarkConfig(
                    options.model, None, options.temperature, options.max_new_tokens, domain, options.seed
                )
                results = measure(decoder, dataset.get_by_domain(domain), config, options.num_runs, log)
                print(_row(domain, results), flush=True)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


def _row(domain: str, results: Sequence[GenerationResult]) -> str:
    speed = statistics.median(result.tokens_per_second for result in results)
    first_ms, p50_ms, p95_ms = (
        1e3 * statistics.median(getattr(result, name) for result in results)
        for name in ("time_to_first_token", "latency_p50", "latency_p95")
    )
    return f"{domain:<16} {len(results):>8} {speed:>8.1f} {first_ms:>16.1f} {p50_ms:>8.2f} {p95_ms:>8.2f}"


if __name__ == "__main__":
    sys.exit(main())
