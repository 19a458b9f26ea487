"""The attention backend of the vLLM plug-in on made batches, beside plain softmax attention over listed slots."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from op_tests.integrations import vllm_stub as stub
from op_tests.integrations.stand_in import attend
from op_tests.ops.attention.cases import fp8_of

HEADS, KV_HEADS, HEAD_DIM, MOST_REQUESTS, DRAFTS = 4, 2, 16, 8, 3


@pytest.fixture(params=stub.NAMES)
def attention(request):
    with stub.vllm(request.param):
        yield importlib.import_module("eagle_kernels.integrations.vllm.attention")


@pytest.fixture(params=stub.FORMS)
def on_hopper(request):
    with stub.installed(stub.form(request.param).HOPPER):
        yield importlib.import_module("eagle_kernels.integrations.vllm.attention")


def builder_of(attention, device, drafts: int = DRAFTS):
    config = SimpleNamespace(
        num_speculative_tokens=drafts, speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=MOST_REQUESTS),
        # what vLLM's own builder reads
        parallel_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=None, static_forward_context={}),
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS, get_num_kv_heads=lambda parallel: KV_HEADS,
            get_head_size=lambda: HEAD_DIM, rswa_window=None,
        ),
    )  # fmt: skip
    spec = SimpleNamespace(block_size=16)
    return attention.EagleKernelsBuilder(spec, ["layer"], config, torch.device(device))


def impl_of(attention, *, window=None, cap=None, sinks=None, kv="auto", kind="DECODER", slopes=None, **options):
    kind = getattr(attention.AttentionType, kind)
    return attention.EagleKernelsImpl(
        HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, slopes, window, kv, cap, kind, None, sinks, **options
    )


class Cache:
    """A layer's pages as vLLM lays them out: slots before heads in memory, and a head's value after its key."""

    def __init__(self, device, page_size=16, dtype=torch.float32, scales=None, longest=128):
        self.page_size, self.scales, self.device = page_size, scales or (1.0, 1.0), device
        num_pages = MOST_REQUESTS * -(-longest // page_size)
        shape = (num_pages, page_size, KV_HEADS, 2 * HEAD_DIM)
        if scales is None:
            pages = torch.randn(shape, device=device).to(dtype)
            self.keys, self.values = pages.split(HEAD_DIM, -1)
        else:  # vLLM keeps floats of 8 bits as bytes
            floats = torch.randn(shape, device=device).to(fp8_of(device))
            self.keys, self.values = floats.double().split(HEAD_DIM, -1)
            pages = floats.view(torch.uint8)
        self.pages = pages.transpose(1, 2)
        self.table = torch.randperm(num_pages).view(MOST_REQUESTS, -1).to(device, torch.int32)
        names = ("_k_scale", "_v_scale")
        self.layer = SimpleNamespace(**{name: torch.tensor(x, device=device) for name, x in zip(names, self.scales)})

    def wanted(self, impl, query, rows, lengths) -> torch.Tensor:
        """Attention of each request's last rows, each of which sees what is before it and itself."""
        seen, window = [], impl.sliding_window[0] + 1  # vLLM's word for none is -1
        for request, (count, length) in enumerate(zip(rows, lengths)):
            slots = self.table[request].long()[:, None] * self.page_size + torch.arange(self.page_size).to(self.device)
            for stop in range(length - count + 1, length + 1):
                seen.append(slots.flatten()[max(0, stop - (window or stop)) : stop])
        keys, values = (
            each.double().reshape(-1, KV_HEADS, HEAD_DIM) * torch.tensor(scale).double().view(-1, 1)
            for each, scale in zip((self.keys, self.values), self.scales)
        )
        return attend(query, keys, values, seen, scale=impl.scale, cap=impl.logits_soft_cap, sinks=impl.sinks)


def common_of(attention, cache, rows, lengths, num_tokens=None, **changes):
    """What vLLM says of a step: each request's rows, and its length with them."""
    common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    bounds = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    device, num_tokens = cache.device, sum(rows) if num_tokens is None else num_tokens
    fields = {
        "query_start_loc": bounds.to(device), "query_start_loc_cpu": bounds, "num_reqs": len(rows),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device), "num_actual_tokens": num_tokens,
        "max_query_len": max(rows), "max_seq_len": max(lengths), "block_table_tensor": cache.table[: len(rows)],
        "slot_mapping": torch.zeros(num_tokens, dtype=torch.int64, device=device),
    }  # fmt: skip
    return common(**fields | changes)


def forward(impl, cache, metadata, num_tokens, dtype=torch.float32, **options):
    """Calls a layer on random rows; returns the query and the output, of which rows beyond the step keep 7."""
    query = torch.randn(num_tokens, HEADS, HEAD_DIM, device=cache.device).to(dtype)
    output = torch.full_like(query, 7.0)
    result = impl.forward(cache.layer, query, None, None, cache.pages, metadata, output, **options)
    assert result.data_ptr() == output.data_ptr()
    return query, output


def check(attention, cache, impl, rows, lengths, drafts=DRAFTS, dtype=torch.float32, num_tokens=None):
    """Holds a step against attention over the slots that its rows see; returns the Rows."""
    metadata = builder_of(attention, cache.device, drafts).build(
        0, common_of(attention, cache, rows, lengths, num_tokens)
    )
    query, output = forward(impl, cache, metadata, (num_tokens or sum(rows)) + 2, dtype)
    count = sum(rows)
    wanted = cache.wanted(impl, query[:count], rows, lengths)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(output[:count].double(), wanted, rtol=0, atol=tolerance)
    assert (output[num_tokens or count :] == 7).all()
    found = metadata.eagle_kernels
    assert found.prompt_lens is None or found.prompt_lens.data_ptr() % 16 == 0  # else kernels are compiled anew
    return found


# rows of each request, and lengths with them
STEPS = {
    "decode": ([1, 1, 1], [9, 1, 100]),
    "verify": ([4, 4, 4], [4, 33, 100]),
    "ragged": ([4, 1, 3, 2], [9, 33, 100, 2]),
    "mixed": ([4, 1, 30, 20], [5, 33, 40, 20]),
    "prompts": ([30, 7], [30, 64]),
    "a short prompt after a long one": ([4, 30, 2], [9, 40, 2]),
    "one request": ([3], [3]),
}
FEATURES = [
    {}, {"window": 1}, {"window": 5}, {"window": 64}, {"cap": 2.0}, {"sinks": True},
    {"window": 7, "cap": 1.5, "sinks": True},
]  # fmt: skip


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_steps(attention, step, features, backend, device):
    sinks = torch.linspace(-1, 2, HEADS, device=device) if features.get("sinks") else None
    check(attention, Cache(device), impl_of(attention, **(features | {"sinks": sinks})), *STEPS[step])


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("step", ["decode", "verify", "mixed"])
def test_pages(attention, step, page_size, backend, device):
    check(attention, Cache(device, page_size), impl_of(attention), *STEPS[step])


@pytest.mark.parametrize("scales", [(0.5, 0.25), ([0.5, 2.0], [0.25, 1.5])], ids=["of all heads", "per head"])
@pytest.mark.parametrize("kv", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("step", ["decode", "verify", "mixed"])
def test_keys_of_8_bits(attention, step, kv, scales, device):
    cache = Cache(device, scales=scales)
    check(attention, cache, impl_of(attention, kv=kv), *STEPS[step], dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_of_16_bits(attention, dtype, device):
    cache = Cache(device, dtype=dtype)
    metadata = builder_of(attention, device).build(0, common_of(attention, cache, *STEPS["verify"]))
    impl = impl_of(attention)
    query, output = forward(impl, cache, metadata, 12, dtype)
    wanted = cache.wanted(impl, query, *STEPS["verify"])
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=3e-3 if dtype == torch.float16 else 2e-2)


@pytest.mark.parametrize("drafts", [0, 1, 3, 7, 300])
@pytest.mark.parametrize("step", STEPS)
def test_any_number_of_drafts(attention, step, drafts, device):
    """Which rows count as drafts is a matter of speed alone."""
    check(attention, Cache(device), impl_of(attention), *STEPS[step], drafts=drafts)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("decode", (3, 3, 1, None)), ("verify", (3, 12, 4, None)), ("ragged", (4, 10, 4, None)),
        ("mixed", (2, 5, 4, [0, 30, 50])), ("prompts", (0, 0, 4, [0, 30, 37])),
        ("a short prompt after a long one", (1, 4, 4, [0, 30, 32])), ("one request", (1, 3, 3, None)),
    ],
)  # fmt: skip
def test_which_rows_are_short(attention, step, expected, device):
    cache = Cache(device)
    rows = builder_of(attention, device).build(0, common_of(attention, cache, *STEPS[step])).eagle_kernels
    prompts = None if rows.prompt_bounds is None else rows.prompt_bounds.tolist()
    assert (rows.num_requests, rows.num_tokens, rows.max_query, prompts) == expected


@pytest.mark.parametrize("padded", [1, 4])
@pytest.mark.parametrize("features", [{}, {"window": 5}], ids=str)
def test_padded_requests_of_a_graph_of_drafts_have_no_rows(attention, features, padded, device):
    """vLLM's bounds stand still at the end of them, and their lengths are 0; the graph's tokens are padded too."""
    rows, lengths = [4, 4] + [0] * padded, [33, 9] + [0] * padded
    found = check(attention, Cache(device), impl_of(attention, **features), rows, lengths, num_tokens=4 * len(rows))
    assert found.num_requests == 2 + padded and found.prefix_lens.tolist() == [29, 5] + [0] * padded


def test_steps_that_vllm_makes_up_have_no_prefix(attention, device):
    """Those before graphs are captured: with rows, and no lengths."""
    made = builder_of(attention, device).build(0, common_of(attention, Cache(device), [4, 4, 2], [0, 2, 9]))
    assert made.eagle_kernels.prefix_lens.tolist() == [0, 0, 7]


@pytest.mark.parametrize("features", [{}, {"window": 5}], ids=str)
def test_padded_requests_of_a_graph_of_plain_decoding(attention, features, device):
    check(attention, Cache(device), impl_of(attention, **features), [1, 1, 0, 0], [33, 9, 0, 0], num_tokens=4)


@pytest.mark.parametrize("step", ["decode", "verify"])
def test_a_graph_reads_the_same_buffers_in_every_step(attention, step, device):
    """What a layer reads in a replay was written by the latest build."""
    cache, builder, impl = Cache(device), builder_of(attention, device), impl_of(attention)
    rows, lengths = STEPS[step]
    common = common_of(attention, cache, rows, [max(rows)] * len(rows))
    captured = builder.build(0, common)
    addresses = [getattr(captured.eagle_kernels, name).data_ptr() for name in ("prefix_lens", "plan", "bounds")]
    common.seq_lens.copy_(torch.tensor(lengths, device=device))  # vLLM's own buffer
    again = builder.build(0, common)
    assert addresses == [getattr(again.eagle_kernels, name).data_ptr() for name in ("prefix_lens", "plan", "bounds")]
    query, output = forward(impl, cache, captured, sum(rows))
    torch.testing.assert_close(output.double(), cache.wanted(impl, query, rows, lengths), rtol=0, atol=2e-5)


@pytest.mark.parametrize("place", ["here", "on hopper"])
@pytest.mark.parametrize("step", ["decode", "verify"])
def test_a_graph_of_several_drafts_builds_once(step, place, device):
    """vLLM 0.33 captures an update of the metadata for each draft, and changes lengths in place between them."""
    newer = stub.form("0.33")
    with stub.installed(newer.HOPPER if place == "on hopper" else newer.MODULES):
        attention = importlib.import_module("eagle_kernels.integrations.vllm.attention")
        cache, builder, impl = Cache(device), builder_of(attention, device), impl_of(attention)
        rows, lengths = STEPS[step]
        common = common_of(attention, cache, rows, [max(rows)] * len(rows))
        metadata = builder.build(0, common)
        assert builder.supports_draft_decode_metadata_update
        addresses = [getattr(metadata.eagle_kernels, name).data_ptr() for name in ("prefix_lens", "plan", "bounds")]
        for more in (0, 1, 28):  # the last one changes the plan
            common.seq_lens.copy_(torch.tensor(lengths, device=device) + more)
            builder.update_draft_decode_metadata(metadata)
            assert builder.updated is metadata  # vLLM's own part of it
            query, output = forward(impl, cache, metadata, sum(rows))
            wanted = cache.wanted(impl, query, rows, [length + more for length in lengths])
            torch.testing.assert_close(output.double(), wanted, rtol=0, atol=2e-5)
            again = builder_of(attention, device).build(0, common).eagle_kernels
            assert torch.equal(metadata.eagle_kernels.plan, again.plan)
        found = [getattr(metadata.eagle_kernels, name).data_ptr() for name in ("prefix_lens", "plan", "bounds")]
        assert found == addresses


def test_an_update_of_steps_that_are_vllm_s_is_vllm_s(device):
    with stub.installed(stub.form("0.33").MODULES):
        attention = importlib.import_module("eagle_kernels.integrations.vllm.attention")
        builder = builder_of(attention, device)
        common = common_of(attention, Cache(device), *STEPS["verify"], causal=False)
        metadata = builder.build(0, common)
        builder.update_draft_decode_metadata(metadata)
        assert metadata.eagle_kernels is None and builder.updated is metadata


def test_as_many_requests_as_vllm_runs_and_pads(attention, device):
    """vLLM pads the graph of a whole batch; the buffers have places for that."""
    builder = builder_of(attention, device)
    assert len(builder._prefix_lens) == 2 * MOST_REQUESTS and len(builder._plan) == 2 * MOST_REQUESTS + 1
    check(attention, Cache(device), impl_of(attention), [4] * MOST_REQUESTS, range(4, 4 + MOST_REQUESTS))


def test_graphs_are_of_uniform_batches(attention):
    """The graph of a mixed batch would keep the way in which its capture split the rows."""
    assert attention.EagleKernelsBuilder._cudagraph_support.name == "UNIFORM_BATCH"


def test_random_steps(attention, device):
    coin = torch.Generator().manual_seed(5)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=coin))  # noqa: E731
    for _ in range(12):
        short = [draw(1, 5) for _ in range(draw(0, 4))]
        rows = short + [draw(5, 40) for _ in range(draw(0 if short else 1, 3))]
        lengths = [count + draw(0, 60) for count in rows]
        window = None if draw(0, 2) else draw(1, 50)
        check(attention, Cache(device, 2 ** draw(4, 7)), impl_of(attention, window=window), rows, lengths)


# what goes to vLLM's own class


class Passed(Exception):
    pass


@pytest.fixture
def passes(monkeypatch):
    """`passes(attention, impl, ...)` tells whether a step went to the class below, with all that was given."""

    def run(attention, impl, cache, metadata, num_tokens=3, dtype=torch.float32, **options):
        def below(self, *arguments):
            raise Passed(arguments)

        monkeypatch.setattr(attention.Implementation, "forward", below)
        try:
            forward(impl, cache, metadata, num_tokens, dtype, **options)
        except Passed as passed:
            (given,) = passed.args
            wanted = (options.get("output_scale"), options.get("output_block_scale"))
            assert given[0] is cache.layer and given[4] is cache.pages and given[5] is metadata and given[7:] == wanted
            return True
        return False

    return run


DECODE = STEPS["decode"]


@pytest.mark.parametrize(
    ("prefix", "changes", "is_ours"),
    [
        (0, {}, True), (0, {"causal": False}, False), (0, {"causal": torch.tensor(True)}, False),
        (0, {"mm_req_doc_ranges": {0: [(1, 3)]}}, False), (16, {}, False),
    ],
)  # fmt: skip
def test_steps_that_are_not_causal_or_share_a_prefix_are_vllm_s(
    attention, passes, monkeypatch, prefix, changes, is_ours, device
):
    """vLLM plans nothing for its own kernel in steps that are ours."""
    built, cache = [], Cache(device)
    monkeypatch.setattr(
        attention.Builder, "build", lambda self, *given: built.append(given) or SimpleNamespace(**vars(given[1]))
    )
    common = common_of(attention, cache, [1, 1, 1], [33, 40, 50], **changes)
    metadata = builder_of(attention, device).build(prefix, common)
    metadata.block_table = common.block_table_tensor
    assert built == [(prefix, common, is_ours)] and (metadata.eagle_kernels is not None) == is_ours
    assert passes(attention, impl_of(attention), cache, metadata) != is_ours


@pytest.mark.parametrize(
    "features",
    [
        {"kind": "ENCODER_ONLY"}, {"slopes": [0.5] * HEADS}, {"kv": "fp8_e5m2"}, {"kv": "int8_per_token_head"},
        {"chunk_lookback": 2},
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_ours_lacks_are_vllm_s(attention, passes, features, device):
    cache = Cache(device)
    metadata = builder_of(attention, device).build(0, common_of(attention, cache, *DECODE))
    impl = impl_of(attention, **features)
    assert not impl.is_ours and passes(attention, impl, cache, metadata)


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_outputs_of_8_bits_are_vllm_s(attention, passes, name, device):
    cache = Cache(device)
    metadata = builder_of(attention, device).build(0, common_of(attention, cache, *DECODE))
    assert passes(attention, impl_of(attention), cache, metadata, **{name: torch.ones(1, device=device)})


def test_queries_of_8_bits_and_runs_without_a_batch_are_vllm_s(attention, passes, device):
    cache = Cache(device)
    metadata = builder_of(attention, device).build(0, common_of(attention, cache, *DECODE))
    assert passes(attention, impl_of(attention), cache, metadata, dtype=torch.float8_e4m3fn)
    assert passes(attention, impl_of(attention), cache, None)  # vLLM measures memory so
    assert not passes(attention, impl_of(attention), cache, metadata)


def test_a_backend_that_vllm_knows_as_its_own(attention):
    backend = attention.EagleKernelsBackend
    assert backend.get_name() in stub.BACKEND.values() and issubclass(backend, attention.Backend)
    assert backend.get_impl_cls() is attention.EagleKernelsImpl
    assert backend.get_builder_cls() is attention.EagleKernelsBuilder
    assert backend.get_supported_kernel_block_sizes() == [16, 32, 64, 128, 256]  # vLLM splits pages of 48 into 16
    assert not impl_of(attention).supports_quant_query_input  # nobody rounds queries for ours


# where FlashAttention 3 reads all rows of steps with prompts


@pytest.mark.parametrize("step", STEPS)
def test_on_hopper_steps_with_prompts_are_vllm_s(on_hopper, passes, step, device):
    assert on_hopper.READS_MIXED
    cache, impl = Cache(device), impl_of(on_hopper)
    if step in ("decode", "verify", "ragged", "one request"):
        check(on_hopper, cache, impl, *STEPS[step])
        return
    rows, lengths = STEPS[step]
    metadata = builder_of(on_hopper, device).build(0, common_of(on_hopper, cache, rows, lengths))
    assert metadata.eagle_kernels is None and passes(on_hopper, impl, cache, metadata, sum(rows))


@pytest.mark.parametrize("reads_trees", [True, False])
def test_on_hopper_steps_with_trees_and_prompts_are_ours(on_hopper, reads_trees, device):
    """The layers of the target read trees; those of a draft, whose rows are in line by then, do not."""
    cache, impl, builder = Cache(device), impl_of(on_hopper), builder_of(on_hopper, device)
    rows, lengths = STEPS["mixed"]
    mask = torch.ones(sum(rows), 1, dtype=torch.int64, device=device)  # all see the root alone
    builder.trees, impl.reads_trees = SimpleNamespace(current="trees", row_mask=mask), reads_trees
    metadata = builder.build(0, common_of(on_hopper, cache, rows, lengths))
    query, output = forward(impl, cache, metadata, sum(rows))
    wanted = cache.wanted(impl, query, rows, lengths)
    is_same = torch.isclose(output.double(), wanted, rtol=0, atol=2e-5).all(2).all(1)
    # the first rows of the two short requests, and all rows of prompts
    assert is_same.tolist() == [True] + [not reads_trees] * 3 + [True] * (sum(rows) - 4)
    builder.trees.current = None
    assert builder.build(0, common_of(on_hopper, cache, rows, lengths)).eagle_kernels is None


@pytest.mark.parametrize("variable", ["ours", ""])
def test_prompts_may_be_ours_on_hopper(monkeypatch, variable):
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_PROMPTS", variable)
    with stub.installed(stub.HOPPER):
        assert (variable != "ours") == importlib.import_module("eagle_kernels.integrations.vllm.attention").READS_MIXED


@pytest.mark.parametrize(("head_size", "expected"), [(128, [16, 32, 64, 128, 256]), (512, [64])])
def test_pages_of_heads_for_which_vllm_s_kernel_takes_one_size(head_size, expected):
    with stub.installed(stub.form("0.33").HOPPER):
        backend = importlib.import_module("eagle_kernels.integrations.vllm.attention").EagleKernelsBackend
        assert backend.get_supported_kernel_block_sizes(SimpleNamespace(head_size=head_size)) == expected


def test_on_hopper_queries_of_8_bits_stay(on_hopper):
    assert impl_of(on_hopper, kv="fp8").supports_quant_query_input


@pytest.mark.parametrize(
    ("capability", "is_built", "version", "expected"),
    [
        (90, True, 3, "FLASH_ATTN"), (90, False, 3, "TRITON_ATTN"), (90, True, 2, "TRITON_ATTN"),
        (80, True, 3, "TRITON_ATTN"), (100, True, 4, "TRITON_ATTN"), (0, True, 3, "TRITON_ATTN"),
    ],
)  # fmt: skip
def test_who_reads_prompts(capability, is_built, version, expected):
    utils = {"is_flash_attn_varlen_func_available": lambda: is_built, "get_flash_attn_version": lambda: version}
    modules = stub.HOPPER | {
        "vllm.platforms": {"current_platform": stub.platform(capability)},
        "vllm.v1.attention.backends.fa_utils": utils,
    }
    with stub.installed(modules):
        attention = importlib.import_module("eagle_kernels.integrations.vllm.attention")
        assert attention.Backend.get_name() == expected
        assert attention.READS_MIXED is (expected == "FLASH_ATTN")
