"""`benchmark --requests` and `--gsm8k`: what is sent, what is counted, and what is right."""

import functools
import json
from collections import defaultdict
from types import SimpleNamespace

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine import benchmark
from eagle_kernels.engine.batch.prefix_cache import PrefixCache
from eagle_kernels.engine.benchmark import RequestTimes, percentiles
from eagle_kernels.engine.requests.request import Request
from eagle_kernels.tools import gsm8k, request_benchmark
from eagle_kernels.tools.cli import benchmark as cli
from eagle_kernels.tools.gsm8k import Example, evaluate, last_number, prompts_of, read_examples
from eagle_kernels.tools.request_benchmark import random_requests, run_requests
from op_tests.engine.toys import LetterTokenizer, ToyModel
from op_tests.tools.command import complaint, printed

QUESTIONS = [
    ("A farmer has 3 hens, each of which lays 4 eggs. How many eggs?", "3 * 4 = <<3*4=12>>12.\n#### 12", 12),
    ("It costs $1,250 and you have $250. What is missing?", "1,250 - 250 = 1,000.\n#### 1,000", 1000),
    ("It is 3 degrees and falls by 5. How cold is it?", "3 - 5 = -2\n#### -2", -2),
    ("Half of 5?", "5 / 2 = 2.5\n#### 2.5", 2.5),
]


@pytest.fixture
def file(tmp_path):
    """In the format of GSM8K, of our own."""
    path = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer, _ in QUESTIONS]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


def test_lengths_are_random_within_their_bounds():
    requests = random_requests(200, 40, 20, 0.7, 61, seed=3, temperature=0.5)
    prompts, texts = zip(*((len(prompt), params.max_new_tokens) for prompt, params in requests))
    assert (min(prompts), max(prompts), min(texts), max(texts)) == (28, 40, 14, 20)
    assert all(0 <= token < 61 for prompt, _ in requests for token in prompt)
    assert [params.seed for _, params in requests] == list(range(3, 203)) and requests[0][1].temperature == 0.5
    assert requests == random_requests(200, 40, 20, 0.7, 61, seed=3, temperature=0.5)
    assert {len(prompt) for prompt, _ in random_requests(5, 7, 3, 1.0, 61)} == {7}


@pytest.mark.parametrize("speculative", [True, False])
def test_figures_of_requests(speculative, monkeypatch):
    """By a clock that passes of the target tick; more than run at once, so that the last ones wait."""
    target, passes, seen = ToyModel(), [], []
    forward, collect = target.forward, Request.collect
    target.forward = functools.wraps(forward)(lambda *a, **options: passes.append(1) or forward(*a, **options))

    def collected(request):
        events = collect(request)
        seen.extend((request, 1e3 * len(passes)) for _ in events)
        return events

    monkeypatch.setattr(Request, "collect", collected)
    for module in (benchmark, request_benchmark):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 7.0 + len(passes)))
    draft = ToyModel()  # of which no pass counts
    engine = EAGLEInference(draft, target, EAGLEConfig(topk=1, num_steps=3, max_batch=4, eos_token_ids=(1, 2, 3)))
    requests = random_requests(10, 20, 12, 0.5, 40)
    run = run_requests(engine, requests, speculative=speculative)
    assert run.time_s == len(passes) > 0
    assert run.requests == 10 and run.input_tokens == sum(len(prompt) for prompt, _ in requests)
    assert run.output_tokens == sum(params.max_new_tokens for _, params in requests), "no end token ends a text"
    assert run.requests_per_second == 10 / run.time_s
    assert run.output_tokens_per_second == run.output_tokens / run.time_s
    assert run.total_tokens_per_second == (run.input_tokens + run.output_tokens) / run.time_s
    assert (run.mean_accept_length > 2) == speculative
    arrivals = defaultdict(list)
    for request, now_ms in seen:
        arrivals[request].append(now_ms)
    firsts, lasts = [each[0] for each in arrivals.values()], [each[-1] for each in arrivals.values()]
    assert run.ttft_ms == pytest.approx(percentiles(firsts)) and run.latency_ms == pytest.approx(percentiles(lasts))
    means = [(each[-1] - each[0]) / (len(each) - 1) for each in arrivals.values()]
    assert run.tpot_ms == pytest.approx(percentiles(means))
    # four have their first tokens at once, and the others as rows become free
    assert run.ttft_ms["p95"] > 1.5 * run.ttft_ms["p50"] and min(lasts) < sorted(firsts)[4]


def test_figures_of_a_run(monkeypatch):
    """Of times that are given: all requests are sent at 100 s, and the last one ends at 108 s."""
    target, clock = ToyModel(), iter([100.0, 108.0])
    engine = EAGLEInference(target, target, EAGLEConfig(topk=1, num_steps=3))
    steps = [(101.0, [(1.0, 2), (4.0, 2)]), (103.0, []), (104.0, [(3.0, 1), (1.0, 3)])]
    times = [RequestTimes(*each) for each in steps]
    monkeypatch.setattr(request_benchmark, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(request_benchmark, "time_requests", lambda stream: [*stream] and times)
    requests = [([1] * 7, SamplingParams(max_new_tokens=count)) for count in (5, 1, 5)]
    run = run_requests(engine, requests)

    def of_three(low, middle, high):
        above = high - middle
        return pytest.approx({"p50": middle, "p95": middle + 0.9 * above, "p99": middle + 0.98 * above})

    assert (run.requests, run.time_s, run.input_tokens, run.output_tokens) == (3, 8.0, 21, 11)
    speeds = (run.requests_per_second, run.output_tokens_per_second, run.total_tokens_per_second)
    assert speeds == (3 / 8, 11 / 8, 32 / 8)
    assert run.ttft_ms == of_three(1000, 3000, 4000) and run.latency_ms == of_three(3000, 6000, 8000)
    assert run.tpot_ms == pytest.approx({"p50": 1125.0, "p95": 1237.5, "p99": 1247.5})


def test_each_run_reads_its_prompts():
    """Also where both ways could share them: methods without a model have no keys of their own."""
    target = ToyModel()
    engine = EAGLEInference(None, target, EAGLEConfig(method="ngram", topk=1, num_steps=2, page_size=4))
    requests, shared = random_requests(2, 20, 3, 1.0, 40), []
    take = PrefixCache.take

    def taken(self, *arguments):
        held = take(self, *arguments)
        shared.append(self.start(held))
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCache, "take", taken)
        for speculative in (True, False):
            run_requests(engine, requests, speculative=speculative)
    assert shared == [0] * 4


def test_numbers_in_texts():
    for text, value in (
        ("18", 18), ("so 1,234 in all.", 1234), ("$1,000.50", 1000.5), ("it is -7", -7), ("3 and then 4 eggs", 4),
        ("no number", None), ("", None), ("1, 2, 3", 3), ("#### 12\n\n", 12),
    ):  # fmt: skip
        assert last_number(text) == value, text


def test_a_file_and_its_prompts(file):
    examples = read_examples(file)
    assert [example.value for example in examples] == [value for *_, value in QUESTIONS]
    prompts, asked = prompts_of(examples, 2, None)
    assert asked == examples[2:]
    assert prompts[0] == (
        "Question: A farmer has 3 hens, each of which lays 4 eggs. How many eggs?\nAnswer: 3 * 4 = <<3*4=12>>12.\n"
        "#### 12\n\nQuestion: It costs $1,250 and you have $250. What is missing?\nAnswer: 1,250 - 250 = 1,000.\n"
        "#### 1,000\n\nQuestion: It is 3 degrees and falls by 5. How cold is it?\nAnswer:"
    )
    assert [prompt for prompt in prompts_of(examples, 0, 1)[0]] == [f"Question: {QUESTIONS[0][0]}\nAnswer:"]


def test_right_wrong_and_missing_answers(monkeypatch):
    """Texts end before the next question, and the last number counts."""
    target = ToyModel(vocab_size=LetterTokenizer().vocab_size)
    engine = EAGLEInference(target, target, EAGLEConfig(topk=1, num_steps=2), tokenizer=LetterTokenizer())
    texts = iter([" 3 * 4 = 12.\n#### 12", " 7", " no idea", " -2"])
    monkeypatch.setattr("eagle_kernels.engine.requests.request.Request.text", property(lambda request: next(texts)))
    asked = [Example(question, answer, value) for question, answer, value in QUESTIONS[:3]] + [Example("", "", -2)]
    accuracy = evaluate(engine, ["a", "b", "c", "d"], asked, 3, seeds=0)
    assert (accuracy.questions, accuracy.correct, accuracy.invalid, accuracy.accuracy) == (4, 2, 1, 0.5)
    assert accuracy.output_tokens == 12 and accuracy.tokens_per_second == pytest.approx(12 / accuracy.time_s)


SMALL = ("benchmark", "--device", "cpu", "--topk", 2, "--num-steps", 2)


@pytest.mark.parametrize("is_json", [True, False])
@pytest.mark.parametrize("method", ["ngram", "naive"])
def test_the_command_shows_what_was_measured(method, is_json, file, monkeypatch, capsys):
    """Of both ways, where there are two: what runs are asked for, and every figure of theirs."""
    target, asked, is_plain = ToyModel(), [], method == "naive"
    config = EAGLEConfig(method=method, temperature=0.5)
    engine = EAGLEInference(None, target, config, tokenizer=LetterTokenizer())
    monkeypatch.setattr(cli, "load_engine", lambda arguments: engine)
    monkeypatch.setattr(engine, "warmup", lambda *_, **__: asked.append("warm-up"))

    def run(given, requests, *, speculative):
        asked.append((given is engine, requests, speculative))
        times = {"p50": 1.25, "p95": 10.0, "p99": 100.75} if speculative else {}
        return request_benchmark.RequestRun(3, 2.5, 1.2, 70, 14, 5.6, 33.6, 1.75 + speculative, times, times, times)

    def answer(*given, seeds, speculative):
        asked.append((*given, seeds, speculative))
        return gsm8k.Accuracy(4, 2 + speculative, 1, 24, 3.0, 1.5, ["a", "b", "c" if speculative else "d", "e"])

    monkeypatch.setattr(cli, "run_requests", run)
    monkeypatch.setattr(cli, "evaluate", answer)
    ways, shape = [False] if is_plain else [True, False], ["--json"] if is_json else []
    options = ["--requests", 3, "--input-len", 30, "--output-len", 6, "--range-ratio", 0.5, "--seed", 4]
    shown = printed(capsys, "benchmark", *options, *shape)
    requests = random_requests(3, 30, 6, 0.5, 40, 4, **config.sampling)
    assert asked == [(True, requests, way) for way in ways] and requests[0][1].temperature == 0.5
    if is_json:
        report = json.loads(shown)
        names = ["speculative", "plain"][-len(ways) :]
        assert list(report)[: len(ways)] == names and ("speculative" in report) != is_plain
        assert report["plain"]["requests_per_second"] == 1.2 and report["plain"]["ttft_ms"] == {}
        assert all(report[name]["mean_accept_length"] == 1.75 + (name == "speculative") for name in names)
        assert report["method"] == method and report["temperature"] == 0.5 and report["dtype"] == "float32"
        sizes = report["topk"], report["num_steps"], report["num_draft_tokens"]
        assert sizes == ((1, 0, 1) if is_plain else (config.topk, config.num_steps, config.num_verify_tokens))
    else:
        lines = shown.splitlines()
        assert lines[0] == f"method: {method}, verified by {config.verify_strategy}"
        assert len(lines) == 1 + 11 * len(ways)
        assert {"plain requests: 3", "plain requests per second: 1.200", "plain ttft ms: -"} < set(lines)
        assert ("speculative ttft ms: p50 1.2, p95 10.0, p99 100.8" in lines) != is_plain
    asked.clear()
    options = ["--gsm8k", file, "--num-shots", 1, "--num-questions", 2, "--max-new-tokens", 12, "--seed", 4]
    shown, of_file = printed(capsys, "benchmark", *options, *shape), prompts_of(read_examples(file), 1, 2)
    assert asked == [(engine, *of_file, 12, 4, way) for way in ways]
    if is_json:
        report = json.loads(shown)
        plain = report["plain"]
        assert "texts" not in plain and (plain["accuracy"], plain["tokens_per_second"]) == (0.5, 8)
        assert report.get("identical") == (None if is_plain else 1.5)  # three texts of the two that were asked
    else:
        assert ("identical: 1.500" in shown.splitlines()) != is_plain and "plain accuracy: 0.500" in shown.splitlines()


@pytest.mark.slow
def test_the_command_line(file, capsys):
    report = json.loads(printed(capsys, *SMALL, "--requests", 3, "--input-len", 30, "--output-len", 6, "--json"))
    assert report["speculative"]["requests"] == report["plain"]["requests"] == 3
    assert report["plain"]["mean_accept_length"] == 1 < report["speculative"]["mean_accept_length"]
    assert report["speculative"]["input_tokens"] == report["plain"]["input_tokens"] and report["topk"] == 2
    of_file = ["--gsm8k", file, "--num-shots", 1, "--num-questions", 2, "--max-new-tokens", 12]
    report = json.loads(printed(capsys, *SMALL, *of_file, "--json"))
    assert report["speculative"]["questions"] == 2 and report["identical"] == 1
    assert report["speculative"]["accuracy"] == report["plain"]["accuracy"]
    assert complaint(capsys, *SMALL, *of_file, "--speculative-config", '{"method": "naive"}')  # which has no tree
    shown = printed(capsys, "benchmark", "--requests", 2, "--input-len", 9, "--output-len", 3, "--device", "cpu")
    assert "speculative ttft ms: p50 " in shown and "plain requests per second: " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of a file of prompts, --requests and --gsm8k; got none"),
        (["prompts.txt", "--requests", 3], "got ['prompts', 'requests']"),
        (["--requests", 0], "--requests must be at least 1, got 0"),
        (["--requests", 2, "--input-len", 0], "--input-len must be at least 1, got 0"),
        (["--requests", 2, "--range-ratio", 1.5], "--range-ratio must lie in (0, 1], got 1.5"),
        (["--requests", 1, "--input-len", 2000], "exceed the 1024 tokens"),
        (["--gsm8k", "/none"], "/none: there is no such file of questions"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    assert message in complaint(capsys, *SMALL, *arguments)


def test_bad_files_are_named(tmp_path, file, capsys):
    for line, message in (
        ("[1]", "must be a JSON object with texts 'question' and 'answer', got '[1]'"),
        ("{", "must be a JSON object, got '{'"),
        ('{"question": "a"}', "must be a JSON object with texts 'question' and 'answer'"),
        ('{"question": "a", "answer": "12"}', "answer must end with '#### ' and a number, got '12'"),
        ('{"question": "a", "answer": "#### x"}', "answer must end with '#### ' and a number"),
    ):
        path = tmp_path / "bad.jsonl"
        path.write_text(file.read_text() + line + "\n")
        with pytest.raises(ValueError) as caught:
            read_examples(path)
        assert f"{path}:6: {message}" in str(caught.value)
    said = complaint(capsys, *SMALL, "--gsm8k", file, "--num-shots", 4)
    assert "--num-shots must leave a question to ask, got 4 of 4 examples" in said
