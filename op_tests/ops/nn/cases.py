"""Arguments of the nn ops, as their tests and others need them."""

import torch

from op_tests.harness import to_device


def make_norm(num_tokens, hidden_size, dtype, *, heads=(), has_residual=False, device="cpu", **options):
    shape = (num_tokens, *heads, hidden_size)
    values = {"x": torch.randn(shape).to(dtype), "weight": (1.0 + 0.2 * torch.randn(hidden_size)).to(dtype)}
    if has_residual:
        values["residual"] = (3.0 * torch.randn(shape)).to(dtype)
    return to_device(values, device) | options


def make_silu(num_tokens, num_columns, dtype, *, is_packed=True, device="cpu"):
    packed = (3.0 * torch.randn(num_tokens, 2 * num_columns)).to(device, dtype)
    if is_packed:
        return {"gate": packed}
    return {"gate": packed[:, :num_columns].contiguous(), "up": packed[:, num_columns:].contiguous()}
