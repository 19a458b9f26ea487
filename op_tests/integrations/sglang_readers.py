"""Who is to read prompts: server arguments while SGLang resolves them, and what must become of them."""

from types import SimpleNamespace

import torch

from eagle_kernels.integrations.sglang import parts, prompts

OURS = parts.NAME
MODEL = {"head_dim": 128, "dtype": torch.bfloat16}
NAMES = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
FACTS = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": None, "page_size": None, "device": "cuda"}
CHAIN, TREE, PLAIN = {"speculative_eagle_topk": 1}, {"speculative_eagle_topk": 4}, {"speculative_algorithm": None}

# the device; what the user names of the three backends; other arguments; who reads prompts, and who does all else
CASES = [
    ("sm_90", (OURS, None, None), PLAIN, ("fa3", OURS)),
    ("sm_90", (OURS, None, None), {}, ("fa3", OURS)),  # topk is chosen later
    ("sm_90", (OURS, None, None), CHAIN, ("fa3", OURS)),
    ("sm_90", (OURS, None, None), CHAIN | {"page_size": 16}, ("flashinfer", OURS)),
    ("sm_90", (OURS, None, None), TREE, ("flashinfer", OURS)),
    *((other, (OURS, None, None), more, (OURS, OURS)) for other in ("sm_80", "sm_100", "gfx942", "cpu")
      for more in (PLAIN, CHAIN, TREE)),
    *((device, (OURS, OURS, None), TREE, (OURS, OURS)) for device in ("sm_90", "sm_100")),
    *((device, (None, OURS, OURS), TREE, (OURS, OURS)) for device in ("sm_90", "sm_100")),
    *((device, (OURS, other, None), more, (other, OURS)) for device in ("sm_90", "sm_80")
      for other in ("fa3", "triton") for more in (PLAIN, CHAIN, TREE)),
    ("sm_90", ("triton", None, OURS), TREE, ("triton", OURS)),
    ("sm_90", (None, None, OURS), CHAIN, ("fa3", OURS)),
    # without ours in decoding nothing is declared
    ("sm_90", (None, None, None), TREE, ("flashinfer", "flashinfer")),
    ("sm_90", ("triton", OURS, None), TREE, (OURS, "triton")),
    ("sm_90", ("triton", None, None), PLAIN, ("triton", "triton")),
]  # fmt: skip


def own_default(view, use_mla_backend, model) -> str:
    """The backend that SGLang chooses; the contract test holds its own against the same cases."""
    assert not use_mla_backend
    topk, page_size, device = view.speculative_eagle_topk, view.page_size, prompts.architecture(view.device)
    has_one_path = topk is None or (topk == 1 and page_size in (None, 1))
    if device.startswith("gfx"):
        return "aiter"
    return {"sm_90": "fa3", "sm_100": "trtllm_mha"}.get(device, "flashinfer") if has_one_path else "flashinfer"


def backend_default(view) -> dict:
    """SGLang's first pass over the backends."""
    if view.prefill_attention_backend is not None and view.prefill_attention_backend == view.decode_attention_backend:
        return {"attention_backend": view.prefill_attention_backend}
    return {} if view.attention_backend else {"attention_backend": own_default(view, False, None)}


def view_of(named=(OURS, None, None), model=(), own=own_default, **changes) -> SimpleNamespace:
    """Server arguments while SGLang resolves them, as its older versions show them."""
    view = SimpleNamespace(**dict(zip(NAMES, named)), **(FACTS | changes))
    view.speculative_attention_mode, view.speculative_draft_attention_backend = "prefill", None
    view.get_model_config = lambda: SimpleNamespace(**(MODEL | dict(model)))
    view._get_default_attn_backend = lambda *given: own(view, *given)
    return view


def resolved_by(original, view, wanted, named) -> None:
    """Holds what the pass declares with the plug-in against what is wanted: of prefill and decode, and of trees."""
    declared = prompts.choose_reader(original, view)
    vars(view).update(declared)
    chosen = parts.backends(view)
    assert (chosen["prefill"], chosen["decode"]) == wanted
    is_split = wanted[1] == OURS != wanted[0]
    assert view.speculative_attention_mode == ("decode" if is_split else "prefill")
    assert declared.keys() <= {"attention_backend", "prefill_attention_backend", "speculative_attention_mode"}
    for name, before in zip(NAMES, named):
        is_filled = before is None or (name == "attention_backend" and named[1] == named[2] is not None)
        assert is_filled or getattr(view, name) == before
    if wanted[1] == OURS:
        assert prompts.refusals(view) == []
