"""L3, the application layer: models, KV pool and the speculative step, all on top of the ops."""

from .config import EAGLEConfig
from .grammar import generate_token_bitmask
from .inference import EAGLEInference
from .output import GenerationOutput, GenerationResult, GenerationStats, TokenEvent
from .request import Request
from .sampling import SamplingParams
from .timing import CUDATimer, CUDATimerCollection, cuda_sync_time

__all__ = [
    "CUDATimer",
    "CUDATimerCollection",
    "EAGLEConfig",
    "EAGLEInference",
    "GenerationOutput",
    "GenerationResult",
    "GenerationStats",
    "Request",
    "SamplingParams",
    "TokenEvent",
    "cuda_sync_time",
    "generate_token_bitmask",
]
