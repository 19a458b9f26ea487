"""How fast a step is, end to end: `python -m bench.run --app generation [--shape small] [--only plain tree ...]`.

A target of the shape of Llama-3.1-8B and an EAGLE-3 head, random weights in bf16, prompts of 512 tokens, simulated
acceptance where drafts are timed. Prints a table and writes JSON lines to `results/<gpu>/generation.jsonl`.

    plain          a step of plain decoding, beside its floor (the weights at the bandwidth of a read) and a bare loop
                   of the same forward pass and an argmax in a graph
    tree           steps of 64, 16 and 8 nodes at batch 1, 8 and 32, and of 8 nodes at 1, beside the same floor and that
                   of drafting
    deterministic  plain and tree steps with deterministic=True, beside the same without it
    outside        the same with models that cost nothing: drafting, tree, verification, KV moves, bookkeeping; the
                   graph alone, and with the host, which otherwise works while the device does
    throughput     plain, naive_eagle, chain, tree, trees that share rows and the automatic choice, also among drafts
                   that are useless, at batch 1, 2, 4, ... 256
    gap            how long the device is idle between the work of consecutive steps, from a trace
    profile        where the time of a step goes, kernel by kernel, from a trace
    huggingface    generate of transformers with the same weights, eager and compiled with a static cache
    quantised      with --quantize NAME, alone: a quantised target beside the one in 16 bit (`quantised_steps.py`)
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams, ops
from eagle_kernels.engine.batch.kv_pool import DecodeAttend
from eagle_kernels.engine.models.layers.mixture import MixtureOfExperts, experts_touched
from eagle_kernels.engine.models.quantising import METHODS
from eagle_kernels.engine.requests.sampling_params import Features
from eagle_kernels.engine.serve.stream import TokenStream
from eagle_kernels.engine.serve.threads import running
from eagle_kernels.engine.serve.warmup import warm_steps
from eagle_kernels.engine.step.choice import PROBE_STEPS

from ..harness import results
from ..harness.markdown import markdown, newest
from ..harness.timing import ceiling_gb_per_s
from ..harness.trace import graph_gaps_us, kernel_us
from ..lab.log import read_lines
from . import quantised_steps
from .random_models import SHAPES, Hollow, random_head, random_target, target_config

Keep = Callable[[dict], None]

PROMPT_TOKENS = 512
SECTIONS = ("plain", "tree", "deterministic", "outside", "throughput", "gap", "profile", "huggingface")
# batch, tree, mean tokens a step that are simulated
TREES = ((1, (8, 5, 64), 4.0), (8, (4, 4, 16), 3.0), (32, (4, 3, 8), 2.5), (1, (4, 3, 8), 2.5))
# of which more than the time is told: plain ones, and trees
STEPS = ((1, None, 1.0), (32, None, 1.0), TREES[0], TREES[2])
# Tokens of a step with each of the trees. Those that share rows relate to the chain of three and to the whole tree as
# they do with the embedded pair (LOAD.md).
CHAIN_TOKENS = 2.6
ACCEPT = {(1, 1, 2): 1.7, (1, 3, 4): CHAIN_TOKENS, (8, 5, 64, 8): 3.2, (8, 5, 64, 16): 3.7, (8, 5, 64): 4.0}
PRESETS = {
    "plain": {},
    "naive_eagle": {"tree": (1, 1, 2), "accept": ACCEPT[1, 1, 2]},
    "chain 3": {"tree": (1, 3, 4), "accept": CHAIN_TOKENS},
    "16 of 8/5/64": {"tree": (8, 5, 64), "accept": ACCEPT[8, 5, 64, 16], "mean_draft_tokens": 16},
    "tree 8/5/64": {"tree": (8, 5, 64), "accept": ACCEPT[8, 5, 64]},
    "adaptive": {"tree": (8, 5, 64), "accept": ACCEPT, "adaptive": "auto"},
    "useless drafts": {"tree": (8, 5, 64), "accept": dict.fromkeys(ACCEPT, 1.0), "adaptive": "auto"},
}
# numbers of a step that the table shows
SHOWN = ("tokens_per_s", "accept_length", "experts", "of_floor", "of_plain", "of_ordinary", "of_ours", "ratio",
         "worst_us", "of_16_bit", "weights_gib", "most_gib", "most_less_a_layer_of_weights")  # fmt: skip
WARM_STEPS = 8
# of the steps that are timed in one go
MOST_S = 2.0
# of a profile; and what its table shows at least
MOST_KERNELS, MOST_LETTERS, LEAST_MS = 24, 80, 0.01
# of these steps, each timed by itself: the one in the middle counts
PARTS = 5


class Bench:
    """The models, and what is done with the lines that are measured."""

    def __init__(self, shape: str, device: torch.device, steps: int, prompt_tokens: int, max_length: int | None = None):
        """Makes the models. max_length: of texts, where it is not the shape's own."""
        self.device, self.steps, self.prompt_tokens, self.shape = device, steps, prompt_tokens, shape
        self.batches: Sequence[int] = ()  # of throughput and huggingface, where they are not all of theirs
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.max_length = max_length or SHAPES[shape]["max_position_embeddings"]
        self.target = random_target(shape, device, self.dtype, max_position_embeddings=self.max_length)
        self.draft = random_head(shape, device, self.dtype, max_position_embeddings=self.max_length)
        # what becomes of a line as soon as it is there, besides being printed
        self.keep: Keep = lambda line: None

    def engine(
        self,
        batch_size: int,
        tree: tuple[int, int, int] | None = None,
        accept: float | dict[tuple[int, ...], float] = 1.0,
        target=None,
        draft=None,
        **config,
    ) -> EAGLEInference:
        """Makes an engine. accept: mean tokens of a step, or of steps with each of the trees that it chooses from."""
        # prompts are read each time, also those that were read before
        config = {"share_prefixes": False} | config | {"max_batch": batch_size, "eos_token_ids": ()}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of the engine before
            config["kv_cache_bytes"] = int(0.8 * torch.cuda.mem_get_info()[0])
        if tree is not None:
            config |= dict(zip(("topk", "num_steps", "num_draft_tokens"), tree))
            if isinstance(accept, dict):
                config["simulated_accept_lengths"] = tuple(accept.items())
            else:
                config["simulated_accept_length"] = accept
        return EAGLEInference(draft or self.draft, target or self.target, EAGLEConfig(**config))

    def preset_engine(self, preset: str, batch_size: int, **config) -> EAGLEInference:
        """Makes an engine of a preset; on a GPU a warm one."""
        engine = self.engine(batch_size, **PRESETS[preset], **config)
        engine.is_speculating = bool(PRESETS[preset])
        if self.device.type == "cuda":
            engine.warmup(SamplingParams(), speculative=engine.is_speculating)
        return engine

    @contextlib.contextmanager
    def running(
        self, engine: EAGLEInference, batch_size: int, is_plain: bool, **sampling
    ) -> Iterator[tuple[TokenStream, int]]:
        """Yields a full batch after its prompts, warm, and how many more steps may be taken and timed."""
        most = 2 * self.steps + WARM_STEPS + 16
        per_step = 1 if is_plain else 1 + max((tree.num_steps for _, tree in engine.config.trees if tree), default=0)
        room = self.max_length - self.prompt_tokens
        wanted = {"seeds": list(range(batch_size)), "speculative": not is_plain} | sampling
        prompts = torch.randint(SHAPES[self.shape]["vocab_size"], (batch_size, self.prompt_tokens)).tolist()
        stream = engine.stream(prompts, min(most * per_step, room), **wanted)
        next(stream)  # the prompts are read
        scheduler = engine.session.scheduler
        try:
            with running(scheduler.plan.plain.target):  # as the engine's own calls run steps
                for _ in range(WARM_STEPS):
                    start_s = time.perf_counter()
                    scheduler.step()
                    self._synchronize()
                    last_s = time.perf_counter() - start_s
                yield stream, min(self.steps, max(6, int(MOST_S / last_s)))
        finally:
            stream.close()

    def step_ms(self, engine: EAGLEInference, batch_size: int, is_plain: bool, **sampling) -> tuple[float, float]:
        """Returns (time of a step, tokens of a request in it), the host's part included; the median of five parts, or,
        where the choice of trees is automatic, the mean: its steps differ."""
        is_automatic = engine.config.adaptive == "auto"
        if is_automatic:  # measures each of its trees first, behind prompts of their own
            with self.running(engine, batch_size, is_plain, **sampling) as (stream, _):
                features = Features.of([request.params for request in stream.requests])
                warm_steps(engine.session.scheduler, {features}, [batch_size])
                for _ in range((PROBE_STEPS + 1) * len(engine.session.scheduler.plan.runners)):
                    engine.session.scheduler.step()
        with self.running(engine, batch_size, is_plain, **sampling) as (stream, steps):
            scheduler = engine.session.scheduler
            self._synchronize()
            before, marks = _tokens_of(stream), [(scheduler.num_steps, time.perf_counter())]
            parts = min(PARTS, steps)
            for part in range(parts):
                for _ in range(steps * part // parts, steps * (part + 1) // parts):
                    scheduler.step()
                marks.append((scheduler.num_steps, time.perf_counter()))
            self._synchronize()
            for request in stream.requests:
                if request.error is not None:
                    raise RuntimeError(f"generation: {request.error}")
            # a host that stands still for a second is not what a step costs
            step_s = (statistics.fmean if is_automatic else statistics.median)(
                (stop - start) / (last - first) for (first, start), (last, stop) in pairwise(marks)
            )
            return 1e3 * step_s, (_tokens_of(stream) - before) / (scheduler.num_steps - marks[0][0]) / batch_size

    def device_ms(self, engine: EAGLEInference, batch_size: int, is_plain: bool, **sampling) -> float:
        """Returns the time of a step's graph, one after another: what is left when the host is not waited for."""
        with self.running(engine, batch_size, is_plain, **sampling) as (stream, steps):
            runner = engine.session.scheduler.last_runner
            features = Features.of([request.params for request in stream.requests])
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for number in range(8 + steps):
                if number == 8:
                    start.record()
                runner.run(batch_size, features)
            end.record()
            self._synchronize()
            return start.elapsed_time(end) / steps

    def record(self, section: str, case: str, provider: str, step_ms: float, **numbers) -> dict:
        line = {"op": "generation", "section": section, "case": case, "provider": provider}
        line |= {"step_ms": round(step_ms, 4)} | {name: round(value, 4) for name, value in numbers.items()}
        self.keep(line)
        shown = ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())
        print(f"{section:12} {case:34} {provider:22} {step_ms:9.3f} ms   {shown}", flush=True)
        return line

    def of_floor(self, step_ms: float, num_rows: int, num_levels: int = 0) -> dict[str, float]:
        """Returns a step's time as a multiple of that of reading the weights that its rows need, those of the head once
        a level; and the experts that the rows go to, by even routing."""
        numbers = {}
        if self.device.type == "cuda":
            floor_ms = self.read_bytes(num_rows, num_levels) / ceiling_gb_per_s("read") / 1e6
            numbers["of_floor"] = step_ms / floor_ms
        for mixture in (module for module in self.target.modules() if isinstance(module, MixtureOfExperts)):
            settings = mixture.settings
            numbers["experts"] = experts_touched(num_rows, settings.num_experts, settings.num_chosen)
        return numbers

    def read_bytes(self, num_rows: int, num_levels: int = 0) -> float:
        """Returns the bytes of weights that a step reads: the target's for its rows, and the head's each level."""
        embedding = self.target.get_input_embeddings().weight
        looked_up = 0 if embedding is self.target.get_output_embeddings().weight else embedding.nbytes
        head = sum(weight.nbytes for name, weight in self.draft.named_parameters() if "embed_tokens" not in name)
        return self.target.read_bytes(num_rows) - looked_up + num_levels * head

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _tokens_of(stream: TokenStream) -> int:
    """Returns the number of tokens that steps have brought; the first token after a prompt is not one of them."""
    return sum(len(request.accepted) + sum(request.accepted) for request in stream.requests)


def plain(bench: Bench) -> None:
    for batch_size in (1, 8, 32):
        engine = bench.engine(batch_size)
        step_ms, _ = bench.step_ms(engine, batch_size, is_plain=True)
        numbers = {"tokens_per_s": 1e3 * batch_size / step_ms} | bench.of_floor(step_ms, batch_size)
        bench.record("plain", f"B={batch_size}", "eagle_kernels", step_ms, **numbers)
        if bench.device.type == "cuda":
            loop_ms = _bare_loop_ms(bench, batch_size)
            bench.record("plain", f"B={batch_size}", "bare loop", loop_ms, ratio=step_ms / loop_ms)


@torch.inference_mode()
def _bare_loop_ms(bench: Bench, batch_size: int) -> float:
    """Times the target's forward pass and an argmax, in a graph that is replayed with nothing between."""
    engine = bench.engine(batch_size)
    stream = engine.stream([[0] * bench.prompt_tokens] * batch_size, 64, seeds=0, speculative=False)
    next(stream)
    state = engine.session.scheduler.state
    table, lengths, roots = state.block_table[:batch_size], state.lengths[:batch_size], state.roots[:batch_size]

    def step():
        slots = ops.find_slots(table, lengths, count=1, page_size=state.target_pool.page_size).slots
        attend = DecodeAttend(state.target_pool, table, lengths, slots)
        logits = bench.target.forward(roots[:, None], lengths[:, None], attend).logits
        roots.copy_(logits[:, 0].argmax(-1))
        lengths.add_(1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(32):
        graph.replay()
    torch.cuda.synchronize()
    elapsed_ms = 1e3 * (time.perf_counter() - start_s) / 32
    stream.close()
    return elapsed_ms


def tree(bench: Bench) -> None:
    for batch_size, shape, accept in TREES:
        plain_ms, _ = bench.step_ms(bench.engine(batch_size), batch_size, is_plain=True)
        engine = bench.engine(batch_size, shape, accept)
        step_ms, length = bench.step_ms(engine, batch_size, is_plain=False)
        case = _case_name(batch_size, shape)
        numbers = {"accept_length": length, "tokens_per_s": 1e3 * batch_size * length / step_ms}
        numbers |= bench.of_floor(step_ms, batch_size * shape[2], shape[1])
        bench.record("tree", case, "eagle_kernels", step_ms, **numbers, of_plain=step_ms / plain_ms)


def deterministic(bench: Bench) -> None:
    if bench.device.type != "cuda":  # deterministic=True is refused on the CPU
        return
    for batch_size, shape, accept in STEPS:
        case = _case_name(batch_size, shape)
        steps_ms = []
        for is_deterministic in (False, True):
            engine = bench.engine(batch_size, shape, accept, deterministic=is_deterministic)
            steps_ms.append(bench.step_ms(engine, batch_size, is_plain=shape is None)[0])
            del engine
        ordinary_ms, step_ms = steps_ms
        bench.record("deterministic", case, "eagle_kernels", step_ms, of_ordinary=step_ms / ordinary_ms)


def _case_name(batch_size: int, shape: tuple[int, int, int] | None) -> str:
    return f"B={batch_size} " + ("plain" if shape is None else f"K/S/N={'/'.join(map(str, shape))}")


def outside(bench: Bench) -> None:
    for batch_size in (1, 32):
        engine = bench.engine(batch_size, (8, 5, 64), 4.0, Hollow(bench.target), Hollow(bench.draft))
        for name, sampling in (("greedy", {}), ("top-k 50 top-p 0.9", {"temperature": 1.0, "top_k": 50, "top_p": 0.9})):
            case = f"B={batch_size} K/S/N=8/5/64 {name}"
            if bench.device.type == "cuda":
                device_ms = bench.device_ms(engine, batch_size, is_plain=False, **sampling)
                bench.record("outside", case, "eagle_kernels", device_ms)
            step_ms, length = bench.step_ms(engine, batch_size, is_plain=False, **sampling)
            bench.record("outside", case, "with the host", step_ms, accept_length=length)


def throughput(bench: Bench) -> None:
    for batch_size in bench.batches or [2**i for i in range(9 if bench.device.type == "cuda" else 2)]:
        plain_speed = None
        for name, tree in PRESETS.items():
            engine = bench.engine(batch_size, **tree)
            step_ms, length = bench.step_ms(engine, batch_size, is_plain=not tree)
            speed = 1e3 * batch_size * length / step_ms
            plain_speed = plain_speed or speed
            numbers = {"accept_length": length, "tokens_per_s": speed, "of_plain": speed / plain_speed}
            bench.record("throughput", f"B={batch_size}", name, step_ms, **numbers)
            del engine


def gap(bench: Bench) -> None:
    """Times how long the device is idle before each graph, kernels and copies being work, from a trace."""
    if bench.device.type != "cuda":
        return
    for name, shape, accept in (("plain", None, 1.0), ("tree 8/5/64", (8, 5, 64), 4.0)):
        engine = bench.engine(1, shape, accept)
        stream = engine.stream([[0] * bench.prompt_tokens], 400, seeds=0, speculative=shape is not None)
        next(stream)
        gaps = graph_gaps_us(engine.session.scheduler.step, 20)
        stream.close()
        middle = sorted(gaps)[len(gaps) // 2]
        bench.record("gap", name, "eagle_kernels", middle / 1e3, worst_us=max(gaps), median_us=middle)


def profile(bench: Bench) -> None:
    if bench.device.type != "cuda":
        return
    for batch_size, shape, accept in STEPS:
        case = _case_name(batch_size, shape)
        engine = bench.engine(batch_size, shape, accept)
        with bench.running(engine, batch_size, is_plain=shape is None):
            kernels = kernel_us(engine.session.scheduler.step, 10)
        bench.record("profile", case, "all kernels", sum(us for _, _, us in kernels) / 1e3)
        for name, calls, us in kernels[:MOST_KERNELS]:
            bench.record("profile", case, name[:MOST_LETTERS], us / 1e3, calls=calls)


def huggingface(bench: Bench) -> None:
    """Times the same weights in transformers' own class: views of ours, so that both fit."""
    if bench.device.type != "cuda":
        return
    try:
        import transformers
    except ImportError:
        print("huggingface: transformers is not installed")
        return
    config = transformers.LlamaConfig(**{k: v for k, v in target_config(bench.shape).items() if k != "model_type"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(bench.dtype)
    model.load_state_dict(bench.target.state_dict(), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config, device=bench.device)
    model.eval()
    for batch_size in bench.batches or (1, 8):
        ours_ms, _ = bench.step_ms(bench.engine(batch_size), batch_size, is_plain=True)
        prompts = torch.randint(config.vocab_size, (batch_size, bench.prompt_tokens), device=bench.device)
        for name, options in (("eager", {}), ("compiled, static cache", {"cache_implementation": "static"})):
            fixed = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "pad_token_id": 0} | options
            step_ms = _slope_ms(partial(model.generate, prompts, **fixed))
            bench.record("huggingface", f"B={batch_size}", name, step_ms, of_ours=step_ms / ours_ms)


def _slope_ms(generate: Callable) -> float:
    """Returns the milliseconds of a token, without what a call costs by itself."""
    short, long = 16, 48
    generate(min_new_tokens=long, max_new_tokens=long)  # first: a static cache that is long enough is kept
    generate(min_new_tokens=short, max_new_tokens=short)
    times = []
    for count in (short, long):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        generate(min_new_tokens=count, max_new_tokens=count)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start_s))
    return (times[1] - times[0]) / (long - short)


def tables(file: Path) -> list[str]:
    """Returns a section for each shape of a model."""
    shapes: dict[str, list[dict]] = {}
    for line in read_lines(file):
        shapes.setdefault(line["shape"], []).append(line)
    return list(map(_tables, shapes.values()))


def _tables(lines: Sequence[dict]) -> str:
    """Returns steps of the engine, its throughput by batch size and preset, and where the time of steps goes."""
    kept = newest([line for line in lines if line["section"] != "profile"])
    profiles = [line for line in lines if line["section"] == "profile"]
    runs = {line["case"]: line["run"] for line in profiles}  # the newest of each
    profiles.sort(key=lambda line: list(runs).index(line["case"]))
    kernels = [["kernels of a step", "times in it", "ms", "at commit"]]
    for line in profiles:
        if line["run"] == runs[line["case"]] and line["step_ms"] >= LEAST_MS:
            calls = f"{line['calls']:.4g}" if "calls" in line else "-"
            name = f"{line['case']}: `{line['provider']}`"
            kernels.append([name, calls, f"{line['step_ms']:.3f}", f"`{line['commit']}`"])
    steps = [["section", "case", "provider", "ms a step", "numbers", "at commit"]]
    speeds: dict[str, dict[str, str]] = {}
    for (section, case, provider), line in kept.items():
        if section == "throughput":
            plain = kept[section, case, "plain"]["tokens_per_s"]
            speeds.setdefault(case, {})[provider] = f"{line['tokens_per_s']:.0f} ({line['tokens_per_s'] / plain:.2f}×)"
            continue
        numbers = [f"{name} {line[name]:.4g}" for name in SHOWN if name in line]
        steps.append([section, case, provider, f"{line['step_ms']:.3f}", ", ".join(numbers), f"`{line['commit']}`"])
    presets = list(dict.fromkeys(name for row in speeds.values() for name in row))
    throughput = [["tokens/s (of plain)", *presets]]
    throughput += [[case, *(row.get(name, "-") for name in presets)] for case, row in speeds.items()]
    about = "Random weights, simulated acceptance (`--app generation`):"
    parts = [markdown(table) for table in (steps, throughput, kernels) if len(table) > 1]
    return "\n\n".join([f"## The engine, shape of {lines[0]['shape']}", about, *parts])


def main(arguments: Sequence[str], directory: Path | None, commit: str) -> int:
    """Runs the sections that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.run --app generation")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed (default: 40)")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--batches", nargs="+", type=int, help="of throughput and huggingface (default: all of theirs)")
    parser.add_argument("--quantize", choices=METHODS, help="time a quantised target beside the one in 16 bit")
    options, device, keep = start(parser, arguments, directory, commit)
    bench = Bench(options.shape, device, options.steps, options.prompt_tokens)
    bench.batches, bench.keep = options.batches or (), keep
    if options.quantize is not None:
        if options.only != list(SECTIONS):
            parser.error("--only must not be given with --quantize, which has a section of its own")
        quantised_steps.quantised(bench, options.quantize)
        return 0
    for section in options.only:
        globals()[section](bench)
    return 0


def keeper(directory: Path | None, commit: str, **about) -> Keep:
    """Returns what adds a line to the results of this machine's GPU; without a GPU or a folder it does nothing."""
    if directory is None or not torch.cuda.is_available():
        return lambda line: None
    about |= {"gpu": torch.cuda.get_device_name(), "commit": commit, "run": results.new_run()}
    return lambda line: results.append(directory, line | about)


def start(
    parser: argparse.ArgumentParser, arguments: Sequence[str], directory: Path | None, commit: str
) -> tuple[argparse.Namespace, torch.device, Keep]:
    """Returns an app's options, `--shape` among them, its device and `keeper`; exits where the shape needs a GPU."""
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.shape != "small":
        parser.exit(2, "a model of this size needs a GPU; --shape small runs anywhere\n")
    return options, device, keeper(directory, commit, shape=options.shape)
