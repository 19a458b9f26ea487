"""Starts one engine and times it: the script that `engine.py` runs in a process of its own.

It is copied to a folder of its own before it runs, and imports nothing of this repository but the files beside it: an
engine's own processes import it again, and the folder of a script comes first where Python looks for packages.

    python engine_child.py ORDER RECORDS

ORDER is a JSON file: the engine's module and arguments, what is to be generated, and the folder in which the caller
writes a file for each record that the engine waits to be seen: `started`, and `done`. Each record becomes a line of
RECORDS at once.

The module (sglang_child.py, vllm_child.py) has PACKAGE, which is imported, PACKAGES as here, and the class Engine:
`Engine(arguments)` starts it, `backend` is that of its attention; `generate(prompts, sampling, length)` returns the
tokens of each text (length: of all, or a list), and `steps()` the verification steps of all requests so far;
`serve(traffic, write)` generates texts that are compared, a record `texts` for each wave; `traced(call)` returns the
events of PyTorch's profiler in a call, of whose kernels STEP_KERNEL runs once a step; `stop()` ends it.
"""

import bisect
import collections
import contextlib
import fcntl
import functools
import importlib
import importlib.metadata
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time

# names of distributions; the first that is installed counts
PACKAGES = {"torch": ("torch",), "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm")}
POLL_S = 0.1
WARM_TOKENS = 24
SMALLEST_TOKEN = 100  # of prompts: smaller ones may be special
# Of a profile: tokens of each text, kernels that are told, letters of a name, and pauses in which a host is at work
PROFILED_TOKENS, MOST_KERNELS, MOST_LETTERS, PAUSE_US = 128, 14, 64, 300.0
LONG = 1.5  # steps that take longer than the middle one by this factor have prompts
GPU_WORK, HOST_WORK = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op", "cuda_runtime", "cuda_driver")


def main(order_file: str, records_file: str) -> None:
    """Runs the order; what cannot be generated becomes a record of kind `failed`, and the next is tried."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    with open(order_file, encoding="utf-8") as file:
        order = json.load(file)
    with open(records_file, "a", encoding="utf-8") as records:

        def write(kind: str, **fields) -> None:
            records.write(json.dumps({"kind": kind} | fields) + "\n")
            records.flush()

        def meet(kind: str, **fields) -> None:
            write(kind, **fields)
            while not os.path.exists(os.path.join(order["seen"], kind)):
                time.sleep(POLL_S)

        engine = start(importlib.import_module(order["module"]), order["engine"], meet)
        if "traffic" in order:
            engine.serve(order["traffic"], write)
        else:
            measure_some = measure_requests if order["requests"] else measure_all
            orders = order, *order["also"]
            for each in orders:
                measure_some(engine, each, write)
            for each in orders if order["profile"] else ():  # last: a profiler slows what comes after it, too
                profile_all(engine, each, write)
        meet("done")
        engine.stop()


def measure_all(engine, order: dict, write) -> None:
    """Times all batch sizes of an order by each sampling."""
    for_each_setting(order, "measured", write, functools.partial(measure, engine, order=order, write=write))


def profile_all(engine, order: dict, write) -> None:
    """Tells where the time of a step goes, of all batch sizes of an order by each sampling."""

    def profiled(batches: list[list[list[int]]], sampling: dict) -> dict:
        with turn(order, write):
            call = functools.partial(generate, engine, batches[0], PROFILED_TOKENS, sampling)
            return profile(engine.traced(call), engine.STEP_KERNEL)

    for_each_setting(order, "profiled", write, profiled)


def for_each_setting(order: dict, kind: str, write, call) -> None:
    """Writes a record of what `call` returns for the prompts of each repeat and a sampling, or of how it failed."""
    source, repeats, given = random.Random(0), range(order["repeats"]), order["prompts"]
    make = lambda: [source.randrange(SMALLEST_TOKEN, order["vocab_size"]) for _ in range(order["prompt_tokens"])]  # noqa: E731
    turns = {}  # by batch size, the prompts of each repeat
    for batch in order["batches"]:
        prompts = itertools.cycle(given or [make() for _ in range(batch)])
        turns[batch] = [list(itertools.islice(prompts, batch)) for _ in repeats]
    for sampling in order["sampling"]:
        for batch in order["batches"]:
            about = {"case": order["case"], "batch": batch} | sampling
            try:
                numbers = call(turns[batch], sampling)
            except Exception as error:
                write("failed", **about, error=f"{type(error).__name__}: {error}"[:500])
            else:
                write(kind, **about, **numbers)


def measure_requests(engine, order: dict, write) -> None:
    """Times requests of different lengths that are sent at once, by the first sampling; those that must wait do."""
    source, running, sampling = random.Random(0), max(order["batches"]), order["sampling"][0]
    make = lambda length: [source.randrange(SMALLEST_TOKEN, order["vocab_size"]) for _ in range(length)]  # noqa: E731
    prompts = [make(length) for length, _ in order["requests"]]
    lengths = [length for _, length in order["requests"]]
    about = {"case": order["case"], "batch": running} | sampling
    with turn(order, write):
        generate(engine, [make(len(prompt)) for prompt in prompts[:running]], WARM_TOKENS, sampling)
        before, begin_s = engine.steps(), time.perf_counter()
        tokens = [len(text) for text in engine.generate(prompts, sampling, lengths)]
        seconds = time.perf_counter() - begin_s
    if tokens != lengths:
        write("failed", **about, error="some texts are not as long as was asked for")
        return
    # the first token of a text comes with its prompt
    accept = (sum(tokens) - len(tokens)) / (engine.steps() - before) if order["is_speculative"] else 1.0
    write(
        "measured", **about, ms_per_step=None, tokens_per_s=round(sum(tokens) / seconds, 2),
        accept_length=round(accept, 4), requests_per_s=round(len(tokens) / seconds, 4), raw=[round(seconds, 3)],
    )  # fmt: skip


def end_with(parent: int) -> None:
    """Kills this process group, the engine's processes too, when the process that started it is no longer there."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def turn(order: dict, write):
    """Waits until none of the engines that share a file generates, and lets one of them go first afterwards.

    Tells when it waits and when it goes on.
    """
    if order["turns"] is None:
        yield
        return
    with open(order["turns"], "a", encoding="utf-8") as file:
        write("waits")
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        write("goes")
        yield
    time.sleep(POLL_S)


def start(module, arguments: dict, meet):
    """Starts the engine, tells how long that took and what it runs with, and waits until that was seen."""
    begin_s = time.perf_counter()
    package = importlib.import_module(module.PACKAGE)
    imported_s = time.perf_counter()
    engine = module.Engine(arguments)
    times = {"import_s": round(imported_s - begin_s, 1), "start_s": round(time.perf_counter() - imported_s, 1)}
    meet("started", **times, attention_backend=engine.backend, versions=versions(module, package))
    return engine


def versions(module, package) -> dict[str, str]:
    """Returns the versions of the packages that are there."""
    found = {module.PACKAGE: getattr(package, "__version__", None)}
    for name, distributions in (module.PACKAGES | PACKAGES).items():
        for distribution in distributions:
            try:
                found.setdefault(name, importlib.metadata.version(distribution))
            except importlib.metadata.PackageNotFoundError:
                continue
    return {name: version for name, version in found.items() if version is not None}


def measure(engine, batches: list[list[list[int]]], sampling: dict, order: dict, write) -> dict:
    """Times steps as the slope between two lengths of generation: what both cost, the prompts' part too, cancels.

    A shorter length of 0 is not generated: the slope to a length of 1 is the time to the first token.

    batches: the prompts of each repeat.

    raw: seconds of the short and of the long generation, and the steps and tokens of a request between them, for each
    repeat. The time of a step and the speed are medians over repeats, or of all together where prompts differ, as the
    accepted length is.
    """
    short, long = order["lengths"]
    slopes, speeds, raw = [], [], []
    for prompts in batches:
        with turn(order, write):
            generate(engine, prompts, WARM_TOKENS, sampling)  # each time: it may have waited for others
            short_s, short_tokens, short_steps = generate(engine, prompts, short, sampling) if short else (0.0, 0, 0)
            long_s, long_tokens, long_steps = generate(engine, prompts, long, sampling)
        seconds, tokens = long_s - short_s, long_tokens - short_tokens
        if seconds <= 0:
            raise RuntimeError(f"{long} tokens took {long_s:.4f} s and {short} took {short_s:.4f}: nothing was timed")
        steps = long_steps - short_steps if order["is_speculative"] and short else tokens
        slopes.append(1e3 * seconds / steps)
        speeds.append(len(prompts) * tokens / seconds)
        raw.append([round(short_s, 4), round(long_s, 4), round(steps, 2), round(tokens, 2)])
    mean, mean_speed = statistics.median, statistics.median
    if order["prompts"]:
        mean, mean_speed = statistics.mean, statistics.harmonic_mean
    return {
        "ms_per_step": round(mean(slopes), 4),
        "tokens_per_s": round(mean_speed(speeds), 2),
        "accept_length": round(sum(row[3] for row in raw) / sum(row[2] for row in raw), 4),
        "raw": raw,
    }


def profile(events: list[dict], step_kernel: str) -> dict:
    """Returns where the time of a step goes, from a trace's events. Long steps, with prompts, are left out, and so is
    the last third of the others, in which some texts have ended.

    gpu_ms: in which the GPU works. host_ms: in which the thread that calls most does. kernels: name, times in a step,
    and milliseconds of all of them.
    """
    marks = sorted(each["ts"] for each in events if each.get("cat") == "kernel" and step_kernel in each["name"])
    times_us = [end - begin for begin, end in itertools.pairwise(marks)]
    if not times_us:
        raise RuntimeError(f"the trace holds {len(events)} events, and no two calls of {step_kernel}")
    longest_us = LONG * statistics.median(times_us)
    kept = [place for place, us in enumerate(times_us) if us <= longest_us]
    kept = kept[: -(len(kept) // 3) or None]
    steps, is_kept = len(kept), set(kept)
    inside = [each for each in events if "dur" in each and bisect.bisect(marks, each["ts"]) - 1 in is_kept]
    work = [each for each in inside if each.get("cat") in GPU_WORK]
    threads = collections.defaultdict(list)
    for each in inside:
        if each.get("cat") in HOST_WORK:
            threads[each["tid"]].append(each)
    host = max(threads.values(), key=len, default=[])
    counts, totals_us = collections.Counter(), collections.Counter()
    for each in work:
        counts[each["name"][:MOST_LETTERS]] += 1
        totals_us[each["name"][:MOST_LETTERS]] += each["dur"]
    return {
        "steps": steps,
        "step_ms": round(sum(times_us[place] for place in kept) / steps / 1e3, 4),
        "gpu_ms": round(covered_us(work, 0.0) / steps / 1e3, 4),
        "host_ms": round(covered_us(host, PAUSE_US) / steps / 1e3, 4),
        "launches": round(sum("Launch" in each["name"] for each in host) / steps, 1),
        "kernels": [
            [name, round(counts[name] / steps, 2), round(us / steps / 1e3, 4)]
            for name, us in totals_us.most_common(MOST_KERNELS)
        ],
    }


def covered_us(events: list[dict], pause_us: float) -> float:
    """Returns how long any of the events lasts, pauses between them of at most so long included."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((each["ts"], each["ts"] + each["dur"]) for each in events):
        begin = until if begin - until <= pause_us else begin
        total += max(0.0, end - begin)
        until = max(until, end)
    return total


def generate(engine, prompts: list[list[int]], num_tokens: int, sampling: dict) -> tuple[float, float, float]:
    """Returns the seconds, and the mean tokens and verification steps of a request."""
    before, begin_s = engine.steps(), time.perf_counter()
    texts = engine.generate(prompts, sampling, num_tokens)
    seconds = time.perf_counter() - begin_s
    return seconds, statistics.mean(map(len, texts)), (engine.steps() - before) / len(prompts)


if __name__ == "__main__":
    main(*sys.argv[1:])
