"""L3, the application layer: models, KV pool and the speculative step, all on top of the ops."""

from ..ops import generate_token_bitmask
from .config.eagle_config import EAGLEConfig
from .inference import EAGLEInference
from .requests.request import Request, TokenEvent
from .requests.sampling_params import SamplingParams
from .serve.output import GenerationOutput, GenerationStats

__all__ = ["EAGLEConfig", "EAGLEInference", "GenerationOutput", "GenerationStats", "Request", "SamplingParams",
           "TokenEvent", "generate_token_bitmask"]  # fmt: skip
