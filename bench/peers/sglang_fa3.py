"""vLLM's build of FlashAttention 3 in place of SGLang's own: a plug-in that SGLang's processes load.

SGLang's build, `sgl_kernel/flash_ops`, has 1.8 GB; vLLM's has 150 MB. `sglang_engine.py` copies this file to a folder
of its own, with the library beside it; so it imports nothing of this repository. The functions take what `sgl_kernel`
0.4.5 gives its operators; what vLLM's do not have is refused.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

LIBRARY = "vllm_fa3.so"
# the first arguments, up to the windows, are the same in both: of `fwd`, and of `get_scheduler_metadata`
SAME, SAME_OF_PLANS = 27, 19
# of a request's keys, at most, where SGLang names none: vLLM's operators would then guess by the longest request, which
# plans know better than calls, and a plan of another guess does not fit. As vLLM captures its graphs.
NUM_SPLITS = 32


def register() -> None:
    """Loads the library, and puts its operators where `sgl_kernel.flash_attn` looks for SGLang's."""
    torch.ops.load_library(str(Path(__file__).with_name(LIBRARY)))
    sys.modules["sgl_kernel.flash_ops"] = ModuleType("sgl_kernel.flash_ops")
    torch.ops.sgl_kernel.fwd = SimpleNamespace(default=fwd)
    torch.ops.sgl_kernel.get_scheduler_metadata = get_scheduler_metadata


def fwd(*arguments, **named) -> list[torch.Tensor]:
    """Calls vLLM's operator with the arguments of SGLang's."""
    return _forward(arguments[:SAME], *arguments[SAME:], **named)


def _forward(
    same, attention_chunk, softcap, is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, sinks,
    sparse_mask_fine, only_qv,
):  # fmt: skip
    _refuse(attention_chunk=attention_chunk or None, sparse_mask_fine=sparse_mask_fine, only_qv=only_qv or None)
    if scheduler_metadata is not None:
        num_splits = num_splits or NUM_SPLITS
    return torch.ops._vllm_fa3_C.fwd(
        *same, softcap, is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, sinks,
        1, 0, None,  # cp_world_size, cp_rank, cp_tot_seqused_k: no context parallelism
    )  # fmt: skip


def get_scheduler_metadata(*arguments) -> torch.Tensor:
    """Calls vLLM's operator with the arguments of SGLang's."""
    attention_chunk, has_softcap, num_splits, *others = arguments[SAME_OF_PLANS:]
    _refuse(attention_chunk=attention_chunk or None)
    return torch.ops._vllm_fa3_C.get_scheduler_metadata(
        *arguments[:SAME_OF_PLANS], has_softcap, num_splits or NUM_SPLITS, *others
    )


def _refuse(**unknown) -> None:
    for name, value in unknown.items():
        if value is not None:
            raise ValueError(f"vLLM's build of FlashAttention 3 has no {name}; got {value}")
