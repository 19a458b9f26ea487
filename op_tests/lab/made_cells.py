"""Cells of an experiment that never was: numbers of a plain law, so that a test knows them."""

import json
from pathlib import Path

from bench.lab.config import BenchmarkConfig

GPU = "Some GPU 80GB"
PLAIN_SPEED = 100.0


def cell(pair="embedded", method="chain", K=2, domain="code", batch_size=1, temperature=0.0, **changes) -> dict:
    """Depth d is accepted with rate^d, of another rate for each method and domain; a draft costs 0.1 of a step."""
    config = BenchmarkConfig(pair, K, temperature, 32, domain, 0, method, batch_size)
    rate = {"tree": 0.9, "ngram": 0.5}.get(method, 0.8) - 0.04 * len(domain) % 0.3
    shares = [rate**depth for depth in range(1, (K or 0) + 1)]
    tokens = 1 + sum(shares)
    cost = 1 + 0.1 * (K or 0) * batch_size**0.5
    speedup = tokens / cost
    step_ms = 10.0 * cost
    phases = {"draft": 1.0 * (K or 0), "verify": 7.0, "sample": 1.0, "bookkeeping": 0.5}
    plain = PLAIN_SPEED * batch_size**0.9
    return {
        "time": 1753000000.0, "event": "cell", "cell_hash": f"{config.config_hash()}", "config": config.to_dict(),
        "dtype": "float32", "gpu": GPU, "versions": {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"},
        "commit": "abc1234", "tokens": 256, "tokens_per_second": round(plain * speedup, 4),
        "per_run": [plain * speedup] * 3, "ttft_ms": 12.5,
        "inter_token_ms": [round(step_ms / tokens * (0.9 + 0.002 * q), 4) for q in range(101)],
        "round_ms": {"p50": step_ms, "p95": step_ms, "p99": step_ms}, "mean_accept_length": round(tokens, 4),
        "acceptance_rate": 0.5, "accepted_per_depth": shares, "phase_ms": phases, "step_ms": step_ms + 1.0,
        "peak_memory_mib": 123.0, "speedup": round(speedup, 4), "plain_tokens_per_second": plain, "identical": 1.0,
    } | changes  # fmt: skip


def experiment(pairs=("embedded",), domains=("code", "conversation", "summarization"), methods=("chain", "tree"),
               k=(1, 2, 4), batch_sizes=(1,), temperatures=(0.0,)) -> list[dict]:  # fmt: skip
    """In the order of the command, plain decoding first."""
    return [
        cell(pair, method, count, domain, batch_size, temperature)
        for pair in pairs
        for domain in domains
        for batch_size in batch_sizes
        for temperature in temperatures
        for method, count in [("chain", None), *((method, count) for method in methods for count in k)]
    ]


def many() -> list[dict]:
    """510 cells."""
    return experiment(
        pairs=("embedded", "gpt2_dev", "llama3_self", "tinyllama_llama3", "qwen3_eagle3"),
        methods=("chain", "tree", "ngram", "suffix"), k=(1, 2, 4, 8), temperatures=(0.0, 1.0),
    )  # fmt: skip


def kernels() -> list[dict]:
    """Lines of an op on a machine that reads 3000 and copies 2500 GB/s."""
    sizes = ((1000, 2.0, "tree"), (10**6, 2.0, "tree"), (10**8, 50.0, "attention"))
    about = {"op": "build_tree", "gpu": GPU, "commit": "abc", "versions": {"torch": "2.0"}, "read_gb_per_s": 3000.0}
    return [
        about | {"bytes": size, "gb_per_s": size / us / 1e3, "share_of_copy": size / us / 1e3 / 2500.0,
                 "family": family, "graph_p50_us": us, "cold_p50_us": 2 * us, "case": str(size), "floor_us": us / 2}
        for size, us, family in sizes
    ]  # fmt: skip


def write(path: Path, cells: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in cells), encoding="utf-8")
    return path
