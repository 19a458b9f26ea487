"""Verification of trees in vLLM, by sample and match: what is drawn after a node is drawn as after its path as a text.

So penalties and banned words count the drafts on the path to a node, where vLLM's own kernels take the rows before it.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from ...ops import penalize_logits, verify_commit
from .parts import SWITCHES
from .rows import aligned
from .sampling import PROCESSED, MatchVerifier, empty_rows, inputs_of
from .trees import Trees, to_device

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class TreeVerifier(MatchVerifier):
    """vLLM's verification of drafts, which are trees."""

    def __init__(self, sampler, spec_config, device, trees: Trees):
        super().__init__(sampler, spec_config, device)
        self.trees = trees
        if self.rates is not None:
            self.rates = self.rates[: trees.shape.depth].contiguous()

    def __call__(self, logits, input_batch, *given) -> SamplerOutput:
        """Draws along the trees of a step, and notes their accepted paths; see `RejectionSampler`."""
        SWITCHES.note_use("verify")
        sampler, trees, batch = self.sampler, self.trees, input_batch
        places, num_nodes = batch.idx_mapping_np, trees.shape.num_nodes
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        wants = sampler.sampling_states.max_num_logprobs(places) != -1
        (drafts, pos), of_request = inputs_of(batch), batch.expanded_idx_mapping
        is_whole = self.is_whole(logits, places)
        if not is_whole:  # all requests get N rows; those that are not there repeat the last one, and nothing matches
            filled, is_there = self._filled(batch)
            logits = torch.index_select(logits, 0, filled, out=empty_rows(logits, len(filled)))
            pos, of_request = pos[filled], of_request[filled]
            drafts = torch.where(is_there, drafts[filled], -1)
        drafts = self._without_unknown(batch, drafts.view(-1, num_nodes))
        raw = logits
        if wants and sampler.logprobs_mode.startswith("raw_"):
            logits = empty_rows(logits, len(logits)).copy_(logits)
        links = self._chains(len(drafts))[0], aligned(trees.current[1]), aligned(trees.current[2])
        adjusted = self._adjust(logits, drafts, links, pos, of_request, batch)
        parameters = self.parameters(adjusted, of_request, batch.idx_mapping, places)
        path, number, sampled, num_sampled = self._accept(parameters, drafts, self._walked(links), pos)
        trees.note(path, number)
        logprobs = None
        if wants:
            processed = sampler.processed(adjusted, of_request, places, wants)
            of = processed if sampler.logprobs_mode in PROCESSED else raw
            logprobs = self._get_logprobs_tensors(batch, sampled, num_sampled, of[self._path_rows(path, batch)])
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, sampler.req_states.prefill_len.gpu
        )
        return SamplerOutput(sampled, logprobs, num_nans, num_sampled, num_rejected)

    def verify_whole(self, parameters: dict, drafts, pos):
        """Walks chains as trees, to compile what walks trees."""
        drafts = drafts.view(-1, self.trees.shape.num_nodes)
        return self._accept(parameters, drafts, self._chains(len(drafts)), pos)

    def _accept(self, parameters: dict, drafts, links, pos) -> tuple[torch.Tensor, ...]:
        """Returns the path int32 [B, S + 1] in each tree, b * N + node, how many drafts it has, its tokens int64 [B,
        S + 1] and the one after them, and how many these are; -1 padded."""
        out = done = self.walk(parameters, drafts, links, pos, self.trees.shape.depth)
        if "temperature" not in parameters:
            done = verify_commit(*out, out.accept_token_num)  # in the place of lengths that nobody needs
        return out.accept_index, out.accept_token_num, done.tokens, done.accept_lengths

    def _filled(self, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns for each node of each request its row of logits int64 [B * N], and whether it is there."""
        bounds = batch.cu_num_logits.long()
        node, counts = torch.arange(self.trees.shape.num_nodes, device=bounds.device), bounds.diff()[:, None]
        filled = bounds[:-1, None] + torch.minimum(node, counts - 1)
        return filled.flatten(), (node < counts).flatten()

    def _without_unknown(self, batch, drafts: torch.Tensor) -> torch.Tensor:
        """Returns drafts of which none matches where a grammar's masks after the first are missing; see grammars.py."""
        unknown = getattr(batch, "eagle_kernels_unknown", ())
        places = [place for place, request in enumerate(batch.req_ids) if request in unknown] if unknown else ()
        if places:
            drafts = drafts.clone()
            drafts[to_device(torch.tensor(places, dtype=torch.int64, device="cpu"), drafts.device), 1:] = -1
        return drafts

    def _walked(self, links: tuple) -> tuple:
        """Returns the links that are walked. Synthetic acceptance walks nodes at even distances as if they were a path.

        Its rates name a depth, which a tree of a draft that knows nothing may not have. The draft then reads these
        nodes at the depths that they have.
        """
        if self.rates is None:
            return links
        depth, num_nodes = self.trees.shape.depth, self.trees.shape.num_nodes
        step = (num_nodes - 1) // depth
        child = torch.full_like(links[1], -1)
        child[:, : step * depth : step] = torch.arange(step, step * depth + 1, step, device=child.device)
        return links[0], child, torch.full_like(child, -1)

    def _adjust(self, logits, drafts, links, pos, of_request, batch) -> torch.Tensor:
        """Returns the logits after biases, penalties and bans, in place."""
        sampler, places, requests = self.sampler, batch.idx_mapping_np, batch.idx_mapping
        sampler.logit_bias_state.apply_logit_bias(logits, of_request, places, pos)
        penalties, words = sampler.penalties_state, sampler.bad_words_state
        if penalties.use_penalty[places].any():
            given = {name: getattr(penalties, name).gpu[requests] for name in PENALTIES}
            # rounded as vLLM does without drafts
            logits.copy_(penalize_logits(
                drafts, *links, logits, **given, prompt_mask=penalties.prompt_bin_mask[requests],
                output_counts=penalties.output_bin_counts[requests],
            ))  # fmt: skip
        if words.num_bad_words.np[places].any():
            ban_words(logits, words, of_request, *self._paths(drafts))
        return logits

    def _paths(self, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns of each node int64 [B * N] its depth, and [B * N, S + 1] the tokens from the root to it, by depth."""
        num_nodes, current = self.trees.shape.num_nodes, self.trees.current
        node = torch.arange(num_nodes, device=drafts.device)
        depth = current[0] + node
        words = current[3:].permute(1, 2, 0)  # [B, N, W]
        sees = words[:, :, node // 64] >> (node % 64) & 1 > 0
        wanted = torch.arange(self.trees.shape.depth + 1, device=drafts.device)[:, None]
        is_there = sees[:, :, None] & (depth[:, None, None] == wanted)  # [B, N, S + 1, N]
        tokens = torch.where(is_there, drafts[:, None, None], -1).amax(-1)
        return depth.flatten(), tokens.flatten(0, 1)

    def _path_rows(self, path: torch.Tensor, batch) -> torch.Tensor:
        """Returns the rows of accepted paths before others, int64 [rows of logits], as vLLM pairs them with tokens."""
        num_nodes, bounds = self.trees.shape.num_nodes, torch.from_numpy(batch.cu_num_logits_np).long()
        order = torch.arange(len(path) * num_nodes, device=path.device).view(-1, num_nodes)
        order[:, : path.shape[1]] = path.clamp(min=0)
        skipped = (torch.arange(len(path), device="cpu") * num_nodes - bounds[:-1]).repeat_interleave(bounds.diff())
        return order.flatten()[to_device(skipped + torch.arange(len(skipped), device="cpu"), path.device)]


def ban_words(logits, words, of_request, depth, tokens) -> None:
    """Bans the last token of words [rows, V] whose others end the text at a row, in place.

    words: vLLM's BadWordsState. of_request: each row's place there. depth, tokens: see `TreeVerifier._paths`.
    """
    states, place = words.req_states, of_request.long()
    listed, ends, count = (
        words.bad_word_token_ids.gpu[place],
        words.bad_word_offsets.gpu[place],
        words.num_bad_words.gpu,
    )
    num_words = ends.shape[1] - 1
    index = torch.arange(num_words + 1, device=place.device)
    # of words that a request does not have, the list's end
    ends = torch.where(index <= count[place][:, None], ends, listed.shape[1]).long()
    slot = torch.arange(listed.shape[1], device=place.device).expand_as(listed).contiguous()
    word = (torch.searchsorted(ends, slot, right=True) - 1).clamp(0, num_words - 1)
    back = ends.gather(1, word + 1) - 1 - slot  # 0 at a word's last token
    prompt_len, total_len = states.prompt_len.gpu[place][:, None], states.total_len.gpu[place][:, None]
    at = total_len + depth[:, None] - back  # in the text, of which drafts are the end
    in_text = states.all_token_ids.gpu[place[:, None], at.clamp(0, states.all_token_ids.gpu.shape[1] - 1).long()]
    in_path = tokens.gather(1, (at - total_len + 1).clamp(0, tokens.shape[1] - 1).long())
    is_same = (back <= 0) | ((at >= prompt_len) & (listed == torch.where(at < total_len, in_text, in_path)))
    is_met = torch.ones_like(ends[:, :-1], dtype=torch.int32).scatter_reduce_(1, word, is_same.int(), "amin") > 0
    is_met &= index[:-1] < count[place][:, None]
    last = listed.gather(1, (ends[:, 1:] - 1).clamp(min=0)).long().clamp(0, logits.shape[1] - 1)
    # two words may end alike: what bans wins
    banned = torch.where(is_met, float("-inf"), float("inf")).to(logits.dtype)
    logits.scatter_reduce_(1, last, banned, "amin")
