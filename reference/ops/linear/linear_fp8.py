"""Reference of linear_fp8: weights are decoded; x is taken as it is, or rounded to 8 bits as well."""

import torch

from .linear_decode import linear_decode
from .shared.packing import decode_e4m3, unpack

LARGEST, LEAST = 448.0, 1e-10


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "16bit",
    num_parts: int | None = None,
) -> torch.Tensor:
    """See eagle_kernels/ops/linear/linear_fp8.py. Float64 tensors are computed in float64."""
    wide, num_columns = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    num_outputs = len(scales) if scales.dim() == 1 else 16 * len(weight)
    values = decode_e4m3(unpack(weight, 8, num_outputs, num_columns)).to(wide)
    if scales.dim() == 1:
        values = values * scales.to(wide)[:, None]
    else:
        of_blocks = scales.to(wide).repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        values = values * of_blocks[:num_columns, :num_outputs].T
    if activations == "16bit":
        return linear_decode(x, values.to(x.dtype), bias, num_parts=num_parts)
    rows = rounded(x, 128 if activations == "block" else num_columns).to(wide)
    output = linear_decode(rows, values, None if bias is None else bias.to(wide), num_parts=num_parts)
    return output.to(x.dtype) if num_parts is None else output


def rounded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Returns x as 8 bits hold it, each row, or each `size` columns of one, with a scale of its own.
    The scales are fp32 whatever the dtype of x, so that float64 rounds the same way."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    # by a tensor: torch multiplies by the inverse of a number on a GPU, which rounds otherwise
    scales = groups.abs().amax(dim=2, keepdim=True).clamp(min=LEAST) / groups.new_tensor(LARGEST)
    codes = (groups / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
    return (codes * scales).flatten(1)[:, : x.shape[1]]
