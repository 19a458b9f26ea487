"""Reference of fused_experts: expert after expert, with the rows that go to it."""

import torch

from ..linear.shared.packing import by_column, decode_e2m1, decode_e4m3, unpack


def fused_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None,
    gate_up_scales: torch.Tensor | None = None, down_scales: torch.Tensor | None = None,
    gate_up_zeros: torch.Tensor | None = None, down_zeros: torch.Tensor | None = None, *,
    weight_format: str = "16bit", group_size: int | None = None, activation: str = "silu", alpha: float = 1.702,
    limit: float = 7.0, interleaved: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See eagle_kernels/ops/experts/fused_experts.py. Float64 tensors are computed in float64."""
    wide, hidden = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    if weight_format != "16bit":
        form = (weight_format, 32 if weight_format == "mxfp4" else group_size)
        gate_up = dequantise(gate_up, gate_up_scales, gate_up_zeros, hidden, *form, x.dtype)
        down = dequantise(down, down_scales, down_zeros, gate_up.shape[1] // 2, *form, x.dtype)
    parts = torch.zeros((*experts.shape, hidden), dtype=wide, device=x.device)
    for expert in range(len(down)):
        row, place = (experts == expert).nonzero(as_tuple=True)
        if not len(row):
            continue
        both = x[row].to(wide) @ gate_up[expert].to(wide).T
        if gate_up_bias is not None:
            both = both + gate_up_bias[expert].to(wide)
        gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
        result = activate(gate, up, activation, alpha, limit).to(x.dtype).to(wide) @ down[expert].to(wide).T
        if down_bias is not None:
            result = result + down_bias[expert].to(wide)
        parts[row, place] = result * weights[row, place, None].to(wide)
    return parts.sum(dim=1).to(x.dtype)


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str, alpha: float, limit: float) -> torch.Tensor:
    """Returns what lies between both products."""
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def dequantise(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, num_columns: int, weight_format: str,
    group_size: int | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Returns the weights [E, N, K] that quantised ones stand for, in this dtype: the rows of one layer [E * N, K]."""
    num_experts, num_rows, wide = len(words), 16 * words.shape[1], torch.promote_types(dtype, torch.float32)
    total = num_experts * num_rows
    codes = unpack(words.flatten(0, 1), 4 if words.shape[-1] == 16 else 8, total, num_columns)
    if weight_format == "fp8" and group_size is not None:
        values = decode_e4m3(codes).to(wide)
        of_blocks = scales.flatten(1).to(wide).repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        factors = of_blocks[:num_columns].T
    else:
        factors = by_column(
            (scales.flatten(1, 2) if group_size else scales.flatten()).to(wide), group_size, num_columns
        )
        if weight_format in ("fp8", "mxfp4"):
            values = (decode_e4m3 if weight_format == "fp8" else decode_e2m1)(codes).to(wide)
        else:
            values = codes if weight_format == "w4" else torch.where(codes >= 128, codes - 256, codes)
            if zeros is not None:
                zeros = zeros.flatten(1, 2) if group_size else zeros.flatten()
                values = values - by_column(zeros.long(), group_size, num_columns)
            elif weight_format == "w4":
                values = values - 8
    return (values.to(wide) * factors).to(dtype).unflatten(0, (num_experts, num_rows))
