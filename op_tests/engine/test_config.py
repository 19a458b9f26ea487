"""EAGLEConfig: its defaults, the trees of a choice, and the values by which a call runs."""

import contextlib
import dataclasses
import inspect
import itertools
import re

import numpy
import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.config.drafting_options import METHODS, DraftingOptions, default_nodes
from eagle_kernels.engine.config.eagle_config import CONFIG_FIELDS
from eagle_kernels.engine.requests.sampling_params import SAMPLING_FIELDS
from eagle_kernels.ops.attention.shared.drafts import MAX_DRAFT_KEYS, MAX_QUERY
from eagle_kernels.ops.tree.organize_draft_results import MAX_CANDIDATES
from op_tests.engine.hostile import refused
from op_tests.engine.toys import LetterTokenizer, RowWalker, ToyModel
from op_tests.engine.view import View

SIMULATE = {"accept_policy": "simulate"}


def test_fields_stand_in_the_groups_of_their_docstring():
    """Under the same headings, whichever class holds them; positional arguments keep their order besides."""
    documented, defined, group = {}, {}, []
    for line in inspect.getdoc(EAGLEConfig).partition("\nArgs:\n")[2].splitlines():
        entry = re.match(r"    (\w[\w, ]*): ", line)
        if entry:
            group.extend(entry[1].split(", "))
        elif line[4] != " ":
            group = documented.setdefault(line.strip(" .").lower().partition(",")[0], [])
    for options in (DraftingOptions, EAGLEConfig):
        for line in inspect.getsource(options).splitlines():
            if line.startswith("    # "):
                group = defined.setdefault(line.removeprefix("    # ").partition(",")[0], [])
            elif re.match(r"    [a-z]\w+: ", line):
                group.append(line.split(":")[0].strip())
    assert {name: sorted(group) for name, group in documented.items()} == {k: sorted(v) for k, v in defined.items()}
    assert sorted(name for group in documented.values() for name in group) == sorted(CONFIG_FIELDS)
    assert len(documented) == 9 and max(map(len, documented.values())) < 11


STRATEGIES = ("target_match", "greedy", "rejection", "topp", "typical")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", [None, *METHODS, ("eagle", "ngram"), ("ngram", "naive"), ("mtp", "hybrid")])
def test_defaults_alone_make_a_tree_of_every_method_and_strategy(method, strategy):
    """Of any size, with the number of nodes that one would give: all that there are, at most 32, or 64 of `tree`."""
    chosen, names = {"method": method, "verify_strategy": strategy}, method if isinstance(method, tuple) else (method,)
    looks_up = bool({"ngram", "suffix", "hybrid"}.intersection(names))
    if strategy == "rejection" and (len(names) > 1 or method == "hybrid"):
        with pytest.raises(ValueError, match="EAGLEConfig: verify_strategy must not be 'rejection'"):
            EAGLEConfig.tree(4, 4, num_draft_tokens=17, **chosen, **({"num_model_steps": 1} if looks_up else {}))
        return
    for topk, num_steps in ((8, 5), (4, 4), (4, 5), (3, 2), (2, 16), (2, 3), (1, 5), (1, 2)):
        sizes = {"topk": topk, "num_steps": num_steps}
        fields = chosen | ({"num_model_steps": 1} if "hybrid" in names else {})
        # beams have topk children each on every level but the first, other trees topk drafts on each level
        has_beams = method == "naive" or not looks_up and strategy != "rejection"
        most = 1 + (topk + (num_steps - 1) * topk**2 if has_beams else topk * num_steps)
        assert default_nodes(64, topk, num_steps, fields) == min(64, most)
        made, tree = EAGLEConfig(**sizes, **fields), EAGLEConfig.tree(**sizes, **fields)
        assert made.num_verify_tokens == min(32, most) and tree.num_verify_tokens == min(64, most)
        assert tree == EAGLEConfig(**sizes, **fields, num_draft_tokens=min(64, most))
        given = dataclasses.replace(made, num_draft_tokens=made.num_verify_tokens)
        assert dataclasses.replace(given, num_draft_tokens=None) == made
        if topk == 1:
            assert EAGLEConfig.chain(num_steps, **fields).num_verify_tokens == min(32, most)
        if (topk, num_steps) == (8, 5):
            assert EAGLEConfig(**fields) == made and EAGLEConfig.tree(**fields) == tree
        with pytest.raises(ValueError, match=rf"num_draft_tokens must lie in 2..min.* = {min(256, most)} for topk="):
            EAGLEConfig(**sizes, **fields, num_draft_tokens=most + 1)


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 255), (2, 255), (4, 129), (8, 64), (16, 16)])
def test_the_deepest_trees_that_the_ops_hold(topk, num_steps):
    config = EAGLEConfig(topk=topk, num_steps=num_steps)
    assert topk + (num_steps - 1) * topk**2 <= MAX_CANDIDATES
    assert (num_steps - 1) * topk <= MAX_DRAFT_KEYS and num_steps + 1 <= MAX_QUERY
    with pytest.raises(ValueError, match=rf"num_steps must lie in 1..{num_steps} for topk={topk}, got {num_steps + 1}"):
        dataclasses.replace(config, num_steps=num_steps + 1)


def test_a_mean_accept_length_becomes_rates():
    for mean, rates in ((1.0, [0, 0, 0]), (1.25, [0.25, 0, 0]), (2.75, [1, 0.75, 0]), (4.0, [1, 1, 1])):
        assert EAGLEConfig.chain(3, simulated_accept_length=mean).simulated_rates == rates
    assert EAGLEConfig().simulated_rates is None
    assert EAGLEConfig(**SIMULATE, simulated_accept_length=3.5).simulated_rates == [1, 1, 0.5, 0, 0]
    rates = (0.9, 0.5, 0.5, 0, 0)
    assert EAGLEConfig(**SIMULATE, simulated_accept_rates=rates).simulated_rates == list(rates)
    assert EAGLEConfig(simulated_accept_length=2) == EAGLEConfig(**SIMULATE, simulated_accept_length=2)
    assert EAGLEConfig(simulated_accept_rates=rates).accept_policy == "simulate"


def test_lists_become_tuples():
    """Steps are found by what is in there, so it must have a hash."""
    for lists, tuples in (
        ({"adaptive": [[8, [1, 3, 4]], [32, None]]}, {"adaptive": ((8, (1, 3, 4)), (32, None))}),
        ({"adaptive": [[numpy.int64(8), numpy.array([1, 3, 4])]]}, {"adaptive": ((8, (1, 3, 4)),)}),
        ({"page_size": numpy.int32(8)}, {"page_size": 8}),
        ({"simulated_accept_rates": torch.tensor([1, 1, 0.5, 0, 0])}, {"simulated_accept_rates": (1, 1, 0.5, 0, 0)}),
        ({"simulated_accept_rates": [1, 1, 0.5, 0, 0]}, {"simulated_accept_rates": (1, 1, 0.5, 0, 0)}),
    ):
        assert EAGLEConfig(**lists) == EAGLEConfig(**tuples) and hash(EAGLEConfig(**lists))


@pytest.mark.parametrize("num_drafts", [None, 2.0, "3", 0])
def test_a_chain_has_a_number_of_drafts(num_drafts):
    with pytest.raises(ValueError, match="EAGLEConfig.chain: num_drafts must be an int of at least 1, got "):
        EAGLEConfig.chain(num_drafts)


def test_trees_of_a_table_are_checked_as_one_s_own():
    config = EAGLEConfig(topk=1, num_steps=3, adaptive=((8, (1, 3, None)), (32, None)))
    assert [tree and tree.num_verify_tokens for _, tree in config.trees] == [4, None]
    with pytest.raises(ValueError, match="num_steps must be an int, got '5'"):
        EAGLEConfig(adaptive=((8, (1, "5", 6)),))
    rates = EAGLEConfig.chain(3, simulated_accept_rates=(1, 0.5, 0.5), adaptive=((4, (1, 5, 6)), (8, (1, 5, 3))))
    assert [tree.simulated_accept_rates for _, tree in rates.trees] == [(1, 0.5, 0.5, 0, 0), (1, 0.5, 0, 0, 0)]


def size_of(entry) -> tuple[int, ...]:
    """Three numbers of a tree, and the fourth one if its rows are shared."""
    _, tree = entry
    sizes = tree.topk, tree.num_steps, tree.num_draft_tokens
    return sizes if tree.mean_draft_tokens is None else (*sizes, tree.mean_draft_tokens)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, [(1, 1, 2), (1, 3, 4), (8, 5, 32, 8), (8, 5, 32, 16), (8, 5, 32)]),
        ({"num_draft_tokens": 12}, [(1, 1, 2), (1, 3, 4), (8, 5, 12, 8), (8, 5, 12)]),
        ({"num_draft_tokens": 8}, [(1, 1, 2), (1, 3, 4), (8, 5, 8)]),
        ({"num_draft_tokens": 4}, [(1, 1, 2), (8, 5, 4)]),
        ({"num_steps": 3, "num_draft_tokens": 9}, [(1, 1, 2), (1, 3, 4), (8, 3, 9, 8), (8, 3, 9)]),
        ({"topk": 1}, [(1, 1, 2), (1, 3, 4), (1, 5, 6)]),
        ({"topk": 1, "num_steps": 2}, [(1, 1, 2), (1, 2, 3)]),
        ({"mean_draft_tokens": 12}, [(1, 1, 2), (1, 3, 4), (8, 5, 32, 8), (8, 5, 32, 12)]),
        ({"mean_draft_tokens": 3}, [(1, 1, 2), (8, 5, 32, 3)]),
        ({"method": "ngram"}, [(1, 1, 2), (1, 3, 4), (4, 3, 8), (4, 4, 16), (8, 5, 32)]),
        ({"method": "ngram", "topk": 3, "num_steps": 6}, [(1, 1, 2), (1, 3, 4), (3, 6, 19)]),
        ({"verify_strategy": "rejection"}, [(1, 1, 2), (1, 3, 4), (4, 3, 8), (4, 4, 16), (8, 5, 32)]),
        ({"tree_mask_mode": "qlen_only"}, [(1, 1, 2), (1, 3, 4), (4, 3, 8), (4, 4, 16), (8, 5, 32)]),
    ],
)
def test_trees_of_an_automatic_choice(fields, sizes):
    config = EAGLEConfig(**fields, adaptive="auto")
    sized = [dataclasses.replace(tree, num_draft_tokens=tree.num_verify_tokens) for _, tree in config.trees]
    assert [size_of((None, tree)) for tree in sized] == sizes


def test_a_gpu_chooses_the_tree_if_none_is_asked_for():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert EAGLEConfig().on(gpu) == EAGLEConfig(adaptive="auto") and EAGLEConfig().on(cpu) == EAGLEConfig()
    assert EAGLEConfig(temperature=0.7, max_batch=3, method="eagle", max_spec_batch=4).on(gpu).adaptive == "auto"
    for fields in ({"topk": 4}, {"num_steps": 4}, {"num_draft_tokens": 32}, {"mean_draft_tokens": 4},
                   {"adaptive": ((8, (1, 3, 4)),)}, {"method": "ngram"}, {"method": ("eagle", "ngram")},
                   {"verify_strategy": "rejection"}, {"verify_strategy": "typical"}, {"accept_policy": "accept_all"},
                   {"simulated_accept_length": 2.0}):  # fmt: skip
        assert EAGLEConfig(**fields).on(gpu) == EAGLEConfig(**fields), fields


def test_each_tree_may_accept_as_it_does_by_itself():
    lengths = (((1, 1, 2), 1.7), ((1, 3, 4), 2.6), ((8, 5, 64, 8), 3), ((8, 5, 64, 16), 3.5), ((8, 5, 64), 4.0))
    config = EAGLEConfig.tree(adaptive="auto", simulated_accept_lengths=[*map(list, lengths)])
    assert config.accept_policy == "simulate"
    assert [*lengths] == [(size_of(entry), entry[1].simulated_accept_length) for entry in config.trees]
    table = EAGLEConfig(adaptive=((8, (1, 3, 4)), (16, None)), simulated_accept_lengths=(((1, 3, 4), 2.6),))
    assert [tree and tree.simulated_rates for _, tree in table.trees] == [pytest.approx([1, 0.6, 0]), None]


@pytest.mark.parametrize("adaptive", ["auto", ((8, (1, 3, 4)), (16, (1, 1, 2)), (32, None))])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adaptive": None}, "must come with adaptive; without it give simulated_accept_length"),
        ({"simulated_accept_lengths": ()},
         r"have a number for each tree of adaptive, also for \(1, 1, 2\), \(1, \d, \d"),
        ({"simulated_accept_lengths": (1.7,)}, r"be pairs of a tree \(topk, num_steps, .* each tree once, got"),
        ({"simulated_accept_lengths": (((1, 1, (2,)), 1.7),)}, "be pairs of a tree"),
        ({"simulated_accept_lengths": (((1, 1, 2), None),)}, "be pairs of a tree"),
        ({"simulated_accept_lengths": (((1, 1, 2), 1.5), ((1, 1, 2), 1.7))}, "each tree once"),
        ({"more": (((1, 2, 3), 1.7),)}, r"name only trees of adaptive, not \(1, 2, 3\)"),
        ({"wrong": (1, 1, 2)}, r"simulated_accept_lengths must be at most 2 for the tree \(1, 1, 2\)"),
        ({"simulated_accept_length": 2.0}, "accept_policy must come with one of simulated_accept_length, .*_lengths, "),
        ({"accept_policy": "accept_all"}, "simulated_accept_lengths must come with accept_policy='simulate'"),
    ],
)  # fmt: skip
def test_bad_lengths_of_trees_are_named(adaptive, change, message):
    known = {(1, 1, 2): 1.7, (1, 3, 4): 2.6, (8, 5, 64, 8): 3, (8, 5, 64, 16): 3.5, (8, 5, 64): 4.0}
    trees = list(known) if adaptive == "auto" else [tree for _, tree in adaptive if tree]
    change, lengths = dict(change), {tree: known[tree] for tree in trees}
    more, wrong = change.pop("more", ()), change.pop("wrong", None)
    lengths |= {wrong: 9} if wrong else {}
    values = {"adaptive": adaptive, "simulated_accept_lengths": (*lengths.items(), *more)} | change
    with pytest.raises(ValueError, match=message):
        EAGLEConfig.tree(**values)


@pytest.mark.parametrize("method", [None, "ngram", "hybrid", ("eagle", "hybrid")])
def test_trees_are_known_to_be_good_when_a_config_is_made(method):
    for topk, num_steps, num_draft_tokens, num_model_steps in itertools.product(
        (1, 8), (1, 2, 5), (None, 2, 16), (None, 1)
    ):
        try:
            config = EAGLEConfig(
                topk, num_steps, num_draft_tokens, method=method, num_model_steps=num_model_steps, adaptive="auto"
            )
        except ValueError:
            continue
        for takes_rows in (True, False):  # none asks more of a draft than one's own does
            trees = [tree for _, tree in config.trees_for(takes_rows)]
            assert all(tree.topk <= topk and tree.num_steps <= num_steps for tree in trees) and trees


# another value of each field, after those of others that it needs
OTHERS = {
    "topk": 3, "num_steps": 2, "num_draft_tokens": 5, "mean_draft_tokens": 4, "method": "ngram", "share_nodes": True,
    "max_ngram_size": 3,
    "min_ngram_size": 1, "ngram_prefer": "earliest", "num_model_steps": 2, "suffix_decoding_max_tree_depth": 9,
    "suffix_decoding_max_cached_requests": 2, "suffix_decoding_max_spec_factor": 0.5,
    "suffix_decoding_min_token_prob": 0.5, "verify_strategy": "typical", "max_candidate_len": 3, "verify_window": 1,
    "typical_epsilon": 0.2, "typical_delta": 0.5, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1,
    "eos_token_ids": (3,), "max_length": 50, "page_size": 4, "tree_mask_mode": "qlen_only", "max_batch": 2,
    "kv_cache_bytes": 1 << 17, "prefill_chunk": 7, "share_prefixes": False, "max_step_ms": 5.0, "deterministic": True,
    "cuda_graph": False, "phase_times": False, "max_spec_batch": 1, "adaptive": ((9, (1, 2, 3)),),
    "accept_policy": "reject_all", "simulated_accept_length": 2.0, "simulated_accept_lengths": (((1, 2, 3), 2.0),),
    "simulated_accept_rates": (0.9, 0.5, 0.1), "repetition_penalty": 1.5, "frequency_penalty": -0.5,
    "presence_penalty": 0.5, "min_new_tokens": 1, "stop_token_ids": (5,), "stop": ("E",), "ignore_eos": True,
    "logprobs": "raw", "top_logprobs": 2, "logprob_start_len": 1, "drafter": "draft_model",
}  # fmt: skip
NEEDED = {
    "num_model_steps": {"method": "hybrid", "topk": 1, "num_model_steps": 1},
    "simulated_accept_lengths": {"adaptive": ((9, (1, 2, 3)),)},
    "share_nodes": {"method": ("ngram", "suffix")},
    **{name: {"method": "suffix"} for name in OTHERS if name.startswith("suffix")},
    **{name: {"method": "ngram"} for name in OTHERS if "ngram" in name},
    **{name: {"verify_strategy": "typical"} for name in OTHERS if name.startswith("typical")},
    **{name: {"verify_strategy": "topp"} for name in ("max_candidate_len", "verify_window")},
}


@pytest.fixture(scope="module")
def engine():
    target = RowWalker()
    config = EAGLEConfig(topk=2, num_steps=3, max_batch=4, method="draft_model")
    return EAGLEInference(target, target, config, tokenizer=LetterTokenizer())


def in_use(engine, name, fields):
    """The value of a field by which a call with these fields has just run."""
    stream = engine.stream([1, 2], 3, **fields)
    assert [*stream]
    scheduler, (request,) = View(engine).scheduler, stream.requests
    state, runners = scheduler.state, scheduler.plan.runners
    if name in SAMPLING_FIELDS:
        return getattr(request.params, name)
    if name == "max_length":  # refuses what is longer
        with contextlib.suppress(ValueError):
            engine.stream([1] * 40, 20, **fields).close()
            return None
        return OTHERS[name]
    if name == "kv_cache_bytes":
        pools = [pool for pool in (state.target_pool, state.draft_pool) if pool is not None]
        num_bytes = sum(pool.k_cache.nbytes + pool.v_cache.nbytes for pool in pools)
        return OTHERS[name] if num_bytes <= OTHERS[name] else None
    places = {
        "eos_token_ids": lambda: tuple(request.end_token_ids) or None,
        "page_size": lambda: state.target_pool.page_size,
        "max_batch": lambda: state.num_rows,
        "prefill_chunk": lambda: scheduler.reading._prefill_chunk,
        "share_prefixes": lambda: scheduler.reading.shares_prefixes,
        "max_step_ms": lambda: scheduler.reading.pace._max_step_ms,
    }
    if name in places:
        return places[name]()
    # trees of a choice have a part of it each
    is_whole = name in ("adaptive", "max_spec_batch", "num_draft_tokens", "simulated_accept_lengths")
    (value,) = {getattr(runner.stepper.config, name) for runner in runners[: 1 if is_whole else None]}
    return value


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_has_its_own_values_and_the_next_one_those_of_the_engine(engine, name, monkeypatch):
    """The steps that run know each field as it was given for them."""
    monkeypatch.setattr("eagle_kernels.engine.serve.session.check_deterministic", lambda *_: None)  # a CPU refuses it
    own = getattr(engine.config if name in CONFIG_FIELDS else SamplingParams(), name)
    needed = NEEDED.get(name, {})
    calls = ({}, needed, needed | {name: OTHERS[name]}, needed, {})
    assert [in_use(engine, name, fields) for fields in calls] == [fields.get(name, own) for fields in calls]
    # the limit and the seed are arguments of their own
    of_loading = {"quantize", "draft_quantize"}  # a call cannot change how weights were loaded
    of_halves = {"kv_cache_dtype"}  # a model in fp32 has one value alone: test_kv_types.py
    fields = {*CONFIG_FIELDS, *SAMPLING_FIELDS} - {"max_new_tokens", "seed"} - of_loading - of_halves
    assert own != OTHERS[name] and OTHERS.keys() == fields


def test_prompts_that_are_cut_otherwise_share_no_pages(engine):
    """Their keys may have other bits."""
    pages = []
    for chunk in (4, 4, 8):
        engine.generate([1, 2], 3, prefill_chunk=chunk)
        pages.append(View(engine).scheduler.pages)
    assert pages[0] is pages[1] is not pages[2]


def test_a_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EAGLEConfig().topk = 4
    engine = EAGLEInference(None, ToyModel(), {"method": "ngram"})
    for config in ({"topk": 2}, EAGLEConfig(2), None):
        with pytest.raises(AttributeError, match="property 'config' of 'EAGLEInference' object has no setter"):
            engine.config = config


ODD = {"digits": 10**5000, "array": numpy.array(["a", "b"]), "tensor": torch.ones(9, 9), "dict": {0: 1}, "list": [[{}]]}


@pytest.mark.parametrize("kind", [EAGLEConfig, SamplingParams])
@pytest.mark.parametrize("odd", ODD)
def test_values_of_any_type_are_refused_in_one_line(kind, odd):
    """By the class that has the field, which is named with the rule."""
    for field in dataclasses.fields(kind):
        if (field.name, odd) != ("stop", "array"):  # which is fine
            assert re.match(rf"{kind.__name__}: \w+ must .*, got ", refused(kind, **{field.name: ODD[odd]})), field.name
