"""Speculative text is plain text, token for token: native models of every family with heads read from every format.

Cases are drawn from all there is to combine: trees, batches, pages, samplings, graphs, requests that join and leave.
"""

import random
from typing import NamedTuple

import pytest

pytest.importorskip("transformers")

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.loading import load_draft, load_target
from op_tests.engine import heads
from op_tests.engine.families import CASES as FAMILIES
from op_tests.engine.families import write_target

# what the heads fit; families whose layers differ would need a list of eight
SIZES = {name: heads.WIDTHS[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
SIZES |= {"num_attention_heads": heads.HEADS, "num_hidden_layers": 8}
LIKE_OTHERS = ("deepseek_v2 lite", "deepseek_v2 groups", "deepseek_v3 halves", "kimi_k2", "glm moe lite",
               "glm moe lite, layers by name")  # fmt: skip
FAMILIES = {name: case for name, case in FAMILIES.items() if "layer_types" not in case[1] and name not in LIKE_OTHERS}
HEADS = {"EAGLE-1": heads.eagle1_tensors, "EAGLE-3": heads.eagle3_tensors}
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": True},
}
CHOICES = {
    "family": tuple(FAMILIES),
    "head": tuple(HEADS),
    "form": tuple(heads.WRITERS),
    "topk": (1, 2, 4, 8),
    "num_steps": tuple(range(1, 9)),
    "batch_size": tuple(range(1, 17)),
    "page_size": (1, 16, 64),
    "prefill_chunk": (3, 64, 2048),
    "sampling": tuple(SAMPLING),
    "do_join": (False, True),
    "cuda_graph": (False, True),
}


class Case(NamedTuple):
    """What is combined; num_nodes of the tree, the root included."""

    number: int
    num_nodes: int
    chosen: dict

    def __str__(self):
        return f"{self.number}-" + "-".join(str(value) for value in self.chosen.values())


def draw(number: int) -> Case:
    chooser = random.Random(number)
    chosen = {name: chooser.choice(values) for name, values in CHOICES.items()}
    chosen["family"] = CHOICES["family"][101 * number % len(FAMILIES)]  # each comes soon: 101 is prime
    most = 1 + chosen["topk"] + (chosen["num_steps"] - 1) * chosen["topk"] ** 2
    return Case(number, chooser.randint(2, min(64, most)), chosen)


FEW, MANY = range(8), range(8, 79)


def test_every_choice_is_drawn():
    for name, values in CHOICES.items():
        drawn = {draw(number).chosen[name] for number in (*FEW, *MANY)}
        assert drawn == set(values), name


def texts(engine: EAGLEInference, prompts: list, params: list, do_join: bool) -> list[list[int]]:
    """Each request's tokens; do_join: they come a few at a time, between steps of those before."""
    requests = []
    for number, (prompt, wished) in enumerate(zip(prompts, params)):
        requests.append(engine.submit(prompt, wished))
        if do_join and number % 3 == 2:
            engine.step()
    engine.collect()
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.output_ids for request in requests]


def check(case: Case, tmp_path, device) -> None:
    chosen, chooser = dict(case.chosen), random.Random(case.number + 1)
    family, changes = FAMILIES[chosen.pop("family")]
    write_target(family, SIZES | changes, tmp_path / "target")
    target = load_target(tmp_path / "target", device)
    tensors = HEADS[chosen.pop("head")]()
    draft = load_draft(heads.WRITERS[chosen.pop("form")](tmp_path / "head", tensors), target)
    sampling, do_join = SAMPLING[chosen.pop("sampling")], chosen.pop("do_join")
    batch_size, wants_graph = chosen.pop("batch_size"), chosen.pop("cuda_graph")
    cuda_graph = wants_graph if device.type == "cuda" else False
    max_batch = chooser.choice((batch_size, 1 + batch_size // 2))
    config = EAGLEConfig(**chosen, num_draft_tokens=case.num_nodes, max_batch=max_batch, cuda_graph=cuda_graph)
    prompts = [[chooser.randrange(1, 61) for _ in range(chooser.randint(1, 30))] for _ in range(batch_size)]
    lengths = [chooser.randint(1, 14) for _ in prompts]
    params = [SamplingParams(max_new_tokens=length, seed=seed, **sampling) for seed, length in enumerate(lengths)]
    engine = EAGLEInference(draft, target, config)
    speculative = texts(engine, prompts, params, do_join)
    engine.is_speculating = False
    assert speculative == texts(engine, prompts, params, do_join=False)
    assert [len(tokens) for tokens in speculative] == lengths


@pytest.mark.cross
@pytest.mark.parametrize("case", [draw(number) for number in FEW], ids=str)
def test_text_is_that_of_plain_decoding(case, tmp_path, device):
    check(case, tmp_path, device)


@pytest.mark.full
@pytest.mark.parametrize("case", [draw(number) for number in MANY], ids=str)
def test_text_is_that_of_plain_decoding_in_many_more_cases(case, tmp_path, device):
    check(case, tmp_path, device)
