"""Our attention backend beside SGLang's own Triton backend: one made batch each, on the same pool, without an engine.

Needs an importable SGLang (0.5.17 was run, on a GPU and in Triton's interpreter). Both are compared with attention in
float64 over listed slots, so that a difference says who is wrong. Where SGLang's backend is known to differ:
    decode under a window   it sees one key less than its own prefill does
    trees under a window    it takes a node's number for its depth, so that only chains are right
    fp8                     it rounds probabilities to fp8 too; ours must be at least as near to float64
"""

import importlib
import os
from types import SimpleNamespace

import pytest
import torch

os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
pytest.importorskip("sglang", reason="needs SGLang")

from op_tests.integrations import sglang_stub as stub

NODES, TOPK, STEPS, SIZE, ROWS = 7, 3, 3, 512, 6
TREE, CHAIN = [-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 2, 3, 4, 5]
LENGTHS, REQUESTS = [100, 1, 37], [3, 0, 5]
# triton 3.6's interpreter multiplies bf16 matrices wrongly
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
HEADS = {"gqa": (8, 2, 64), "mha": (4, 4, 64), "28/4/128": (28, 4, 128), "16/2/256": (16, 2, 256)}
FEATURES = {"plain": {}, "cap": {"cap": 5.0}, "sinks": {"sinks": True}, "window": {"window": 9}}


@pytest.fixture(scope="module")
def sglang():
    """SGLang's modules, with the few questions about the engine's state answered."""
    spec = SimpleNamespace(speculative_num_draft_tokens=NODES, speculative_num_steps=STEPS, speculative_eagle_topk=TOPK)
    parallel = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1)
    backend = importlib.import_module("sglang.srt.layers.attention.triton_backend")
    answers = {
        "get_spec": lambda: spec, "get_parallel": lambda: parallel, "get_device_core_count": lambda *_: 132,
        "is_arch_support_pdl": lambda: False, "cuda_graph_fully_disabled": lambda: True,
        "hybrid_gdn_config": lambda *_: None, "kimi_linear_config": lambda *_: None,
        "linear_attn_model_spec": lambda *_: None,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(backend, name, answer, raising=False)
        yield SimpleNamespace(
            stock=backend.TritonAttnBackend,
            mode=importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode,
            attention=importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention,
            mha=backend.AttentionArch.MHA,
            ours=importlib.import_module("eagle_kernels.integrations.sglang.attention").EagleKernelsAttnBackend,
        )


class Case:
    """A pool with shuffled pages, a layer, and both backends."""

    def __init__(self, sglang, device, page_size, heads, dtype=None, *, cap=0.0, sinks=False, window=None, scale=None):
        torch.manual_seed(0)
        num_heads, num_kv_heads, head_dim = heads
        pages = (torch.randperm(ROWS * SIZE // page_size) + 1).view(ROWS, -1)
        slots = (pages[..., None] * page_size + torch.arange(page_size)).view(ROWS, SIZE)
        self.sglang, self.device, self.window = sglang, device, window
        self.is_fp8, self.factors = dtype is not None, (scale, 1.5 * scale) if scale else (1.0, 1.0)
        self.slots = slots.to(torch.int32).to(device)
        model = SimpleNamespace(
            attention_arch=sglang.mha, get_max_num_attention_heads=lambda: num_heads, v_head_dim=head_dim,
            get_num_kv_heads=lambda size: num_kv_heads, swa_v_head_dim=head_dim, context_len=SIZE,
            is_encoder_decoder=False,
        )  # fmt: skip
        arguments = SimpleNamespace(
            triton_attention_num_kv_splits=8, chunked_prefill_size=-1, enable_deterministic_inference=False,
            triton_attention_split_tile_size=None, page_size=page_size,
        )  # fmt: skip
        pool = stub.Pool((ROWS * SIZE // page_size + 1) * page_size, num_kv_heads, head_dim, dtype or HALF, device)
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.slots, size=ROWS), token_to_kv_pool=pool,
            token_to_kv_pool_allocator=SimpleNamespace(), sliding_window_size=window, page_size=page_size,
            model_config=model, server_args=arguments, device=device, gpu_id=0, is_draft_worker=False,
        )  # fmt: skip
        self.layer = sglang.attention(
            num_heads, head_dim, head_dim**-0.5, num_kv_heads, 0, logit_cap=cap, sliding_window_size=window or -1
        )
        if scale:
            self.layer.k_scale, self.layer.v_scale = (
                torch.nn.Parameter(torch.tensor(value, device=device), False) for value in self.factors
            )
            self.layer.k_scale_float, self.layer.v_scale_float = self.factors
        self.sinks = torch.randn(num_heads, device=device) if sinks else None

    def places(self, spans):
        return torch.cat([self.slots[row, first:last].long() for row, first, last in spans])

    def batch(self, mode, lengths, out_cache_loc, **fields):
        base = {
            "forward_mode": mode, "batch_size": len(lengths), "seq_lens": torch.tensor(lengths, device=self.device),
            "req_pool_indices": torch.tensor(REQUESTS, device=self.device), "seq_lens_sum": sum(lengths),
            "seq_lens_cpu": torch.tensor(lengths), "spec_info": None, "out_cache_loc": out_cache_loc,
        }  # fmt: skip
        return SimpleNamespace(**(base | fields))

    def run(self, backend, batch, forward, query, key, value):
        backend.init_forward_metadata(batch)
        options = {} if self.sinks is None else {"sinks": self.sinks}
        call = getattr(backend, forward)
        return call(query.clone(), key.clone(), value.clone(), self.layer, batch, **options).view(len(query), -1)

    def compare(self, ours, stock, forward, seen, comparable=True):
        """Runs both on the same new rows; seen: T lists of slots. Returns nothing; asserts ours against float64."""
        layer, rows = self.layer, len(seen)
        make = lambda *shape: torch.randn(rows, *shape, device=self.device).to(HALF)  # noqa: E731
        query = make(layer.tp_q_head_num * layer.qk_head_dim)
        key, value = (make(layer.tp_k_head_num, layer.qk_head_dim) for _ in range(2))
        results = [
            self.run(backend(self.runner), batch, forward, query, key, value).double()
            for backend, batch in ((self.sglang.ours, ours), (self.sglang.stock, stock))
        ]
        rows_of_heads, pool = query.view(rows, -1, layer.qk_head_dim), self.runner.token_to_kv_pool
        wanted = pool.attend(layer, rows_of_heads, seen, self.sinks, self.factors).flatten(1)
        errors = [float((result - wanted).abs().max()) for result in results]
        limit = max(errors[1], 0.02) if self.is_fp8 else 0.02
        assert errors[0] <= limit, f"ours {errors[0]:.1e} from float64, SGLang's {errors[1]:.1e}"
        if comparable and not self.is_fp8:
            assert errors[1] <= 0.02, f"SGLang's own is {errors[1]:.1e} from float64: is the case made right?"

    def visible(self, row, cells, position):
        """Slots of (slot number, position) pairs within the window of a row at `position`."""
        return self.slots[row, [slot for slot, at in cells if not self.window or at >= position - self.window]].long()


def cases(page_sizes=(1, 16), heads=("gqa",), features=FEATURES):
    """All features on the first layout, and every other layout without any."""
    for page_size in page_sizes:
        yield from (pytest.param(page_size, heads[0], name, id=f"{page_size}-{heads[0]}-{name}") for name in features)
    if torch.cuda.is_available():
        yield from (pytest.param(64, name, "plain", id=f"64-{name}") for name in HEADS)
        yield pytest.param(256, "mha", "cap", id="256-mha-cap")


def make_case(sglang, device, page_size, heads, feature):
    return Case(sglang, device, page_size, HEADS[heads], **FEATURES[feature])


@pytest.mark.parametrize(("page_size", "heads", "feature"), cases())
def test_decode(page_size, heads, feature, sglang, device):
    case = make_case(sglang, device, page_size, heads, feature)
    check_decode(case)


def check_decode(case):
    places = case.places([(row, n - 1, n) for row, n in zip(REQUESTS, LENGTHS)])
    seen = [case.visible(row, [(t, t) for t in range(n)], n - 1) for row, n in zip(REQUESTS, LENGTHS)]
    batches = [case.batch(case.sglang.mode.DECODE, LENGTHS, places) for _ in range(2)]
    case.compare(*batches, "forward_decode", seen, comparable=not case.window)


@pytest.mark.parametrize(("page_size", "heads", "feature"), cases())
def test_chunks_with_prefixes(page_size, heads, feature, sglang, device):
    check_chunks(make_case(sglang, device, page_size, heads, feature))


def check_chunks(case):
    prefixes, new = [60, 0, 20], [40, 1, 17]
    totals = [prefix + count for prefix, count in zip(prefixes, new)]
    spans = list(zip(REQUESTS, prefixes, totals))
    device = lambda values: torch.tensor(values, dtype=torch.int32, device=case.device)  # noqa: E731
    batches = [
        case.batch(
            case.sglang.mode.EXTEND, totals, case.places(spans), extend_seq_lens=device(new), extend_seq_lens_cpu=new,
            extend_prefix_lens=device(prefixes), extend_prefix_lens_cpu=prefixes,
        )
        for _ in range(2)
    ]  # fmt: skip
    seen = [
        case.visible(row, [(at, at) for at in range(t + 1)], t)
        for row, first, last in spans
        for t in range(first, last)
    ]
    case.compare(*batches, "forward_extend", seen)


@pytest.mark.parametrize("parents", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize(("page_size", "heads", "feature"), cases())
def test_verification(page_size, heads, feature, parents, sglang, device):
    check_verification(make_case(sglang, device, page_size, heads, feature), parents)


def check_verification(case, parents):
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    depths = [len(path) - 1 for path in paths]
    words = torch.tensor([sum(1 << node for node in path) for path in paths], device=case.device)
    cells = torch.zeros(NODES, NODES, dtype=torch.bool)
    for node, path in enumerate(paths):
        cells[node, path] = True
    full = [torch.cat([torch.ones(NODES, n, dtype=torch.bool), cells], 1).flatten() for n in LENGTHS]
    masks = [words.view(1, NODES, 1).repeat(3, 1, 1), torch.cat(full).to(case.device)]
    positions = torch.tensor([n + depth for n in LENGTHS for depth in depths], device=case.device)
    places = case.places([(row, n, n + NODES) for row, n in zip(REQUESTS, LENGTHS)])
    batches = [
        case.batch(
            case.sglang.mode.TARGET_VERIFY, LENGTHS, places, positions=positions,
            spec_info=SimpleNamespace(draft_token_num=NODES, custom_mask=mask),
        )
        for mask in masks
    ]  # fmt: skip
    seen = [
        case.visible(row, [(t, t) for t in range(n)] + [(n + other, n + depths[other]) for other in path], n + depth)
        for row, n in zip(REQUESTS, LENGTHS)
        for path, depth in zip(paths, depths)
    ]
    case.compare(*batches, "forward_extend", seen, comparable=not (case.window and parents is TREE))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("kind", ["decode", "chunks", "tree"])
def test_fp8_pool(kind, scale, sglang, device):
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8_e4m3fn needs sm_89")
    case = Case(sglang, device, 1, HEADS["gqa"], torch.float8_e4m3fn, scale=scale)
    {"decode": check_decode, "chunks": check_chunks, "tree": lambda case: check_verification(case, TREE)}[kind](case)


@pytest.mark.gpu
def test_norms_and_activation_round_as_sglang_does(device):
    """Nearly all elements have the bits of SGLang's kernels, so that no text changes with the part `nn`."""
    from sgl_kernel import fused_add_rmsnorm, rmsnorm
    from sglang.srt.layers.activation import silu_and_mul

    from eagle_kernels.integrations.sglang import layers

    x, residual = (torch.randn(33, 4096, device=device).to(HALF) for _ in range(2))
    norm = SimpleNamespace(
        weight=torch.nn.Parameter(torch.randn(4096, device=device).to(HALF)), variance_epsilon=1e-5,
        variance_size_override=None, cast_x_before_out_mul=False,
    )  # fmt: skip
    wanted = rmsnorm(x, norm.weight.data, 1e-5), x.clone(), residual.clone(), silu_and_mul(x)
    fused_add_rmsnorm(*wanted[1:3], norm.weight.data, 1e-5)
    got = layers.forward_norm(None, norm, x), *layers.forward_norm(None, norm, x.clone(), residual.clone())
    for name, mine, theirs in zip(
        ("norm", "norm of a sum", "sum", "activation"), (*got, layers.forward_activation(None, None, x)), wanted
    ):
        assert (mine != theirs).double().mean() < 1e-3, name
