"""Drafting of trees in vLLM: a class that comes before one of vLLM's speculators, whose buffers and passes it keeps.

What is done for a step is all on the device, and does not depend on its number of accepted drafts. So vLLM's two graphs
hold it: that of the first pass the move of keys and values, the rows' order, the pass itself and the root's children;
that of later passes all levels, and the trees that are made of their candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch

from ...ops import build_tree_from_scores, cache_addresses, move_accepted_kv, select_top_k_tokens
from ...ops.tree.select_top_k_tokens import Output as Beams
from .grammars import parents_of
from .parts import SWITCHES, TREES
from .rows import Rows, aligned
from .trees import Level, shape_of


def _has_latents(layer) -> bool:
    return hasattr(layer, "kv_lora_rank")


def _kept(layer) -> list[tuple[int, ...]]:
    """Returns the sizes of what is kept of each beam: a key and a value, or one row."""
    if not _has_latents(layer):
        return [(layer.num_kv_heads, layer.head_size)] * 2
    if not (hasattr(layer, "W_UK_T") and hasattr(layer, "W_UV")):
        raise RuntimeError("eagle_kernels: trees of drafts need weights of latents in 16 bit, not AITER's")
    return [(layer.head_size,)]


def _halves(layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a layer's cached keys and values, [num_pages, page_size, Hkv, D]; of latents the halves of each row."""
    if _has_latents(layer):
        return layer.kv_cache.unflatten(-1, (2, -1)).split(1, dim=-2)
    return layer.kv_cache.transpose(1, 2).split(layer.head_size, dim=-1)


class Move(NamedTuple):
    """The caches that move in one launch: of one layout, in the pages of one block table."""

    group: int  # of vLLM's, whose block table it is
    layer: torch.nn.Module  # any of those whose caches these are
    addresses: torch.Tensor  # of all of them


class TreeDrafts:
    """Drafts trees in place of chains."""

    def __init__(self, vllm_config, device: torch.device):
        super().__init__(vllm_config, device)
        shape = self.shape = shape_of(vllm_config)
        if self.max_num_reqs * shape.topk > self.max_num_tokens:
            raise ValueError(
                "eagle_kernels: --max-num-batched-tokens must be at least --max-num-seqs * topk = "
                f"{self.max_num_reqs * shape.topk} for trees, got {self.max_num_tokens}"
            )
        make = lambda *sizes, dtype=torch.int64: torch.zeros(*sizes, dtype=dtype, device=device)  # noqa: E731
        size, topk, levels = self.max_num_reqs, shape.topk, shape.depth - 1
        self.scores = make(size, shape.num_candidates, dtype=torch.float32)
        self.tokens = make(size, shape.num_candidates)
        self.parent_slots = make(size, 1 + levels * topk) - 1  # the root's first
        self.first = {  # the root's children; rows of graphs that are not used expand these
            "scores": make(size, topk, dtype=torch.float32), "tokens": make(size, topk),
            "hidden_rows": make(size, topk), "ancestors": make(size, topk, 1),
        }  # fmt: skip
        self.root_hidden = make(size, self.hidden_size, dtype=self.dtype)
        self.no_tokens = make(size)  # of roots, which vLLM knows
        sizes = (shape.depth + 1, shape.num_nodes, self.max_num_tokens + 1)
        self.depths, self.nodes, self.rows = (torch.arange(count, device=device) for count in sizes)
        self.roots = torch.arange(size, device=device)[:, None] * shape.num_nodes
        self.drafted = make(3 + shape.num_words, size, shape.num_nodes)  # as `Trees.state`
        self.trees = None  # while vLLM measures how much memory is left
        self.beam_caches: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}  # `Level.keys, values`, by layer
        self.moves: list[Move] | None = None  # until it is known where caches are

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        manager = self.decode_cudagraph_manager
        self.decode_cudagraph_manager = type(manager)(
            self.vllm_config, self.device, manager.cudagraph_mode, decode_query_len=self.shape.topk
        )

    def set_attn(self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups) -> None:
        """Connects the trees with what reads them: the layers, and what makes their metadata."""
        super().set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        self.trees, self.moves = model_state.eagle_kernels_trees, None
        for group in (group for groups in target_attn_groups for group in groups):
            for builder in group.metadata_builders:
                builder.trees = self.trees
        size = (self.max_num_reqs, self.shape.topk * (self.shape.depth - 1))
        for name, layer in self._layers().items():
            if not hasattr(layer.impl, "check_trees"):
                raise RuntimeError(f"eagle_kernels: trees of drafts need our attention in all layers, not in {name}")
            layer.impl.check_trees(name)
            layer.impl.reads_trees = name not in self.draft_attn_layer_names
            if not layer.impl.reads_trees:
                made = [torch.zeros(*size, *heads, dtype=self.dtype, device=self.device) for heads in _kept(layer)]
                self.beam_caches[name] = (*made, None)[:2]

    def _layers(self) -> dict:
        """Returns the layers that have a cache, by name."""
        layers = self.vllm_config.compilation_config.static_forward_context
        return {name: layers[name] for group in self.kv_cache_config.kv_cache_groups for name in group.layer_names}

    def _tables(self, size: int) -> dict[str, torch.Tensor]:
        """Returns the block table of each layer, of the requests in the batch."""
        groups = zip(self.kv_cache_config.kv_cache_groups, self.block_tables.input_block_tables)
        return {name: table[:size] for group, table in groups for name in group.layer_names}

    def later_steps(self) -> list[Callable[[], None]]:
        """Returns calls that launch attention as steps do that no graph holds: prompts beside trees, other numbers of
        requests. They have one row of zeros. Latents are left out, whose prompts are vLLM's.
        """
        alike = {}  # by what kernels depend on
        for name, layer in self._layers().items():
            if not _has_latents(layer):
                impl = layer.impl
                alike[impl.reads_trees, impl.num_heads, layer.num_kv_heads, impl.head_size] = name, layer
        size, num_nodes, calls = self.max_num_reqs, self.shape.num_nodes, []
        number = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        bounds, no_tokens = number.clamp(max=1), torch.zeros_like(number)
        for name, layer in alike.values():
            table, add = self._tables(size)[name], functools.partial(functools.partial, self._attend, layer)
            for count in {min(each, size) for each in (1, 2, 8, 32, size)}:
                prefixes = no_tokens[:count]
                rows = Rows(count, 1, num_nodes, prefixes, prefixes, bounds[: count + 1], number[: count + 1],
                            None, None, self.trees.row_mask[:1])  # fmt: skip
                calls.append(add(1, SimpleNamespace(eagle_kernels=rows, block_table=table[:count])))
                if name in self.beam_caches and self.shape.depth > 1:
                    beams = *self.beam_caches[name], table[:count], prefixes, self.first["ancestors"][:count]
                    calls.append(add(count * self.shape.topk, Level(1, *beams)))
            # by the rows of a tile, and as long as descriptors want
            for longest in {num_nodes + 1, max(num_nodes + 1, 33), min(self.max_num_tokens, self.max_model_len)}:
                rows = Rows(0, 0, num_nodes, *[no_tokens[:0]] * 4, number[:2], aligned(number[1:2]))
                calls.append(add(1, SimpleNamespace(
                    eagle_kernels=rows, block_table=table[:1], num_actual_tokens=1, max_query_len=longest
                )))  # fmt: skip
        return calls

    def _attend(self, layer, count: int, metadata) -> None:
        """Lets a layer attend with `count` rows of zeros."""
        impl = layer.impl
        query, beams = (
            torch.zeros(count, heads * impl.head_size, dtype=self.dtype, device=self.device)
            for heads in (impl.num_heads, layer.num_kv_heads)
        )
        impl.forward(layer, query, beams, beams, layer.kv_cache, metadata, torch.empty_like(query))

    def capture(self) -> None:
        self.trees.forget()
        self.moves = self._find_moves()  # graphs cannot hold what copies addresses to the device
        super().capture()

    def propose(self, input_batch, *arguments, **options) -> torch.Tensor:
        """Returns the nodes after the root, int64 [B, N - 1], of each request's next tree."""
        is_dummy = options.get("dummy_run", False)
        for part in () if is_dummy else ("draft", TREES):
            SWITCHES.note_use(part)
        if is_dummy and self.trees is not None:
            self.trees.forget()
        drafts = super().propose(input_batch, *arguments, **options)
        if not is_dummy:
            self.trees.keep(input_batch.idx_mapping, self.drafted)
            if input_batch.has_structured_output_reqs:
                input_batch.eagle_kernels_parents = parents_of(self.drafted[:, : input_batch.num_reqs])
        return drafts

    # the first pass

    def _prefill(self, num_reqs: int, num_tokens: int, attn_metadata, slot_mappings, num_tokens_across_dp,
                 *mode, **options) -> None:  # fmt: skip
        """Runs the first pass, over what was accepted, and selects the root's children."""
        if self.trees is not None:
            self._move(num_reqs)
            self._bring_to_front(num_reqs, num_tokens)
        last = self.last_token_indices[:num_reqs]
        positions = self.input_buffers.positions[last]
        last_hidden, hidden = self._run_model(
            num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, *mode, **options
        )
        beams = self._select(0, self._logits(last_hidden[last]), num_reqs, None)
        torch.index_select(hidden, 0, last, out=self.root_hidden[:num_reqs])
        # vLLM prepares one row for each request, of which the levels need the position and the length
        self.draft_tokens[:num_reqs, 0] = beams.tokens[:, 0]
        self.input_buffers.positions[:num_reqs] = positions

    def _find_moves(self) -> list[Move]:
        """Returns what moves in the target's layers, one for each launch."""
        layers = self._layers()
        found: dict[tuple, dict] = {}  # by layout; in each, layers by the address of their cache
        for number, group in enumerate(self.kv_cache_config.kv_cache_groups):
            for name in (name for name in group.layer_names if name not in self.beam_caches):
                keys, _ = _halves(layers[name])
                layout = number, keys.dtype, keys.shape, keys.stride(), keys.data_ptr() % 16
                # layers may share a cache, in which a second move would take what the first has overwritten
                found.setdefault(layout, {})[keys.data_ptr()] = layers[name]
        return [
            Move(number, next(iter(alike.values())), cache_addresses(*zip(*map(_halves, alike.values()))))
            for (number, *_), alike in found.items()
        ]

    def _move(self, size: int) -> None:
        """Moves keys and values of accepted paths to the slots after what was there before, in the target's layers.

        The draft's own are written by its first pass, in the slots of the front rows.
        """
        target, trees = self.target_input_buffers, self.trees
        before = target.seq_lens[:size] - target.query_start_loc[: size + 1].diff()
        if self.moves is None:
            self.moves = self._find_moves()
        for move in self.moves:
            keys, values = _halves(move.layer)
            move_accepted_kv(
                keys[None], values[None], self.block_tables.input_block_tables[move.group][:size], before,
                trees.accept_index[:size], trees.num_accepted[:size], num_verify_tokens=self.shape.num_nodes,
                cache_addresses=move.addresses,
            )  # fmt: skip

    def _bring_to_front(self, size: int, num_rows: int) -> None:
        """Brings tokens, positions and hidden states of accepted paths to the first rows of their requests."""
        target, buffers, trees = self.target_input_buffers, self.input_buffers, self.trees
        first = target.query_start_loc[:size, None].long()
        is_off = self.depths > trees.num_accepted[:size, None]
        source = (trees.accept_index[:size] - self.roots[:size] + first).masked_fill_(is_off, 0)
        row = (first + self.depths).masked_fill_(is_off, num_rows)  # what is not changed is written past all rows
        order = self.rows[: num_rows + 1].scatter(0, row.flatten(), source.flatten())[:-1]
        torch.index_select(target.positions, 0, order, out=buffers.positions[:num_rows])
        self.hidden_states[:num_rows] = self.hidden_states[order]
        # The draft reads at each row the token after it. That after the last one was drawn, and is in its place.
        row = row[:, :-1].masked_fill(is_off[:, 1:], num_rows)
        tokens = buffers.input_ids[:num_rows]
        tokens.copy_(torch.cat([tokens, tokens[:1]]).scatter_(
            0, row.flatten(), target.input_ids[source[:, 1:]].flatten()
        )[:-1])  # fmt: skip

    # the levels

    def _multi_step_decode(self, num_reqs: int, skip_attn: bool, batch_desc, num_tokens_across_dp) -> None:
        """Drafts the levels below the root's children, and builds the trees: one graph, if vLLM captured one."""
        topk, manager = self.shape.topk, self.decode_cudagraph_manager
        # there is none yet while vLLM measures memory
        desc = None if manager is None else manager.dispatch(num_reqs, num_reqs * topk, topk, 0)
        if desc is not None and desc.cg_mode.name == "FULL":
            manager.run_fullgraph(desc)
        else:
            self._generate_draft(num_reqs, num_reqs * topk, None if skip_attn else {}, None, num_tokens_across_dp)

    def _generate_draft(
        self, num_reqs: int, num_tokens_padded: int, attn_metadata, slot_mappings, num_tokens_across_dp, *mode
    ) -> None:
        shape, buffers, size = self.shape, self.input_buffers, num_reqs
        topk, rows = shape.topk, num_reqs * shape.topk
        self._prepare_eplb_forward(rows)
        prefix_lens = (buffers.seq_lens[:size] - 1).clamp_(min=0)  # vLLM has counted the row of the first level
        position = buffers.positions[:size].clone()
        hidden = self.root_hidden[:size]
        tables = {} if attn_metadata is None else self._tables(size)
        first_beams = {name: values[:size] for name, values in self.first.items()}
        beams = Beams(**dict.fromkeys(Beams._fields) | first_beams)
        for number in range(1, shape.depth):
            buffers.input_ids[:rows] = beams.tokens.flatten()
            buffers.positions[:rows].view(size, topk).copy_(position[:, None])
            position = (position + 1).clamp_(max=self.max_model_len - 1)
            # a copy: with kernels that work in place, these rows may be those that the pass before returned
            self.hidden_states[:rows] = hidden[beams.hidden_rows.flatten()]
            metadata = None
            if attn_metadata is not None:
                metadata = {
                    name: Level(number, *cache, tables[name], prefix_lens, beams.ancestors)
                    for name, cache in self.beam_caches.items()
                }
            # without slots vLLM writes nothing into the cache
            last_hidden, hidden = self._run_model(rows, metadata, {}, num_tokens_across_dp)
            beams = self._select(number, self._logits(last_hidden[:rows]), size, beams)
        tree = build_tree_from_scores(
            self.no_tokens[:size], self.scores[:size], self.tokens[:size], self.parent_slots[:size], prefix_lens,
            topk=topk, spec_steps=shape.depth, num_verify_tokens=shape.num_nodes,
        )  # fmt: skip
        place = tree.positions.view(size, -1) - prefix_lens[:, None] - self.nodes
        links = tree.retrieve_next_token, tree.retrieve_next_sibling
        torch.stack([place, *links, *tree.tree_mask.unbind(-1)], out=self.drafted[:, :size])
        self.draft_tokens[:size] = tree.draft_tokens.view(size, -1)[:, 1:]

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the head's own logits, which vLLM scatters into the target's vocabulary where they are fewer."""
        model = self.model
        if getattr(model, "draft_id_to_target_id", None) is None:
            return model.compute_logits(hidden_states)
        return model.logits_processor(model.lm_head, hidden_states)

    def _select(self, number: int, logits: torch.Tensor, size: int, before: Beams | None) -> Beams:
        """Selects the beams of a level, and writes its candidates beside those of all others."""
        shape, topk = self.shape, self.shape.topk
        begin, end = topk + (number - 1) * topk**2 if number else 0, topk + number * topk**2
        make = lambda *sizes, dtype=torch.int64: torch.empty(size, topk, *sizes, dtype=dtype, device=self.device)  # noqa: E731
        out = Beams(
            scores=make(dtype=torch.float32), tokens=make(), parents=make(), hidden_rows=make(), parent_slots=make(),
            candidate_scores=self.scores[:size, begin:end], candidate_tokens=self.tokens[:size, begin:end],
            ancestors=make(-(-(number + 1) * topk // 64)),
        )  # fmt: skip
        if number == 0:  # what a later graph reads
            out = out._replace(**{name: values[:size] for name, values in self.first.items()})
        if number < shape.depth - 1:  # the last level's are not read
            out = out._replace(parent_slots=self.parent_slots[:size, 1 + number * topk : 1 + (number + 1) * topk])
        scores, ancestors = (None, None) if before is None else (before.scores, before.ancestors)
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        return select_top_k_tokens(logits, scores, ancestors, offsets, topk=topk, level=number, out=out)


def init_speculator(original, vllm_config, device, *rest):
    """Makes vLLM's speculator; where `additional_config` asks for trees, one that drafts them."""
    made = original(vllm_config, device, *rest)
    if shape_of(vllm_config) is None:
        return made
    kind = type(made)
    del made  # its buffers
    return type(f"Tree{kind.__name__}", (TreeDrafts, kind), {})(vllm_config, device, *rest)
