"""L3, the application layer: models, KV pool and the speculative step, all on top of the ops."""

from .config import EAGLEConfig
from .grammar import generate_token_bitmask
from .inference import EAGLEInference
from .output import GenerationOutput, GenerationStats, TokenEvent
from .request import Request
from .sampling import SamplingParams

__all__ = [
    "EAGLEConfig",
    "EAGLEInference",
    "GenerationOutput",
    "GenerationStats",
    "Request",
    "SamplingParams",
    "TokenEvent",
    "generate_token_bitmask",
]
