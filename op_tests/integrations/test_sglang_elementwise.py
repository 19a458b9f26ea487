"""sgl_kernel's elementwise names against the same computation in PyTorch, float32 inside and rounded once."""

import inspect

import pytest
import torch

import eagle_kernels.integrations.sgl_kernel as sgl_kernel
from op_tests.harness import assert_close, assert_equal


def normed(x, weight, eps=1e-6):
    """In float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("given", [{}, {"eps": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["", "gemma_"])
def test_norms(kind, dtype, given, device):
    """The kernels of SGLang and FlashInfer round once, and norm a sum before it is rounded."""
    x, residual = torch.randn(2, 5, 96, device=device).to(dtype)
    weight = torch.randn(96, device=device).to(dtype)
    applied = weight.double() + (1.0 if kind else 0.0)
    exact, of_sum = normed(x, applied, **given), normed(x.double() + residual.double(), applied, **given)
    norm, add_norm = getattr(sgl_kernel, kind + "rmsnorm"), getattr(sgl_kernel, kind + "fused_add_rmsnorm")
    found = norm(x, weight, **given)
    assert_close("rmsnorm", kind, "output", found, exact.to(dtype))
    out = torch.empty_like(x)
    assert norm(x, weight, out=out, **given) is out and torch.equal(out, found)
    total, before = x + residual, (x.data_ptr(), residual.data_ptr())
    assert add_norm(x, residual, weight, **given) is None
    assert_equal("fused_add_rmsnorm", kind, "residual", residual, total)
    assert_close("fused_add_rmsnorm", kind, "input", x, of_sum.to(dtype))
    if dtype == torch.float16:
        assert (found != exact.half()).double().mean() < 0.02 and (x != of_sum.half()).double().mean() < 0.02
    assert before == (x.data_ptr(), residual.data_ptr())


def test_silu_and_mul_rounds_once(device):
    packed = torch.randn(2, 30, 40, device=device).half()
    gate, up = packed.double().chunk(2, dim=-1)
    exact = (torch.nn.functional.silu(gate) * up).half()
    for given in ({}, {"out": torch.empty_like(exact)}):
        assert (sgl_kernel.silu_and_mul(packed, **given) != exact).double().mean() < 0.02


def test_silu_and_mul(device):
    packed = torch.randn(2, 3, 40, device=device)
    gate, up = packed.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    assert_close("silu_and_mul", "", "output", sgl_kernel.silu_and_mul(packed), expected)
    out = torch.empty(2, 3, 20, device=device)
    assert sgl_kernel.silu_and_mul(packed, out=out) is out
    assert_close("silu_and_mul", "", "out", out, expected)


@pytest.mark.parametrize("is_neox", [True, False])
def test_rope_in_place(is_neox, device):
    query, key = torch.randn(7, 4 * 16, device=device), torch.randn(7, 2 * 16, device=device)
    angles = torch.randn(50, 4, device=device)
    positions = torch.randint(50, (7,), device=device)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    expected = []
    for heads in (query.clone().view(7, 4, 16), key.clone().view(7, 2, 16)):
        pairs = (
            heads[..., :8].unflatten(-1, (2, 4)) if is_neox else heads[..., :8].unflatten(-1, (4, 2)).transpose(-1, -2)
        )
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        cos, sin = angles[positions].cos()[:, None], angles[positions].sin()[:, None]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-2)
        turned = turned.flatten(-2) if is_neox else turned.transpose(-1, -2).flatten(-2)
        expected.append(torch.cat([turned, heads[..., 8:]], dim=-1).flatten(1))
    sgl_kernel.apply_rope_with_cos_sin_cache_inplace(positions, query, key, 16, table, is_neox)
    assert_close("rope", str(is_neox), "query", query, expected[0])
    assert_close("rope", str(is_neox), "key", key, expected[1])
    with pytest.raises(ValueError, match="fused_set_kv_buffer_arg must be None"):
        sgl_kernel.apply_rope_with_cos_sin_cache_inplace(positions, query, key, 16, table, fused_set_kv_buffer_arg=1)


def test_renorms(device):
    probs = torch.softmax(torch.randn(3, 200, device=device), dim=-1)
    for top_k in (7, torch.tensor([1, 7, 200], dtype=torch.int32, device=device)):
        limit = torch.as_tensor(top_k, device=device).expand(3)
        edge = probs.sort(dim=-1, descending=True).values.gather(1, limit[:, None].long() - 1)
        kept = torch.where(probs >= edge, probs, 0.0)
        result = sgl_kernel.top_k_renorm_probs(probs, top_k)
        assert_close("top_k_renorm_probs", str(top_k), "probs", result, kept / kept.sum(-1, keepdim=True))
    values, order = probs.sort(dim=-1, descending=True)
    is_kept = values.cumsum(-1) - values < 0.6
    kept = torch.zeros_like(probs).scatter_(1, order, torch.where(is_kept, values, 0.0))
    result = sgl_kernel.top_p_renorm_prob(probs, 0.6)
    assert_close("top_p_renorm_prob", "0.6", "probs", result, kept / kept.sum(-1, keepdim=True))


SIGNATURES = {
    "rmsnorm": "input weight eps=1e-06 out=None enable_pdl=None",
    "gemma_rmsnorm": "input weight eps=1e-06 out=None enable_pdl=None",
    "fused_add_rmsnorm": "input residual weight eps=1e-06 enable_pdl=None",
    "gemma_fused_add_rmsnorm": "input residual weight eps=1e-06 enable_pdl=None",
    "silu_and_mul": "input out=None",
    "apply_rope_with_cos_sin_cache_inplace": "positions query key head_size cos_sin_cache is_neox=True "
    "fused_set_kv_buffer_arg=None enable_pdl=None",
    "top_k_renorm_prob": "probs top_k", "top_p_renorm_prob": "probs top_p",
    "top_k_renorm_probs": "probs top_k", "top_p_renorm_probs": "probs top_p",
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_of_arguments(name):
    parameters = inspect.signature(getattr(sgl_kernel, name)).parameters.values()
    described = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert described == SIGNATURES[name].split() and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
