"""Which parts of vLLM are replaced: told by --attention-backend and by EAGLE_KERNELS_VLLM."""

import logging
import os

from ..shared.parts import Parts

# vLLM shows what its own loggers say, and those below them
logger = logging.getLogger("vllm.eagle_kernels")

VARIABLE = "EAGLE_KERNELS_VLLM"
PROMPTS = "EAGLE_KERNELS_VLLM_PROMPTS"
KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")  # that ours reads
PARTS = {
    "attention": "decode and verification of drafts",
    "verify": "sample and match: one seed, one text, with and without drafts",
    "draft": "drafts from the head's own logits",
}
TREES = "trees"  # comes with all parts, where a configuration asks for trees
LATENTS = "latents"  # comes with attention, where a model has them
SWITCHES = Parts(
    VARIABLE, PARTS, logger,
    {TREES: "drafts are trees, in place of chains", LATENTS: "attention over latents (MLA), decode and verification"},
)  # fmt: skip


def asked_by_variable() -> frozenset[str] | None:
    """Returns the parts that EAGLE_KERNELS_VLLM names, none for `none`, and None where it is not set."""
    return SWITCHES.named(os.environ.get(VARIABLE, ""))


def reads_prompts() -> bool:
    """Returns whether prompts are to be read by ours on every GPU, as EAGLE_KERNELS_VLLM_PROMPTS=ours asks for."""
    reader = os.environ.get(PROMPTS, "").strip()
    if reader not in ("", "ours"):
        raise ValueError(f"eagle_kernels: {PROMPTS} must be ours or not be set; got {reader!r}")
    return reader == "ours"


def backend_name() -> str:
    """Returns what vLLM calls our attention backend: a name of our own where it takes new ones."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return "EAGLE_KERNELS" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"


def has_backend(vllm_config) -> bool:
    """Tells whether this configuration's attention backend has our name."""
    backend = vllm_config.attention_config.backend
    return backend is not None and backend.name == backend_name()


def asked_by(vllm_config) -> frozenset[str]:
    """Returns the parts that a configuration and the environment ask for.

    The attention backend asks for all parts; the variable, where it is set, decides alone.
    """
    asked = asked_by_variable()
    if asked is None:
        asked = frozenset(PARTS) if has_backend(vllm_config) else frozenset()
    return asked
