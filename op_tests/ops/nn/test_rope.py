"""rope against float64, PyTorch's rounding and Hugging Face's functions: both layouts, partial, scaled, in place."""

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference.ops.nn.rope import Output
from op_tests.harness import assert_equal, check_close, check_operation, to_device
from op_tests.harness.operation import as_bits

from .tables import make_tables

PATH = "nn.rope"

# (query heads, KV heads, head_dim, rotary_dim, dtype, dtype of the tables)
SHAPES = [
    (1, 1, 2, 2, torch.float32, torch.float32),
    (5, 1, 64, 64, torch.float16, torch.float32),
    (6, 2, 80, 32, torch.float32, torch.float32),
    (8, 8, 96, 96, torch.float16, torch.float16),
    (9, 3, 128, 128, torch.float32, torch.float32),
    (16, 1, 128, 64, torch.float16, torch.float16),
    (2, 1, 112, 110, torch.float16, torch.float32),
    (3, 3, 33, 6, torch.float32, torch.float32),
    (32, 4, 256, 256, torch.float16, torch.float16),
]


def make(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, dtype, table_dtype, *, num_positions=50,
         index_dtype=torch.int64, device="cpu", **options):  # fmt: skip
    cos, sin = make_tables(num_positions, rotary_dim, table_dtype)
    values = {
        "query": torch.randn(num_tokens, num_heads, head_dim).to(dtype),
        "key": torch.randn(num_tokens, num_kv_heads, head_dim).to(dtype),
        "positions": torch.randint(num_positions, (num_tokens,), dtype=index_dtype),
        "cos": cos,
        "sin": sin,
    }
    return to_device(values, device) | options


def check(values, case=""):
    """Bits of the reference, where the interpreter can make them."""
    is_exact = values["query"].dtype != torch.bfloat16 or values["query"].is_cuda
    return check_close(PATH, values, case, fields=Output._fields, exact=Output._fields if is_exact else ())


def ahead_of_time_cases():
    yield "D=128 bfloat16", make(2, 32, 8, 128, 128, torch.bfloat16, torch.bfloat16)
    yield "D=128 bfloat16, fp32 tables", make(2, 32, 8, 128, 128, torch.bfloat16, torch.float32)
    yield "D=80 float16 partial", make(2, 32, 8, 80, 32, torch.float16, torch.float16)
    yield "D=64 float32 interleaved", make(2, 8, 8, 64, 64, torch.float32, torch.float32, is_interleaved=True)
    yield "D=256 bfloat16 interleaved", make(2, 16, 1, 256, 64, torch.bfloat16, torch.float32, is_interleaved=True)


def order_case():
    return make(3, 9, 3, 64, 48, torch.float32, torch.float32)


def size_sweep():
    for num_tokens in (1, 2, 3, 16, 17, 64, 257, 4096):
        for num_positions in (1, 50, 131072):
            tables = torch.zeros(num_positions, 16).half()
            heads = torch.zeros(num_tokens, 6, 32).half()
            positions = torch.zeros(num_tokens, dtype=torch.int64)
            yield {"query": heads[:, :4], "key": heads[:, 4:], "positions": positions, "cos": tables, "sin": tables}
            cos, sin = (torch.zeros(num_positions, width).half()[:, :16] for width in (32, 48))
            yield {"query": heads, "key": heads, "positions": positions, "cos": cos, "sin": sin}


def wrong_calls():
    out = torch.zeros(3, 4, 64), torch.zeros(3, 2, 65)[..., 1:]
    yield make(3, 4, 2, 64, 32, torch.float32, torch.float32) | {"out": out}, "out.key must have strides that are"


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, is_interleaved, device):
    check(make(3, *shape, is_interleaved=is_interleaved, device=device), f"{shape} {is_interleaved}")


def test_bfloat16(device):
    for table_dtype in (torch.bfloat16, torch.float32):
        check(make(3, 4, 2, 64, 32, torch.bfloat16, table_dtype, device=device), f"bfloat16 {table_dtype}")


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_in_place(is_interleaved, device):
    shape = (8, 2, 80, 32, torch.float16, torch.float32)
    values = make(3, *shape, is_interleaved=is_interleaved, device=device)
    expected = eagle_kernels.raw.rope(**values)
    fused = torch.cat((values["query"], values["key"], torch.full_like(values["key"], float("nan"))), dim=1)
    query, key = fused[:, :8], fused[:, 8:10]
    result = eagle_kernels.raw.rope(**values | {"query": query, "key": key}, out=Output(query, key))
    for name in Output._fields:
        assert_equal("rope", "in place", name, getattr(result, name), getattr(expected, name))
    assert result.query is query and fused[:, 10:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_positions_outside_the_tables(device):
    """Such tokens are copied as they are, -0, NaN and infinities too, and the others keep their bits."""
    values = make(5, 2, 1, 32, 32, torch.float32, torch.float32, device=device)
    before = eagle_kernels.raw.rope(**values)
    values["positions"][1:4] = torch.tensor([-1, 50, 2**40])
    values["query"][1, 0, :4] = torch.tensor([-0.0, float("nan"), float("inf"), 0.0])
    after = check_operation(PATH, values, case="outside")[0]
    for name in Output._fields:
        assert torch.equal(as_bits(getattr(after, name)[1:4]), as_bits(values[name][1:4]))
    for row in (0, 4):
        assert torch.equal(after.query[row], before.query[row]) and torch.equal(after.key[row], before.key[row])


def test_nothing_to_turn(device):
    shape = (32, 32, torch.float16, torch.float16)
    for num_tokens, num_heads, num_kv_heads in ((0, 4, 2), (3, 0, 2), (3, 4, 0), (3, 0, 0)):
        values = make(num_tokens, num_heads, num_kv_heads, *shape, device=device)
        check(values, f"{num_tokens} tokens, {num_heads} and {num_kv_heads} heads")
    values = make(3, 4, 2, *shape, device=device)
    empty = values["cos"][:0]
    result = check(values | {"cos": empty, "sin": empty}, "tables of no position")
    assert_equal("rope", "no position", "query", result.query, values["query"])


SCALED = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scaling", SCALED)
def test_bits_are_those_of_hugging_face_s_llama(scaling, dtype, device):
    """Frequencies of every kind come as tables; rounding is that of the model, whose tables have its own dtype."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=4 * 64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=SCALED[scaling]
    )
    embedding = llama.LlamaRotaryEmbedding(config).to(device)
    query, key = (torch.randn(5, heads, 64, device=device).to(dtype) for heads in (4, 2))
    positions = torch.tensor([0, 1, 100, 255, 17], device=device)
    # their tensors are [batch, heads, tokens, D], and their tables hold each column twice
    expected = llama.apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], *embedding(query, positions[None])
    )
    cos, sin = (table[0, :, :32] for table in embedding(query, torch.arange(256, device=device)[None]))
    result = eagle_kernels.raw.rope(query, key, positions, cos, sin)
    for name, theirs in zip(Output._fields, expected):
        assert_equal("rope", f"Llama {scaling}", name, getattr(result, name), theirs[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bits_are_those_of_hugging_face_s_partial_and_interleaved_models(dtype, device):
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    values = make(4, 4, 2, 80, 32, dtype, dtype, device=device)
    query, key, positions, cos, sin = values.values()
    cos_rows, sin_rows = cos[positions][None], sin[positions][None]  # [1, T, pairs]
    theirs = neox.apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None],
        torch.cat((cos_rows, cos_rows), -1), torch.cat((sin_rows, sin_rows), -1),
    )  # fmt: skip
    result = eagle_kernels.raw.rope(**values)
    assert_equal("rope", "GPT-NeoX", "query", result.query, theirs[0][0].transpose(0, 1))
    assert_equal("rope", "GPT-NeoX", "key", result.key, theirs[1][0].transpose(0, 1))

    result = eagle_kernels.raw.rope(**values, is_interleaved=True)
    for name, heads in (("query", query), ("key", key)):
        turned = gptj.apply_rotary_pos_emb(heads[None, ..., :32], sin_rows, cos_rows)[0]
        expected = torch.cat((turned, heads[..., 32:]), dim=-1)
        assert_equal("rope", "GPT-J", name, getattr(result, name), expected)


@pytest.mark.gpu
def test_heads_past_two_billion_elements(device):
    shape = (32, 2, 128, 128, torch.bfloat16, torch.bfloat16)
    small = make(1, *shape, device=device)
    expected = eagle_kernels.raw.rope(**small)
    values = small | {
        "query": torch.zeros(2**19 + 1, 32, 128, dtype=torch.bfloat16, device=device),
        "key": torch.zeros(2**19 + 1, 2, 128, dtype=torch.bfloat16, device=device),
        "positions": torch.zeros(2**19 + 1, dtype=torch.int64, device=device),
    }
    for name in ("query", "key", "positions"):
        values[name][-1] = small[name][0]
    result = eagle_kernels.raw.rope(**values, out=Output(values["query"], values["key"]))
    assert_equal("rope", "far rows", "query", result.query[-1:], expected.query)
    assert_equal("rope", "far rows", "key", result.key[-1:], expected.key)
    assert not result.query[:-1].any()


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256, 512])
def test_full_cross(head_dim, dtype, device):
    heads, rotary_dims = ((1, 1), (6, 2), (32, 8), (20, 20), (64, 1)), (2, head_dim // 2, head_dim)
    for sizes in itertools.product(heads, rotary_dims, {dtype, torch.float32}, (False, True)):
        (num_heads, num_kv_heads), rotary_dim, table_dtype, is_interleaved = sizes
        shape = (num_heads, num_kv_heads, head_dim, rotary_dim, dtype, table_dtype)
        check(make(17, *shape, is_interleaved=is_interleaved, device=device), f"{shape} {is_interleaved}")
