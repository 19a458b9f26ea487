"""The choice of an attention backend in vLLM, where one name stands for two of ours: of keys, and of latents (MLA)."""

from .parts import backend_name


def choose_backend(original, backend, attn_selector_config, *rest, **options):
    """Returns our backend for layers of latents, where our name is asked for, and what vLLM chooses everywhere else."""
    asked = attn_selector_config
    if not asked.use_mla or getattr(backend, "name", None) != backend_name():
        return original(backend, attn_selector_config, *rest, **options)
    from vllm.platforms import current_platform

    from .latent import LatentBackend

    reasons = LatentBackend.validate_configuration(
        device_capability=current_platform.get_device_capability(), **asked._asdict()
    )
    if reasons:
        raise ValueError(f"eagle_kernels: the attention over latents does not support {'; nor '.join(reasons)}")
    return LatentBackend
