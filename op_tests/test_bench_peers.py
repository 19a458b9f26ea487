"""Peers' attention out of files: what stands in for their packages, and what their kernels are given."""

import dataclasses
import sys

import pytest
import torch

from bench import peers
from bench.harness import Unavailable
from bench.harness.check import check_provider, expected_outputs
from bench.harness.declaration import declared
from bench.peers import sglang_triton, vllm_triton
from bench.peers.wheel_files import Stub, import_file

BENCHMARKS = {benchmark.op: benchmark for benchmark in declared()}
TREES = BENCHMARKS["tree_attention"].small_cases
ONE_TREE = dataclasses.replace(TREES[0], sizes=TREES[0].sizes | {"shape": (1, 40, 12)})
ONE_TOKEN = dataclasses.replace(TREES[0], sizes=TREES[0].sizes | {"shape": (2, 40, 1)})
# with the imports and the arguments of vLLM's file, in plain torch
UNIFIED_ATTENTION = """
import torch

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.triton_attention_helpers import repeated
from vllm.v1.kv_cache_interface import KVQuantMode

assert current_platform.fp8_dtype() == torch.float8_e4m3fn and not envs.VLLM_BATCH_INVARIANT
assert triton.next_power_of_2(5) == 8 and not init_logger(__name__)


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None, num_par_softmax_segments=None,
    softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None, qq_bias=None, kv_quant_mode=0,
):
    assert causal and window_size == (-1, -1) and not softcap and q_descale is None
    assert max_seqlen_k == seqused_k.max() and max_seqlen_q == cu_seqlens_q.diff().max() and (block_table >= 0).all()
    assert kv_quant_mode == (KVQuantMode.NONE if k_descale is None else KVQuantMode.FP8_PER_TENSOR)
    if num_par_softmax_segments:
        assert max_seqlen_q == 1 and seq_threshold_3D >= len(seqused_k)
        assert softmax_segm_output.shape == (*q.shape[:2], num_par_softmax_segments, q.shape[2])
        assert softmax_segm_max.shape == softmax_segm_expsum.shape == softmax_segm_output.shape[:3]
    for row, length in enumerate(seqused_k.tolist()):
        start, end = cu_seqlens_q[row : row + 2].tolist()
        keys, values = (
            repeated(cache[block_table[row].long()].float().flatten(0, 1)[:length], q.shape[1]) for cache in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * softmax_scale
        scores += torch.full_like(scores[0], float("-inf")).triu(1 + length - (end - start))
        if qq_bias is not None:
            scores[:, :, length - (end - start) :] += qq_bias[: end - start]
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
"""
HELPERS = """
def repeated(keys, num_heads):
    return keys.repeat_interleave(num_heads // keys.shape[1], 1)
"""


@pytest.fixture(autouse=True)
def _nothing_timed(monkeypatch, device):
    """Runs all settings and takes the last one."""
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    for peer in (sglang_triton, vllm_triton):
        ran = []
        monkeypatch.setattr(peer, "quick_us", lambda run, ran=ran: ran.append(run()) or -len(ran))
        peer._module.cache_clear()
    yield
    for peer in (sglang_triton, vllm_triton):
        peer._module.cache_clear()


def agree(peer, op, cases, device) -> list[str]:
    """Outputs are the reference's. Returns why the peer does not take other cases."""
    reasons = []
    for case in cases:
        expected = expected_outputs(BENCHMARKS[op], case, device)
        try:
            check_provider(BENCHMARKS[op], case, getattr(peer, op), expected, device)
        except Unavailable as reason:
            reasons.append(str(reason))
    return reasons


def test_a_file_sees_stubs_while_it_is_imported(tmp_path):
    stand_ins = {"other": Stub("other", known=5), "other.deep": Stub("other.deep"), "json": Stub("json")}
    before = dict(sys.modules)
    (tmp_path / "good.py").write_text("import json\nfrom other import known\nfrom other.deep import asked\n")
    good = import_file(tmp_path / "good.py", stand_ins)
    assert good.known == 5 and good.asked("anything", more=1) is False and good.json is stand_ins["json"]
    (tmp_path / "bad.py").write_text("import other.missing\n")
    with pytest.raises(Unavailable, match="bad.py does not import: ModuleNotFoundError"):
        import_file(tmp_path / "bad.py", stand_ins)
    with pytest.raises(Unavailable, match="none.py does not exist"):
        import_file(tmp_path / "none.py", stand_ins)
    assert sys.modules == before


@pytest.fixture(params=["made", "vLLM's"])
def is_made(request, tmp_path, monkeypatch):
    if request.param == "made":
        (tmp_path / "vllm_triton").mkdir()
        (tmp_path / "vllm_triton" / "triton_unified_attention.py").write_text(UNIFIED_ATTENTION)
        (tmp_path / "vllm_triton" / "triton_attention_helpers.py").write_text(HELPERS)
        monkeypatch.setattr(vllm_triton, "FOLDER", tmp_path)
    elif not (peers.FOLDER / "vllm_triton").exists():
        pytest.skip("needs the files that .peers holds")
    else:
        monkeypatch.setattr(vllm_triton, "_SEGMENTS", (None, 8))
    return request.param == "made"


def test_vllm_s_decode_agrees(is_made, device):
    cases = BENCHMARKS["gqa_decode"].small_cases
    assert not agree(vllm_triton, "gqa_decode", cases if is_made else cases[:1], device)
    eight_bits = dataclasses.replace(cases[0], sizes=cases[0].sizes | {"kind": "float8"})
    assert not agree(vllm_triton, "gqa_decode", [eight_bits], device)


def test_vllm_s_trees_agree_where_there_is_one(is_made, device):
    reasons = agree(vllm_triton, "tree_attention", [*TREES, ONE_TOKEN], device)
    assert reasons == ["takes one tree for all requests"] * 3
    # the interpreter takes `a and b` of two blocks for b, the compiler does not
    if is_made or device.type == "cuda":
        assert not agree(vllm_triton, "tree_attention", [ONE_TREE], device)


def test_vllm_s_prefill_agrees_from_pages(is_made, device):
    reasons = agree(vllm_triton, "prefill_attention", BENCHMARKS["prefill_attention"].small_cases, device)
    assert reasons == ["reads keys from pages only"] * 2


@pytest.mark.skipif(not (peers.FOLDER / "sglang_triton").exists(), reason="needs the files that .peers holds")
def test_sglang_s_trees_and_chains_agree(device):
    assert not agree(sglang_triton, "tree_attention", TREES, device)
    assert sglang_triton._module("verify_splitkv")._VK_CACHE, "it was not asked about the chain"


@pytest.mark.skipif(not (peers.FOLDER / "sglang_triton").exists(), reason="needs the files that .peers holds")
@pytest.mark.parametrize("op", ["mla_decode", "mla_tree_attention"])
def test_sglang_s_latents_agree(op, device):
    assert not agree(sglang_triton, op, BENCHMARKS[op].small_cases[:2], device)


@pytest.mark.skipif(
    not (peers.FOLDER / "vllm_triton" / "triton_decode_attention.py").exists(), reason="needs the files of .peers"
)
def test_vllm_s_latents_agree_but_in_trees(device):
    assert not agree(vllm_triton, "mla_decode", BENCHMARKS["mla_decode"].small_cases[:2], device)
    reasons = agree(vllm_triton, "mla_tree_attention", BENCHMARKS["mla_tree_attention"].small_cases, device)
    assert reasons == ["knows no trees on latents"] * 2
