"""The module of a layer of experts: a router, a table of the weights of all experts, and shared experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .... import ops
from .linear import Linear
from .norm import library


def experts_touched(num_rows: float, num_experts: int, num_chosen: int) -> float:
    """Returns how many experts rows go to in the mean, if each row chooses them evenly and alone."""
    return num_experts * (1.0 - (1.0 - num_chosen / num_experts) ** num_rows)


def count_touched(experts: Tensor, num_rows: int) -> float:
    """Returns how many experts [.., T, K] num_rows neighbouring rows go to in the mean."""
    length = experts.shape[-2] // num_rows * num_rows
    groups = experts[..., :length, :].unflatten(-2, (-1, num_rows)).flatten(-2)
    ordered = groups.sort(dim=-1).values
    return float(1.0 + (ordered[..., 1:] != ordered[..., :-1]).sum(dim=-1).double().mean())


class Router(Linear):
    """Computes the logits of experts, and holds what is added to their scores for the choice.
    is_wide: in fp32, whatever the model's type is."""

    def __init__(self, input_size: int, num_experts: int, bias: bool, is_wide: bool, has_choice_bias: bool) -> None:
        super().__init__(input_size, num_experts, bias)
        self.is_wide = is_wide
        self.choice_bias = nn.Parameter(torch.zeros(num_experts)) if has_choice_bias else None
        self.to(torch.float32 if is_wide else self.weight.dtype)

    def _apply(self, function, recurse: bool = True):
        if not self.is_wide:
            return super()._apply(function, recurse)

        def moved(tensor: Tensor) -> Tensor:
            made = function(tensor)
            if made.dtype == torch.float32:
                return made
            return torch.empty_like(made, dtype=torch.float32) if tensor.is_meta else tensor.to(made.device)

        return super()._apply(moved, recurse)

    def forward(self, x: Tensor, deterministic: bool = False) -> Tensor:
        return super().forward(x.to(self.weight.dtype), deterministic)


class MixtureOfExperts(nn.Module):
    """Computes the experts that the router chooses for each row, and the shared ones. [B, T, H] -> [B, T, H].

    The weights of all experts lie in one table, and the state dict shows them under their published names. Shared
    experts are a feed-forward of their own until `pack` puts them into the table, whose last ones they are then.
    """

    def __init__(self, settings: Any, shared: nn.Module | None) -> None:
        super().__init__()
        self.settings = settings
        hidden, inner, is_joined = settings.hidden_size, settings.inner_size, not settings.projections
        count, has_bias = settings.num_experts + settings.num_shared, settings.bias_name is not None
        self.router = Router(hidden, settings.num_experts, is_joined, settings.has_wide_router, has_bias)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * inner)) if is_joined else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden)) if is_joined else None
        self.shared_experts = shared
        self.num_packed = 0
        self.is_noting, self.noted = False, None  # experts [T, K] of a prompt's rows, see `Decoder.noting`
        self._register_state_dict_hook(_publish)

    def forward(self, x: Tensor, in_parts: bool = False, deterministic: bool = False) -> Tensor:
        """in_parts: see `GatedFeedForward`; the result has none."""
        rows, settings = x.flatten(0, 1), self.settings
        is_trained = library(x, self.gate_up) is not ops
        route = ops.route_experts.reference if is_trained else ops.route_experts
        # in fp32 quantised weights are for CPUs alone: loading refuses them for GPUs
        is_wide = x.dtype == torch.float32 and not self.gate_up.is_floating_point()
        compute = ops.fused_experts.reference if is_trained or is_wide else ops.fused_experts
        logits, bias = self.router(x, deterministic).flatten(0, 1), self.router.choice_bias
        routed = route(logits, bias, top_k=settings.num_chosen, num_shared=self.num_packed, **settings.routing)
        if self.is_noting:
            self.noted = routed.experts[:, : settings.num_chosen]
        output = compute(rows, routed.experts, routed.weights, **self.table(), **settings.activation).view_as(x)
        if self.shared_experts is not None:
            output = output + self.shared_experts(x, deterministic=deterministic)
        return output

    def table(self) -> dict[str, Any]:
        """Returns the arguments of `fused_experts` that are weights."""
        return {name: getattr(self, name) for name in _TABLE}

    def unread_bytes(self, num_rows: float) -> float:
        """Returns the bytes of experts that no row goes to, as those of a noted prompt do, which waits for the device,
        or by even routing."""
        settings = self.settings
        if self.noted is None:
            touched = experts_touched(num_rows, settings.num_experts, settings.num_chosen)
        else:
            touched = count_touched(self.noted, max(1, min(round(num_rows), len(self.noted))))
        each = (self.gate_up.nbytes + self.down.nbytes) / len(self.down)
        return each * (settings.num_experts - touched)

    def pack(self) -> None:
        """Puts the shared experts into the table, where a launch of the others computes them too; of a module that is
        filled and trained no more."""
        shared, count, inner = self.shared_experts, self.settings.num_shared, self.settings.inner_size
        linears = () if shared is None else (shared.gate_up_proj, shared.down_proj)
        if not linears or any(type(linear) is not Linear or linear.bias is not None for linear in linears):
            return
        with torch.no_grad():
            both = linears[0].weight.unflatten(0, (2, count, inner)).transpose(0, 1)
            self.gate_up[-count:].unflatten(1, (2, inner)).copy_(both)
            self.down[-count:].copy_(linears[1].weight.unflatten(1, (count, inner)).transpose(0, 1))
        self.shared_experts, self.num_packed = None, count

    def names_of_weights(self, path: str) -> dict[str, str]:
        """Returns the published name of each expert's projection, without its ending; of all experts that of theirs."""
        base, settings = f"{_Names.of(self, f'{path}.').theirs}experts", self.settings
        projections = settings.projections
        if not projections:
            return {"": base}
        numbers = range(settings.num_experts)
        return {f"{number}.{each}": f"{base}.{number}.{each}" for number in numbers for each in projections}

    def published(self) -> dict[str, Tensor]:
        """Returns the tensors of the table by their published names; but for shared experts, views of it."""
        settings, inner = self.settings, self.settings.inner_size
        if not settings.projections:
            return {
                "experts.gate_up_proj": self.gate_up.transpose(1, 2), "experts.gate_up_proj_bias": self.gate_up_bias,
                "experts.down_proj": self.down.transpose(1, 2), "experts.down_proj_bias": self.down_bias,
            }  # fmt: skip
        found = {}
        for number in range(settings.num_experts):
            parts = (*self.gate_up[number].split(inner), self.down[number])
            names = (f"experts.{number}.{projection}.weight" for projection in settings.projections)
            found |= zip(names, parts, strict=True)
        if self.num_packed:
            gates, ups = self.gate_up[-self.num_packed :].split(inner, dim=1)
            parts = (gates.flatten(0, 1), ups.flatten(0, 1), self.down[-self.num_packed :].transpose(0, 1).flatten(1))
            found |= zip((f"shared_experts.{each}.weight" for each in settings.projections), parts, strict=True)
        return found


_TABLE = ("gate_up", "down", "gate_up_bias", "down_bias")


class _Names(NamedTuple):
    """Begins of the names of a module's tensors: ours and published ones."""

    ours: str
    theirs: str

    @classmethod
    def of(cls, module: MixtureOfExperts, prefix: str) -> _Names:
        around = "".join(f"{part}." for part in prefix.split(".")[:-2])
        return cls(prefix, f"{around}{module.settings.folder}.")

    def renamed(self, settings: Any) -> dict[str, str]:
        """Returns the published name of each tensor of the router, by ours."""
        names = {f"{self.ours}router.{kind}": f"{self.theirs}{settings.router}.{kind}" for kind in ("weight", "bias")}
        return names | {f"{self.ours}router.choice_bias": f"{self.theirs}{settings.bias_name}"}


def _publish(module: MixtureOfExperts, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Gives the tensors of a state dict their published names."""
    names, settings = _Names.of(module, prefix), module.settings
    for name in _TABLE:
        state_dict.pop(prefix + name, None)
    for ours, theirs in names.renamed(settings).items():
        if ours in state_dict:
            tensor = state_dict.pop(ours)
            state_dict[theirs] = tensor.view(settings.bias_shape) if ours.endswith("choice_bias") else tensor
    for name, tensor in module.published().items():
        state_dict[names.theirs + name] = tensor.detach()


def join_experts(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Makes the table of each layer of experts out of published tensors; a hook that runs before `load_state_dict`."""
    for path, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            names = _Names.of(module, f"{prefix}{path}.")
            for ours, theirs in names.renamed(module.settings).items():
                if theirs in state_dict:
                    tensor = state_dict.pop(theirs)
                    state_dict[ours] = tensor.flatten() if ours.endswith("choice_bias") else tensor
            found = {name: names.theirs + name for name in module.published() if names.theirs + name in state_dict}
            if len(found) == len(module.published()):
                with torch.no_grad():
                    for name, place in module.published().items():
                        place.copy_(state_dict.pop(found[name]))
                for name in _TABLE:
                    if getattr(module, name) is not None:
                        state_dict[names.ours + name] = getattr(module, name).detach()
