"""A made speculator of vLLM 0.26's: its passes, buffers and order of calls, in plain torch."""

from types import SimpleNamespace

import torch

NONE = SimpleNamespace(name="NONE")


class AutoRegressiveSpeculator:
    """Drafts chains: a first pass over the target's rows, then one row of each request after another."""

    def __init__(self, vllm_config, device):
        self.vllm_config, self.device, self.speculative_config = vllm_config, device, vllm_config.speculative_config
        self.num_speculative_steps = self.speculative_config.num_speculative_tokens
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        self.max_num_reqs, self.max_num_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        self.max_model_len, self.dtype = model.max_model_len, model.dtype
        self.hidden_size = self.speculative_config.draft_model_config.get_hidden_size()
        make = lambda *sizes, dtype=torch.int64: torch.zeros(sizes, dtype=dtype, device=device)  # noqa: E731
        size = self.max_num_reqs
        self.input_buffers = SimpleNamespace(
            input_ids=make(self.max_num_tokens, dtype=torch.int32), positions=make(self.max_num_tokens),
            query_start_loc=make(size + 1, dtype=torch.int32), seq_lens=make(size, dtype=torch.int32),
        )  # fmt: skip
        self.hidden_states = make(self.max_num_tokens, self.hidden_size, dtype=self.dtype)
        self.last_token_indices, self.draft_tokens = make(size), make(size, self.num_speculative_steps)
        self.prefill_cudagraph_manager = self.decode_cudagraph_manager = None

    def set_attn(self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups):
        self.model_state, self.kv_cache_config, self.block_tables = model_state, kv_cache_config, block_tables
        self.target_input_buffers = target_input_buffers

    def _prepare_eplb_forward(self, num_tokens):
        pass

    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
        num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, num_tokens_across_dp=None,
        dummy_run=False, skip_attn_for_dummy_run=False, mm_inputs=None, is_profile=False,
    ):  # fmt: skip
        batch, buffers, count = input_batch, self.input_buffers, input_batch.num_reqs
        num_tokens = batch.num_tokens_after_padding
        hidden = torch.cat(aux_hidden_states, -1) if aux_hidden_states else last_hidden_states
        self.hidden_states[:num_tokens] = hidden
        # shifts tokens by one, and copies what the target had
        bounds = batch.query_start_loc.tolist()
        for request in range(count):
            place, first = int(batch.idx_mapping[request]), bounds[request]
            length = bounds[request + 1] - first - int(num_rejected[request])
            source = last_sampled if int(num_sampled[request]) else next_prefill_tokens
            last = first + length - 1
            buffers.input_ids[first:last] = batch.input_ids[first + 1 : last + 1].clone()
            buffers.input_ids[last] = source.flatten()[place]
            buffers.positions[first : last + 1] = batch.positions[first : last + 1]
            self.last_token_indices[request] = last
        buffers.query_start_loc[: count + 1] = batch.query_start_loc[: count + 1]
        buffers.seq_lens[:count], buffers.seq_lens[count:] = batch.seq_lens[:count], 0
        self.last_token_indices[count:] = 0
        lengths = set(batch.num_scheduled_tokens.tolist())
        desc = SimpleNamespace(cg_mode=NONE, num_tokens=num_tokens)
        if not is_profile:  # where there are no graphs yet
            uniform = lengths.pop() if len(lengths) == 1 else None
            desc = self.prefill_cudagraph_manager.dispatch(count, num_tokens, uniform)
        if desc.cg_mode.name == "FULL":
            self.prefill_cudagraph_manager.run_fullgraph(desc)
        else:
            self._prefill(
                count, desc.num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp=num_tokens_across_dp,
                cudagraph_runtime_mode=desc.cg_mode, mm_inputs=mm_inputs,
            )  # fmt: skip
        if self.num_speculative_steps == 1:
            return self.draft_tokens[:count, :1]
        buffers.input_ids[:count] = self.draft_tokens[:count, 0].int()
        buffers.positions[:count] = (buffers.positions[:count] + 1).clamp(max=self.max_model_len - 1)
        lengths = batch.seq_lens[:count] - num_rejected[:count] + 1
        buffers.seq_lens[:count], buffers.seq_lens[count:] = lengths.clamp(max=self.max_model_len), 0
        self._multi_step_decode(count, dummy_run and skip_attn_for_dummy_run, None, num_tokens_across_dp)
        return self.draft_tokens[:count]
