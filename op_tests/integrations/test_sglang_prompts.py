"""Who reads prompts: what the plug-in makes of SGLang's arguments, and where a draft's passes go."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from eagle_kernels.integrations.sglang import guards, prompts
from op_tests.integrations import sglang_stub as stub
from op_tests.integrations.sglang_readers import CASES, OURS, TREE, backend_default, own_default, resolved_by, view_of


@pytest.fixture
def on(monkeypatch):
    """`on(device)`: the machine has this device, and the libraries of SGLang's own attention."""

    def on(device: str) -> None:
        monkeypatch.setattr(prompts, "architecture", lambda given: device)
        for name in ("sgl_kernel.flash_attn", "flashinfer"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))

    return on


@pytest.mark.parametrize(("device", "named", "changes", "wanted"), CASES)
def test_who_reads_prompts(on, device, named, changes, wanted):
    on(device)
    resolved_by(backend_default, view_of(named, **changes), wanted, named)


def test_newer_versions_have_a_function(on):
    on("sm_90")
    view = view_of(**TREE)
    del view._get_default_attn_backend
    module = "sglang.srt.arg_groups.model_override_base"
    with stub.installed({module: {"get_default_attn_backend": own_default}}):
        resolved_by(backend_default, view, ("flashinfer", OURS), (OURS, None, None))


@pytest.mark.parametrize(
    ("device", "view", "why"),
    [
        ("sm_100", {}, "nothing faster was measured on sm_100"),
        ("sm_90", {"model": {"head_dim": 96}}, "nothing faster was measured with heads of 96 in torch.bfloat16"),
        ("sm_90", {"model": {"dtype": torch.float32}}, "nothing faster was measured with heads of 128 in torch.float"),
        ("sm_90", {"own": lambda *_: "triton"}, "SGLang would choose triton, which was not measured to be faster"),
        ("sm_90", {"library": "sgl_kernel.flash_attn"}, "SGLang would choose fa3, which is not there (import of"),
        ("sm_90", TREE | {"library": "flashinfer"}, "SGLang would choose flashinfer, which is not there (import of"),
        ("sm_90", {"named": (OURS, OURS, None)}, "as asked for"),
    ],
)
def test_what_stays_with_ours_and_why(on, monkeypatch, device, view, why):
    on(device)
    view = dict(view)
    if library := view.pop("library", None):
        monkeypatch.setitem(sys.modules, library, None)
    made = view_of(**view)
    assert prompts.choose_reader(backend_default, made) == {}
    assert prompts.who_reads(made).startswith(f"prompts are read by eagle_kernels, {why}")


@pytest.mark.parametrize(
    ("device", "reader", "why"),
    [("sm_90", "fa3", "faster than ours on sm_90"), ("sm_90", "flashinfer", "faster than ours on sm_90"),
     ("sm_90", "triton", "as asked for"), ("sm_100", "fa3", "as asked for")],
)  # fmt: skip
def test_it_is_said_who_else_reads_prompts_and_why(on, device, reader, why):
    on(device)
    assert prompts.who_reads(view_of((OURS, reader, None))) == f"prompts are read by {reader}, {why}"


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"device": "cuda"}, {"device": "xpu"}], ids=str)
def test_without_a_gpu_ours_reads_prompts(monkeypatch, changes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert prompts.fastest(view_of(**changes)) == (OURS, "nothing faster was measured on cpu")


# the draft's backend, which SGLang puts in the place of its backend of two


class Reader:
    """Notes what it is called with."""

    def __init__(self):
        self.calls = []

    def init_forward_metadata(self, forward_batch):
        self.calls.append(("plan", forward_batch))

    def forward_extend(self, *given, **options):
        self.calls.append((*given, options))
        return "read"


@pytest.fixture
def attention():
    with stub.installed():
        yield importlib.import_module("eagle_kernels.integrations.sglang.attention")


def runner_of(is_split: bool) -> SimpleNamespace:
    table = torch.arange(64, dtype=torch.int32).view(2, 32)
    backend = SimpleNamespace(prefill_backend=Reader()) if is_split else SimpleNamespace()
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=2), page_size=1, device="cpu",
        token_to_kv_pool=stub.Pool(64, 2, 16, torch.float32, "cpu"), sliding_window_size=None, num_draft_tokens=4,
        is_draft_worker=True, server_args=SimpleNamespace(**vars(view_of())), attn_backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("sinks", [None, torch.ones(4)], ids=["", "sinks"])
@pytest.mark.parametrize("is_split", [True, False])
def test_a_draft_s_prompts_go_where_the_target_s_go(attention, monkeypatch, is_split, sinks):
    runner = runner_of(is_split)
    factory = SimpleNamespace(draft_attn_backend=None, draft_model_runner=runner, speculative_num_steps=3, topk=2)
    backend = guards.create_draft_extend_backend(lambda given: pytest.fail("SGLang's"), factory)
    reader = getattr(runner.attn_backend, "prefill_backend", None)
    assert isinstance(backend, attention.EagleKernelsAttnBackend) and backend.reader is reader
    monkeypatch.setattr(backend, "_save", lambda *given: pytest.fail("written twice"))
    layer, given = stub.layer(4, 2, 16), (torch.ones(3, 64), torch.ones(3, 32), torch.ones(3, 32))
    options = {} if sinks is None else {"sinks": sinks}
    for mode in stub.Mode:
        batch = SimpleNamespace(
            forward_mode=mode, batch_size=1, seq_lens=torch.tensor([3]), req_pool_indices=torch.tensor([1]),
            seq_lens_sum=3, spec_info=None, extend_seq_lens=torch.tensor([3]), extend_seq_lens_cpu=[3],
        )  # fmt: skip
        backend.lists.pages = None
        backend.init_forward_metadata(batch)
        is_read = is_split and mode is stub.Mode.EXTEND
        assert (backend.lists.pages is None) == is_read
        if is_read:
            assert backend.forward_extend(*given, layer, batch, **options) == "read"
            assert reader.calls == [("plan", batch), (*given, layer, batch, True, options)]
    assert not is_split or len(reader.calls) == 2
