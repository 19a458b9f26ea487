"""Reference of fused_experts: expert after expert, with the rows that go to it."""

import torch


def fused_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, *, activation: str = "silu",
    alpha: float = 1.702, limit: float = 7.0, interleaved: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See eagle_kernels/ops/experts/fused_experts.py. Float64 tensors are computed in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = torch.zeros((*experts.shape, x.shape[1]), dtype=wide, device=x.device)
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
