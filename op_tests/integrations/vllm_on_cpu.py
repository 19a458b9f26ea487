"""The real vLLM 0.26 on a CPU: its front end, scheduler, Model Runner V2 and models, with the plug-in and our pair.

Kernels run in Triton's interpreter. What CUDA would do is made up: there is one GPU by name, streams and pinned memory
are nothing, and a graph is the call that was captured, on what it was captured with.

test_vllm_whole.py starts this in a process of its own: python vllm_on_cpu.py ORDER NEW_FILE. The order is JSON with
`engine` (arguments of vllm.LLM), `requests` (prompts), `sampling` (`grammar`: by vllm_grammar.py) and `graphs` (sizes).
The last line that it prints is JSON.
"""

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from concurrent.futures import Future

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRITON_INTERPRET": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "EAGLE_KERNELS_VLLM_PROMPTS": "ours",
}  # fmt: skip

import torch
from triton.backends import backends

DEVICE = torch.device("cpu")
COUNTERS = {"steps": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}


class Nothing:
    """A stream, or an event of one."""

    cuda_stream = 0

    def __init__(self, *given, **options):
        pass

    def __getattr__(self, name: str):
        return lambda *given, **options: None


class Gpu(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """NVML's module, which tells of one GPU."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "vllm.third_party.pynvml" else None

    def create_module(self, spec):
        module, error = types.ModuleType(spec.name), type("NVMLError", (Exception,), {"value": 0})
        vars(module).update(
            NVMLError=error, NVMLError_NotSupported=error, nvmlDeviceGetCount=lambda: 1,
            nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0), nvmlDeviceGetName=lambda handle: "a GPU",
            nvmlDeviceGetUUID=lambda handle: "GPU-0",
            nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=140 << 30, free=139 << 30, used=1 << 30),
            __getattr__=lambda name: _refuse(name) if name.startswith("__") else lambda *given, **options: 0,
        )  # fmt: skip
        return module

    def exec_module(self, module):
        pass


def _refuse(name: str):
    raise AttributeError(name)


def _without_cuda() -> None:
    properties = types.SimpleNamespace(
        name="a GPU", major=9, minor=0, total_memory=140 << 30, multi_processor_count=132, uuid="0", warp_size=32,
        shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        L2_cache_size=60 << 20,
    )  # fmt: skip
    for name, value in {
        "is_available": True, "device_count": 1, "get_device_capability": (9, 0), "get_device_name": "a GPU",
        "get_device_properties": properties, "current_device": 0, "mem_get_info": (139 << 30, 140 << 30),
        "current_stream": Nothing(), "default_stream": Nothing(), "set_stream": None, "synchronize": None,
        "empty_cache": None, "graph_pool_handle": 0, "stream": contextlib.nullcontext(),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *given, value=value, **options: value)
    torch.cuda.Stream = torch.cuda.Event = torch.Event = Nothing
    torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *given: None
    torch.Tensor.record_stream, torch.Tensor.pin_memory = lambda *given: None, lambda tensor: tensor
    for name in ("zeros", "empty", "tensor", "full", "ones", "arange"):
        make = getattr(torch, name)
        setattr(torch, name, lambda *given, make=make, pin_memory=False, **options: make(*given, **options))
    for place, backend in enumerate(backends.values()):
        backend.driver.is_active = staticmethod(lambda place=place: place == 0)
    sys.modules["vllm.vllm_flash_attn._vllm_fa3_C"] = types.ModuleType("vllm.vllm_flash_attn._vllm_fa3_C")
    sys.meta_path.insert(0, Gpu())


_without_cuda()

import vllm  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

type(current_platform).dispatch_key = "CPU"
type(current_platform).is_pin_memory_available = classmethod(lambda cls: False)
sys.modules["vllm.utils.torch_utils"].PIN_MEMORY = False

from vllm import _custom_ops  # noqa: E402
from vllm.model_executor.layers.attention import mla_attention  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend  # noqa: E402
from vllm.v1.executor.abstract import Executor  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils, cudagraph_utils, model_runner  # noqa: E402

from eagle_kernels.integrations.vllm import guards, register  # noqa: E402
from op_tests.integrations import vllm_grammar  # noqa: E402
from op_tests.integrations.vllm_stub import _Pool as Pool  # noqa: E402


class NoPrompts(MLAPrefillBackend):
    """Stands for what reads prompts of models with latents, which are ours here."""

    get_name = staticmethod(lambda: "NONE")

    def run_prefill_new_tokens(self, *given, **options):
        raise NotImplementedError

    run_prefill_context_chunk = run_prefill_new_tokens


def concat_and_cache_mla(latent, key, cache, slots, kv_cache_dtype, scale) -> None:
    """vLLM's, of cache in 16 or 32 bits."""
    is_there = slots >= 0
    cache.flatten(0, 1)[slots[is_there]] = torch.cat([latent, key], -1)[: len(slots)][is_there]


mla_attention.get_mla_prefill_backend = lambda config: NoPrompts
_custom_ops.concat_and_cache_mla = concat_and_cache_mla
guards.torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))  # eager engines may start
buffer_utils.UvaBufferPool, buffer_utils.get_accelerator_view_from_cpu_tensor = Pool, lambda tensor: tensor
model_runner.DeviceMemoryProfiler = lambda: contextlib.nullcontext(types.SimpleNamespace(consumed_memory=0))
REPLAYED: set[int] = set()  # tokens of graphs


def capture(manager, create_forward_fn, progress_bar_desc: str = "") -> None:
    """Keeps calls in place of graphs."""
    for desc in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
        for is_warmup in (True, False):
            forward = create_forward_fn(desc, is_warmup)
            forward(CUDAGraphMode.NONE)

        def replay(desc=desc, forward=forward):
            REPLAYED.add(desc.num_tokens)
            forward(CUDAGraphMode.NONE)

        manager.graphs[desc] = types.SimpleNamespace(replay=replay)
    manager._graphs_captured = True


cudagraph_utils.CudaGraphManager.capture = capture


class OnThisProcess(Executor):
    """vLLM's runner, in the place of its workers."""

    supported_tasks = ("generate",)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        config = self.vllm_config
        config.device_config.device, config.load_config.device = DEVICE, "cpu"
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(1, 0, f"file://{sys.argv[2]}", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            guards.init_device(lambda wrapper: None, types.SimpleNamespace(vllm_config=config))
            self.runner = model_runner.GPUModelRunner(config, DEVICE)
            self.runner.load_model()

    def get_kv_cache_specs(self):
        return [self.runner.get_kv_cache_spec()]

    def determine_available_memory(self):
        return [self.cache_config.kv_cache_memory_bytes]

    @torch.inference_mode()
    def initialize_from_config(self, configs) -> None:
        runner = self.runner
        with set_current_vllm_config(self.vllm_config):
            runner.initialize_kv_cache(configs[0])
            if runner.cudagraph_manager.needs_capture():
                runner.cudagraph_manager.capture(
                    runner.model, runner.model_state, runner.input_buffers, runner.intermediate_tensors,
                    runner.block_tables, runner.attn_groups, runner.kv_cache_config,
                    use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
                )  # fmt: skip
                runner.speculator.capture()
            for call in getattr(runner.speculator, "later_steps", list)():
                call()

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        return [None]

    def check_health(self) -> None:
        pass

    @torch.inference_mode()
    def execute_model(self, scheduler_output, non_block=False):
        return _in_future(self.runner.execute_model(scheduler_output), non_block)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output, non_block=False):
        result = self.runner.sample_tokens(grammar_output)
        return _in_future(result.get_output() if hasattr(result, "get_output") else result, non_block)

    def take_draft_token_ids(self):
        return self.runner.take_draft_token_ids()

    def shutdown(self) -> None:
        pass


def _in_future(result, is_wanted: bool):
    if not is_wanted:
        return result
    future = Future()
    future.set_result(result)
    return future


def main(order: dict) -> None:
    register()
    vllm_grammar.serve(StructuredOutputManager, vllm.SamplingParams, StructuredOutputGrammar)
    compilation = {"custom_ops": ["none"], "mode": 0}
    if order["graphs"]:
        compilation |= {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": order["graphs"]}
    engine = vllm.LLM(
        **order["engine"], distributed_executor_backend=OnThisProcess, compilation_config=compilation,
        enforce_eager=not order["graphs"], attention_backend="CUSTOM", skip_tokenizer_init=True,
        disable_log_stats=False,
    )  # fmt: skip
    parameters = []
    for each in order["sampling"]:
        asked = {"structured_outputs": StructuredOutputsParams(regex=".*")} if each.pop("grammar", False) else {}
        parameters.append(vllm.SamplingParams(**each, **asked, ignore_eos=True, detokenize=False))
    prompts = [{"prompt_token_ids": prompt} for prompt in order["requests"]]
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    found = {name: int(metrics.get(f"vllm:spec_decode_{counter}", 0)) for name, counter in COUNTERS.items()}
    found |= {"preempted": int(metrics["vllm:num_preemptions"]), "lost": metrics["vllm:kv_cache_usage_perc"]}
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps(found | {"texts": texts, "replayed": sorted(REPLAYED)}), flush=True)
    os._exit(0)


main(json.loads(sys.argv[1]))
