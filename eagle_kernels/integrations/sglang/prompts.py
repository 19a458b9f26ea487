"""Who reads prompts: our kernel, or SGLang's own attention where that one is faster on the device.

SGLang has a backend that holds two (`HybridAttnBackend`), one for prompts and chunks and one for all else. So this is a
matter of its arguments: the backend of prefill, and that trees are verified by the backend that decodes.
"""

import importlib

import torch

from ...runtime.target import architecture
from .contract import OWN_DEFAULT
from .parts import NAME, backends, has_latents, model_config, resolved

# Backends of SGLang whose kernels took less time than ours, by architecture: on an H200 ours took 1.05 to 1.5 times as
# long as FlashAttention 3, on an H100 1.4 to 1.5 times as long as FlashInfer (bench_prefill_attention.py). Nothing was
# measured elsewhere, nor with other sizes of heads and other types than these.
FASTER = {"sm_90": ("fa3", "flashinfer")}
HEAD_SIZES, DTYPES = (64, 128, 256), (torch.float16, torch.bfloat16)
# Backends that keep keys and values where ours reads them, whoever chooses them.
READERS = ("fa3", "fa4", "flashinfer", "triton", "trtllm_mha", "torch_native")
# what a backend imports when SGLang makes it, which an installation may lack
_LIBRARIES = {"fa3": "sgl_kernel.flash_attn", "flashinfer": "flashinfer"}


def choose_reader(original, view):
    """Declares who reads prompts where ours decodes, unless the user did, and that trees are verified by ours."""
    declared = original(view)
    base = declared.get("attention_backend", view.attention_backend)
    if (view.decode_attention_backend or base) != NAME:
        return declared
    reader, more = view.prefill_attention_backend or base, {}
    if view.prefill_attention_backend is None and base == NAME:
        reader, _ = fastest(view)
        if reader != NAME:
            more["prefill_attention_backend"] = reader
    if reader != NAME:
        more["speculative_attention_mode"] = "decode"
    return declared | more


def fastest(server_args) -> tuple[str, str]:
    """Returns the backend that reads prompts if nobody names one, and why."""
    device = _architecture(server_args)
    if device not in FASTER:
        return NAME, f"nothing faster was measured on {device}"
    model = model_config(server_args)
    if has_latents(model):
        return NAME, "latents (MLA) are left to no other backend"
    if model.head_dim not in HEAD_SIZES or model.dtype not in DTYPES:
        return NAME, f"nothing faster was measured with heads of {model.head_dim} in {model.dtype}"
    own = _own_default(server_args, model)
    if own not in FASTER[device]:
        return NAME, f"SGLang would choose {own}, which was not measured to be faster"
    try:
        importlib.import_module(_LIBRARIES[own])
    except ImportError as error:
        return NAME, f"SGLang would choose {own}, which is not there ({error})"
    return own, f"faster than ours on {device}"


def who_reads(server_args) -> str:
    """Says who reads prompts with these resolved arguments, and why."""
    reader, device = backends(server_args)["prefill"], _architecture(server_args)
    if reader == NAME:
        found, why = fastest(resolved(server_args))
        is_asked = found != NAME
    else:
        why = f"faster than ours on {device}"
        is_asked = reader not in FASTER.get(device, ())
    return f"prompts are read by {reader}, {'as asked for' if is_asked else why}"


def refusals(server_args) -> list[str]:
    """Returns why prompts cannot be left to the backend that these resolved arguments name."""
    server_args, chosen = resolved(server_args), backends(server_args)
    reader = chosen["prefill"]
    if chosen["decode"] != NAME or reader == NAME:
        return []
    if reader not in READERS:
        return [f"--prefill-attention-backend {reader}, which may keep keys elsewhere; use {', '.join(READERS)}"]
    if server_args.speculative_algorithm and server_args.speculative_attention_mode != "decode":
        return [f"trees that {reader} verifies; add --speculative-attention-mode decode"]
    return []


def _architecture(server_args) -> str:
    is_gpu = server_args.device == "cuda" and torch.cuda.is_available()
    return architecture(torch.device("cuda" if is_gpu else "cpu"))


def _own_default(server_args, model) -> str:
    """Returns the backend that SGLang chooses for a model where nobody names one; newer versions have a function."""
    is_mla = False  # ours reads prompts of these
    choose = getattr(server_args, OWN_DEFAULT, None)
    if choose is not None:
        return choose(is_mla, model)
    from sglang.srt.arg_groups.model_override_base import get_default_attn_backend

    return get_default_attn_backend(server_args, is_mla, model)
