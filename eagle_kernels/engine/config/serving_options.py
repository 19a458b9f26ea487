"""What a caller can choose about all but drafts: sampling, memory, prompts, steps, and simulated work."""

from __future__ import annotations

from dataclasses import dataclass

from ...ops.tree.build_tree import TreeMaskMode
from ...primitives.accept_policy import ACCEPT_POLICIES
from ...primitives.paging import MAX_PAGE_SIZE
from ...runtime.validated import Rule, Validated, above, at_least, checked, integer, number, one_of, same_as
from ..requests.sampling_params import SamplingParams

# topk, num_steps, num_draft_tokens, and mean_draft_tokens of those that have one
Tree = tuple[int | None, ...]
_FLAG: Rule = ("be True or False", lambda flag: isinstance(flag, bool))
_PAGE_SIZES = [2**power for power in range(MAX_PAGE_SIZE.bit_length())]


@dataclass(frozen=True)
class ServingOptions(Validated):
    """Holds the other fields of `EAGLEConfig`, in the order of its positional arguments; they are documented there."""

    # sampling and ends, of requests that ask for no others
    temperature: float = same_as(SamplingParams, "temperature")
    top_k: int = same_as(SamplingParams, "top_k")
    top_p: float = same_as(SamplingParams, "top_p")
    min_p: float = same_as(SamplingParams, "min_p")
    eos_token_ids: tuple[int, ...] | None = None
    max_length: int | None = integer(None, at_least(2))
    # the batch and its memory
    page_size: int = integer(16, (f"be a power of two up to {MAX_PAGE_SIZE}", lambda size: size in _PAGE_SIZES))
    tree_mask_mode: str = TreeMaskMode.PACKED
    max_batch: int = integer(32, at_least(1))
    kv_cache_bytes: int | None = integer(None, at_least(1))
    # how prompts are read
    prefill_chunk: int = integer(2048, at_least(1))
    share_prefixes: bool = checked(True, _FLAG)
    max_step_ms: float | None = number(None, above(0))
    # how steps run
    deterministic: bool = checked(False, _FLAG)
    cuda_graph: bool | None = checked(None, ("be True, False or None", lambda flag: isinstance(flag, bool)))
    phase_times: bool = checked(True, _FLAG)
    # the tree of a step, by the number of requests
    max_spec_batch: int | None = integer(None, at_least(0))
    adaptive: str | tuple[tuple[int, Tree | None], ...] | None = None
    # for timing alone
    accept_policy: str = one_of(*ACCEPT_POLICIES)
    simulated_accept_length: float | None = number(None)
    simulated_accept_lengths: tuple[tuple[Tree, float], ...] | None = None
    simulated_accept_rates: tuple[float, ...] | None = None
