"""Arguments of the linear ops, as their tests and others need them."""

import torch


def make_linear(num_rows, num_outputs, num_columns, dtype, *, has_bias=False, device="cpu"):
    values = {"weight": torch.randn(num_outputs, num_columns).to(device, dtype)}
    if has_bias:
        values["bias"] = (5.0 * torch.randn(num_outputs)).to(device, dtype)
    values["x"] = (torch.randn(num_rows, num_columns) / num_columns**0.5).to(device, dtype)
    return values
