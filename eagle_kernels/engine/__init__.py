"""L3, the application layer: models, KV pool and the speculative step, all on top of the ops."""

from .config import EAGLEConfig
from .inference import EAGLEInference
from .output import GenerationOutput, GenerationStats, TokenEvent

__all__ = ["EAGLEConfig", "EAGLEInference", "GenerationOutput", "GenerationStats", "TokenEvent"]
