"""vLLM's state of a model, which gives our sampler and verification, and lays out the rows of trees."""

from __future__ import annotations

from .sampling import MatchSampler, MatchVerifier
from .tree_verification import TreeVerifier
from .trees import Trees, shape_of


def init_model_state(original, vllm_config, model, encoder_cache, device):
    """Makes vLLM's state of a model, which gives our sampler and verification where it gives none of its own."""
    state = original(vllm_config, model, encoder_cache, device)
    own, spec_config = state.custom_sampler, vllm_config.speculative_config
    trees = _with_trees(state, vllm_config, device)

    def custom_sampler(sampler):
        made = own(sampler)
        if made is not None and trees is not None:
            raise RuntimeError("eagle_kernels: trees of drafts are not supported by models with a sampler of their own")
        if made is not None:
            return made
        ours = MatchSampler.of(sampler)
        if trees is not None:
            return ours, TreeVerifier(ours, spec_config, device, trees)
        return ours, None if spec_config is None else MatchVerifier(ours, spec_config, device)

    state.custom_sampler = custom_sampler
    return state


def _with_trees(state, vllm_config, device) -> Trees | None:
    """Lets a state lay out trees, if a configuration asks for them; returns them."""
    shape = shape_of(vllm_config)
    if shape is None:
        return None
    scheduler, prepare_attn = vllm_config.scheduler_config, state.prepare_attn
    trees = state.eagle_kernels_trees = Trees(shape, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, device)

    def prepare_attn_of_trees(input_batch, *arguments, **options):
        # after vLLM has taken the slots from the positions, and before it makes the metadata
        trees.lay_out(input_batch)
        return prepare_attn(input_batch, *arguments, **options)

    state.prepare_attn = prepare_attn_of_trees
    return trees
