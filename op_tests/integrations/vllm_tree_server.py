"""A made worker of vLLM 0.26's with a tiny target and draft, whose attention, trees and drafts are the plug-in's.

Texts and trees are held against the same models without a cache, which read a text as a whole.
"""

import importlib
from types import SimpleNamespace

import numpy as np
import torch

from eagle_kernels.integrations.vllm.trees import TreeShape
from eagle_kernels.reference.ops.sampling.sample_from_logits import sample_from_logits
from op_tests.integrations import vllm_stub as stub

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 24, 32, 4, 2, 16, 2
LONGEST, PAGE, MOST_TOKENS = 96, 16, 128
OURS = "eagle_kernels.integrations.vllm."


class Layer:
    """Attention with rotated queries and keys, added to its input."""

    def __init__(self, coin: torch.Generator, device):
        make = lambda *sizes: torch.randn(*sizes, generator=coin).to(device) / HIDDEN**0.5  # noqa: E731
        self.sizes = (HEADS, KV_HEADS, KV_HEADS)
        self.inward, self.outward = make(HIDDEN, sum(self.sizes) * HEAD_DIM), 2 * make(HEADS * HEAD_DIM, HIDDEN)

    def __call__(self, x, positions, attend):
        query, key, value = (x @ self.inward).view(len(x), -1, HEAD_DIM).split(self.sizes, 1)
        half = HEAD_DIM // 2
        angle = positions[:, None].double() / 30.0 ** (torch.arange(half, device=x.device) / half)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None].to(torch.complex64)
        turned = lambda y: torch.view_as_real(torch.complex(y[..., :half], y[..., half:]) * turn).flatten(-2)  # noqa: E731
        return x + attend(turned(query), turned(key), value.contiguous()).reshape(len(x), -1) @ self.outward


class Models:
    """The target, and a draft that knows which tokens often follow which, and so is often right."""

    def __init__(self, device, known=None):
        coin, self.known = torch.Generator().manual_seed(1), known  # the draft's tokens, if they are not all
        make = lambda *sizes: torch.randn(*sizes, generator=coin).to(device)  # noqa: E731
        self.table, self.embedding, self.joining = 4 * make(VOCAB, VOCAB), make(VOCAB, HIDDEN), make(2 * HIDDEN, HIDDEN)
        self.layers, self.draft_layer = [Layer(coin, device) for _ in range(LAYERS)], Layer(coin, device)
        self.heads = [scale * make(HIDDEN, VOCAB) / HIDDEN**0.5 for scale in (1.0, 0.7)]

    def target(self, ids, positions, attend):
        x = self.embedding[ids]
        for number, layer in enumerate(self.layers):
            x = layer(x, positions, attend(f"target.{number}"))
        return torch.cat([x, self.table[ids]], 1)  # all that logits and drafts need

    def draft(self, ids, positions, hidden, attend):
        x = torch.tanh(torch.cat([self.embedding[ids], hidden[:, :HIDDEN]], 1) @ self.joining / 8)
        return torch.cat([self.draft_layer(x, positions, attend("draft")), self.table[ids]], 1)

    def logits(self, hidden, is_draft=False):
        logits = hidden[:, HIDDEN:] + hidden[:, :HIDDEN] @ self.heads[is_draft]
        return logits[:, self.known] if is_draft and self.known is not None else logits


def causal(query, key, value, is_seen=None):
    group, size = HEADS // KV_HEADS, len(query)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    is_seen = torch.ones(size, size, dtype=torch.bool, device=query.device).tril() if is_seen is None else is_seen
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~is_seen, float("-inf")).softmax(-1), value)


def whole_text(models: Models, text: list[int], device) -> torch.Tensor:
    """What the target gives of a text that it reads as a whole."""
    return models.target(torch.tensor(text, device=device), torch.arange(len(text), device=device), lambda _: causal)


def whole_tree(models: Models, text: list[int], shape: TreeShape, device) -> set[tuple[int, ...]]:
    """The paths of the tree after a text, by EAGLE-2: beams, of which each is read with its path as a whole."""
    hidden = whole_text(models, text, device)[:-1]
    found, beams = [], [(0.0, ())]
    for _ in range(shape.depth):
        candidates = []
        for score, path in beams:
            # a draft of the first level stands for the row at which the token before it was read
            states, ids = hidden, torch.tensor([*text[1:], *path], device=device)
            for size in range(len(path) + 1):
                read = models.draft(
                    ids[: len(states)], torch.arange(len(states), device=device), states, lambda _: causal
                )
                if size < len(path):
                    states = torch.cat([states, read[-1:]])
            logs = models.logits(read[-1:], True)[0].double().log_softmax(-1)
            best, known = logs.topk(shape.topk), range(VOCAB) if models.known is None else models.known.tolist()
            candidates += [
                (score + float(log), (*path, known[int(token)])) for log, token in zip(best.values, best.indices)
            ]
        found += candidates
        beams = sorted(candidates, key=lambda one: -one[0])[: shape.topk]
    return {path for _, path in sorted(found, key=lambda one: -one[0])[: shape.num_nodes - 1]}


class Worker:
    """Steps of requests at places of vLLM's states; `run` holds all texts and trees against the whole."""

    def __init__(self, shape: TreeShape, device, num_places=3, padded=0, seeds=None, known=None):
        self.shape, self.device, self.padded = shape, torch.device(device), padded
        self.models = Models(device, None if known is None else torch.tensor(known, device=device))
        self.attention, self.ours, self.drafting = (
            importlib.import_module(OURS + name) for name in ("attention", "model_state", "tree_drafting")
        )
        self.places, self.accepted, self.moved = num_places, [], 0
        make = lambda *sizes, dtype=torch.int32: torch.zeros(sizes, dtype=dtype, device=device)  # noqa: E731
        size = num_places + padded
        pages = size * (LONGEST // PAGE) + 1
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = order.view(size, -1).to(device, torch.int32)
        self.input_tables = make(size, LONGEST // PAGE)
        self.buffers = SimpleNamespace(
            input_ids=make(MOST_TOKENS), positions=make(MOST_TOKENS, dtype=torch.int64),
            query_start_loc=make(size + 1), seq_lens=make(size),
        )  # fmt: skip
        self._make_layers(pages)
        self._make_states(size, seeds)
        self._make_speculator(size)

    def _make_layers(self, pages: int) -> None:
        self.layers = {}
        for name in (*(f"target.{number}" for number in range(LAYERS)), "draft"):
            impl = self.attention.EagleKernelsImpl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, None, None, "auto")
            cache = torch.full((pages, PAGE, KV_HEADS, 2 * HEAD_DIM), 9.0, device=self.device).transpose(1, 2)
            self.layers[name] = SimpleNamespace(
                impl=impl, kv_cache=cache, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, layer_name=name
            )

    def _make_states(self, size: int, seeds) -> None:
        number = lambda dtype=np.int32: SimpleNamespace(  # noqa: E731
            np=np.zeros(size, dtype), gpu=torch.zeros(size, dtype=torch.int32, device=self.device)
        )
        self.states = SimpleNamespace(
            max_num_reqs=size, vocab_size=VOCAB, device=self.device, prompt_len=number(), prefill_len=number(),
            total_len=number(), all_token_ids=SimpleNamespace(gpu=None),
        )  # fmt: skip
        spec = SimpleNamespace(
            num_speculative_tokens=self.shape.num_nodes - 1, rejection_sample_method="standard",
            synthetic_acceptance_rates=None, method="eagle", use_local_argmax_reduction=False,
            draft_sample_method="greedy",
            draft_model_config=SimpleNamespace(
                get_hidden_size=lambda: HIDDEN + VOCAB, get_vocab_size=lambda: VOCAB, hf_config=None
            ),
        )  # fmt: skip
        self.config = SimpleNamespace(
            speculative_config=spec, num_speculative_tokens=spec.num_speculative_tokens,
            additional_config={"eagle_kernels": {"topk": self.shape.topk, "depth": self.shape.depth}},
            scheduler_config=SimpleNamespace(max_num_seqs=size, max_num_batched_tokens=MOST_TOKENS),
            parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, decode_context_parallel_size=1),
            compilation_config=SimpleNamespace(cudagraph_mode=None, static_forward_context=self.layers),
            model_config=SimpleNamespace(
                max_model_len=LONGEST, dtype=torch.float32, use_fp64_gumbel=False, rswa_window=None,
                get_num_attention_heads=lambda _: HEADS, get_num_kv_heads=lambda _: KV_HEADS,
                get_head_size=lambda: HEAD_DIM,
            ),
        )  # fmt: skip
        self.builder = self.attention.EagleKernelsBuilder(
            SimpleNamespace(block_size=PAGE), list(self.layers), self.config, self.device
        )
        model_state = SimpleNamespace(custom_sampler=lambda sampler: None, prepare_attn=self._metadata)
        self.model_state = self.ours.init_model_state(lambda *_: model_state, self.config, None, None, self.device)
        kind = importlib.import_module("vllm.v1.worker.gpu.sample.sampler").Sampler
        made = kind(
            max_num_reqs=size, vocab_size=VOCAB, device=self.device, req_states=self.states,
            num_speculative_tokens=self.shape.num_nodes,
        )  # fmt: skip
        self.sampler, self.verifier = self.model_state.custom_sampler(made)
        self.trees = self.model_state.eagle_kernels_trees
        self.seeds = seeds
        for place in range(size):
            params = {
                "temperature": 0.0 if seeds is None else 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
                "seed": place if seeds is None else seeds + place, "logprobs": None, "repetition_penalty": 1.0,
                "frequency_penalty": 0.0, "presence_penalty": 0.0, "allowed_token_ids": None, "logit_bias": None,
                "min_tokens": 0, "all_stop_token_ids": set(), "bad_words_token_ids": None, "logprob_token_ids": None,
                "structured_outputs": None,
            }  # fmt: skip
            self.states.all_token_ids.gpu = torch.zeros(size, LONGEST, dtype=torch.int32, device=self.device)
            self.sampler.add_request(place, 1, SimpleNamespace(**params))
        self.sampler.apply_staged_writes()

    def _make_speculator(self, size: int) -> None:
        module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.autoregressive.speculator")
        worker, above = self, module.AutoRegressiveSpeculator

        class Kind(above):
            def load_draft_model(self, *given):
                raise NotImplementedError

            def _run_model(self, num_tokens, metadata, slots, *_, **__):
                buffers = self.input_buffers
                read = worker.models.draft(
                    buffers.input_ids[:num_tokens].long(), buffers.positions[:num_tokens],
                    self.hidden_states[:num_tokens], lambda name: worker._attend(name, metadata, slots),
                )  # fmt: skip
                # as kernels do that work in place
                self.hidden_states[:num_tokens] = read
                return read, self.hidden_states[:num_tokens]

        groups = [SimpleNamespace(layer_names=list(self.layers))]
        self.speculator = self.drafting.init_speculator(lambda *_: object.__new__(Kind), self.config, self.device)
        assert type(self.speculator).__name__ == "TreeKind"
        self.speculator.draft_attn_layer_names = {"draft"}
        read = lambda hidden: self.models.logits(hidden, True)  # noqa: E731
        self.speculator.model = SimpleNamespace(compute_logits=read)
        if (known := self.models.known) is not None:
            offsets = known - torch.arange(len(known), device=self.device)
            self.speculator.model = SimpleNamespace(
                logits_processor=lambda head, hidden: read(hidden), lm_head="head", draft_id_to_target_id=offsets
            )
        tables = SimpleNamespace(
            input_block_tables=[self.input_tables], slot_mappings=None, block_tables=[],
        )  # fmt: skip
        self.speculator.set_attn(
            self.model_state, SimpleNamespace(kv_cache_groups=groups), tables, self.buffers,
            [[SimpleNamespace(metadata_builders=[self.builder])]],
        )  # fmt: skip
        managers = (self._manager("_prefill", self.shape.num_nodes), self._manager("_generate_draft", self.shape.topk))
        self.speculator.prefill_cudagraph_manager, self.speculator.decode_cudagraph_manager = managers

    def _manager(self, name: str, rows: int):
        """Graphs for batches of equal requests and some more, which pad them, where the worker has such."""

        def dispatch(num_requests, num_tokens, uniform=None, *_, **__):
            is_padded = self.padded and uniform == rows
            size = num_requests + self.padded if is_padded else num_requests
            name = "FULL" if is_padded else "NONE"
            mode = SimpleNamespace(name=name)
            if stub.SITE:
                mode = importlib.import_module("vllm.config.compilation").CUDAGraphMode[name]
            return SimpleNamespace(cg_mode=mode, num_tokens=size * rows if is_padded else num_tokens, num_reqs=size)

        def run(desc):
            getattr(self.speculator, name)(desc.num_reqs, desc.num_tokens, self.metadata, self.slots, None)

        return SimpleNamespace(dispatch=dispatch, run_fullgraph=run)

    # a step

    def _metadata(self, batch, *_):
        common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        count = batch.num_reqs_after_padding
        bounds = torch.tensor(batch.query_start_loc_np[: count + 1].copy())
        made = self.builder.build(0, common(
            query_start_loc=self.buffers.query_start_loc[: count + 1], query_start_loc_cpu=bounds,
            seq_lens=self.buffers.seq_lens[:count], num_reqs=count, num_actual_tokens=batch.num_tokens_after_padding,
            max_query_len=int(batch.num_scheduled_tokens.max()), max_seq_len=LONGEST,
            block_table_tensor=self.input_tables[:count], slot_mapping=self.slots["draft"],
        ))  # fmt: skip
        return dict.fromkeys(self.layers, made)

    def _attend(self, name, metadata, slots):
        layer = self.layers[name]

        def attend(query, key, value):
            if metadata is None:  # while memory is measured
                return torch.zeros_like(query)
            if name in slots:  # as vLLM writes them
                is_slot = slots[name] >= 0
                place = slots[name][is_slot]
                pages = layer.kv_cache.transpose(1, 2)
                pages[place // PAGE, place % PAGE] = torch.cat([key, value], -1)[: len(is_slot)][is_slot]
            output, lengths = torch.zeros_like(query), getattr(metadata[name], "prefix_lens", None)
            assert lengths is None or (lengths >= 0).all()  # of requests that pad a graph, too
            layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata[name], output)
            return output

        return attend

    def step(self, requests: list) -> None:
        """Runs a step of requests, each with `rows` of which `drafts` are the nodes of its tree."""
        count, buffers, states = len(requests), self.buffers, self.states
        rows = np.array([each.rows for each in requests], np.int32)
        drafts = np.array([each.drafts for each in requests], np.int32)
        bounds, total = np.array([0, *rows.cumsum()], np.int32), int(rows.sum())
        is_padded = self.padded and len(set(rows)) == 1 and rows[0] == self.shape.num_nodes
        size, tokens = count + (self.padded if is_padded else 0), total
        tokens += self.padded * self.shape.num_nodes if is_padded else 0
        place = np.array([each.place for each in requests], np.int32)
        ids, positions = [], []
        for each in requests:
            tree = self.speculator_tokens(each)
            ids += (each.text[each.computed :] + tree)[: each.rows]
            positions += range(each.computed, each.computed + each.rows)
        on = lambda values, kind=torch.int32: torch.tensor(np.array(values)).to(self.device, kind)  # noqa: E731
        buffers.input_ids[:total], buffers.positions[:total] = on(ids), on(positions, torch.int64)
        buffers.query_start_loc[: count + 1], buffers.query_start_loc[count:] = on(bounds), total
        buffers.seq_lens.zero_()
        buffers.seq_lens[:count] = on([each.computed + each.rows for each in requests])
        self.input_tables.zero_()
        self.input_tables[:count] = self.tables[place]
        where = torch.repeat_interleave(on(place, torch.int64), on(rows, torch.int64))
        slots = self.tables[where, buffers.positions[:total] // PAGE].long() * PAGE + buffers.positions[:total] % PAGE
        self.slots = dict.fromkeys(self.layers, torch.cat([slots, slots.new_full((tokens - total,), -1)]))
        logits_of = drafts + 1
        cu = np.array([0, *logits_of.cumsum()], np.int32)
        local = np.concatenate([np.arange(number) for number in logits_of])
        batch = SimpleNamespace(
            req_ids=[str(each.place) for each in requests], num_reqs=count, num_reqs_after_padding=size,
            has_structured_output_reqs=False,
            num_tokens=total, num_tokens_after_padding=tokens, num_scheduled_tokens=rows,
            idx_mapping=on(place), idx_mapping_np=place, expanded_idx_mapping=on(np.repeat(place, logits_of)),
            expanded_local_pos=on(local), num_draft_tokens=int(drafts.sum()),
            num_draft_tokens_per_req=drafts if drafts.any() else None,
            query_start_loc=buffers.query_start_loc[: size + 1],
            query_start_loc_np=np.append(bounds, [total] * (size - count)).astype(np.int32),
            seq_lens=buffers.seq_lens[:size],
            seq_lens_cpu_upper_bound=torch.tensor([each.computed + each.rows for each in requests]),
            input_ids=buffers.input_ids[:tokens], positions=buffers.positions[:tokens],
            logits_indices=on(np.repeat(bounds[1:] - logits_of, logits_of) + local, torch.int64),
            cu_num_logits=on(cu), cu_num_logits_np=cu,
        )  # fmt: skip
        for each in requests:
            for numbers, value in (
                (states.prompt_len, len(each.prompt)), (states.prefill_len, len(each.prompt)),
                (states.total_len, len(each.text)),
            ):  # fmt: skip
                numbers.np[each.place] = numbers.gpu[each.place] = value
        self.metadata = self.model_state.prepare_attn(batch)
        hidden = self.models.target(
            batch.input_ids.long(), batch.positions, lambda name: self._attend(name, self.metadata, self.slots)
        )
        sampler = self.verifier if drafts.any() else self.sampler
        found = sampler(self.models.logits(hidden[batch.logits_indices]), batch)
        if drafts.any():
            first = torch.arange(count, device=self.device)[:, None] * self.shape.num_nodes
            nodes = self.trees.accept_index[:count] - first
            depth = torch.arange(self.shape.depth + 1, device=self.device)
            self.moved += int(((nodes != depth) & (depth <= self.trees.num_accepted[:count, None])).sum())
        last, following = on(np.zeros(self.tables.shape[0])), on(np.zeros(self.tables.shape[0]))
        counts, rejected = found.num_sampled.tolist(), found.num_rejected.tolist()
        for each, tokens_of, number, minus in zip(requests, found.sampled_token_ids.tolist(), counts, rejected):
            each.text += tokens_of[:number]
            each.computed += each.rows - minus
            last[each.place] = each.text[-1]
            if not number:
                following[each.place] = each.text[each.computed]
            if each.drafts:
                self.accepted.append(number)
        made = self.speculator.propose(
            batch, self.metadata, self.slots, hidden, None, found.num_sampled, found.num_rejected, last[:, None],
            following, torch.zeros(len(self.tables)), torch.zeros(len(self.tables), dtype=torch.int64),
        )  # fmt: skip
        for each, row in zip(requests, made.tolist()):
            each.tree = row

    def dummy(self, count: int, **options) -> torch.Tensor:
        """Drafts for requests that are none, of two rows each, as vLLM does before there are any."""
        self.buffers.query_start_loc[:] = torch.arange(len(self.buffers.query_start_loc)).clamp(max=count) * 2
        self.buffers.seq_lens[:count], self.buffers.seq_lens[count:] = 2, 0
        self.slots = dict.fromkeys(self.layers, torch.full((2 * count,), -1))
        ones = torch.ones(count, dtype=torch.int32, device=self.device)
        batch = SimpleNamespace(
            num_reqs=count, num_reqs_after_padding=count, num_tokens=2 * count, num_tokens_after_padding=2 * count,
            has_structured_output_reqs=False,
            num_draft_tokens=0, num_draft_tokens_per_req=None, num_scheduled_tokens=np.full(count, 2, np.int32),
            query_start_loc=self.buffers.query_start_loc[: count + 1], seq_lens=self.buffers.seq_lens[:count],
            query_start_loc_np=np.arange(0, 2 * count + 1, 2, np.int32), seq_lens_cpu_upper_bound=2 * ones.cpu(),
            idx_mapping=torch.arange(count, dtype=torch.int32, device=self.device), positions=self.buffers.positions,
            input_ids=self.buffers.input_ids[: 2 * count],
        )  # fmt: skip
        is_skipped = options.get("skip_attn_for_dummy_run", False)
        self.metadata = None if is_skipped else self.model_state.prepare_attn(batch)
        places = torch.zeros(len(self.tables), dtype=torch.int64, device=self.device)
        return self.speculator.propose(
            input_batch=batch, attn_metadata=self.metadata, slot_mappings=self.slots,
            last_hidden_states=torch.zeros(2 * count, HIDDEN + VOCAB, device=self.device), aux_hidden_states=None,
            num_sampled=ones, num_rejected=0 * ones, last_sampled=places[:, None], next_prefill_tokens=places,
            temperature=places.float(), seeds=places, dummy_run=True, **options,
        )  # fmt: skip

    def speculator_tokens(self, request) -> list[int]:
        return request.tree[: request.drafts] if request.drafts else []

    def check(self, requests: list) -> None:
        """Holds texts and trees against the models without a cache."""
        for each in (one for one in requests if one.computed >= len(one.prompt)):
            hidden, size = whole_text(self.models, each.text, self.device), len(each.prompt)
            logits = self.models.logits(hidden)[size - 1 : -1]
            if self.seeds is None:
                wanted = logits.argmax(-1)
            else:
                positions = torch.arange(size, len(each.text), device=self.device)
                given = torch.full_like(positions, self.seeds + each.place)
                ones = torch.ones(len(positions), device=self.device)
                wanted = sample_from_logits(logits / 0.9, positions, given, ones)
            assert each.text[size:] == wanted.tolist()
            state = self.trees.state[:, each.place].cpu()
            assert state[0, 0] == 0 and (state[0, 1:] + torch.arange(1, self.shape.num_nodes) >= 1).all()
            assert self.paths(each) == whole_tree(self.models, each.text, self.shape, self.device)

    def paths(self, request) -> set[tuple[int, ...]]:
        """The paths of a request's tree, by its links, which must be those of its masks."""
        state, tokens, found = self.trees.state[:, request.place].tolist(), [None, *request.tree], {0: ()}
        nodes, seen = [0], {0: {0}}
        while nodes:
            node = nodes.pop()
            child = state[1][node]
            while child >= 0:
                found[child], seen[child] = (*found[node], tokens[child]), seen[node] | {child}
                nodes.append(child)
                child = state[2][child]
        for node, wanted in seen.items():
            words = [word[node] % (1 << 64) for word in state[3:]]
            assert {bit for bit in range(self.shape.num_nodes) if words[bit // 64] >> bit % 64 & 1} == wanted
            assert state[0][node] == len(found[node]) - node
        assert len(found) == self.shape.num_nodes
        return set(found.values()) - {()}

    def run(self, num_steps: int, coin: np.random.Generator, kind: str = "whole") -> None:
        """Serves prompts in chunks, trees, cut trees and single rows beside each other, and reuses places."""
        requests: dict[int, SimpleNamespace] = {}
        for _ in range(num_steps):
            for place in range(self.places):
                each = requests.get(place)
                if each is None or len(each.text) + 2 * self.shape.depth + 2 > LONGEST or coin.random() < 0.03:
                    prompt = coin.integers(VOCAB, size=int(coin.integers(1, 40))).tolist()
                    requests[place] = SimpleNamespace(prompt=prompt, text=[*prompt], computed=0, place=place, tree=[])
            chosen = [each for each in requests.values() if kind == "whole" or coin.random() < 0.8]
            for each in chosen:
                left = len(each.text) - each.computed
                is_prompt = each.computed < len(each.prompt)
                most = self.shape.num_nodes - 1
                each.drafts = 0 if is_prompt else most if kind == "whole" else int(coin.integers(0, most + 1))
                each.drafts = min(each.drafts, LONGEST - 1 - each.computed - 1)
                each.rows = min(left, 25) if is_prompt else 1 + each.drafts
            # as vLLM sorts them: whole trees, then by the number of rows
            chosen.sort(key=lambda each: (each.rows != self.shape.num_nodes, each.rows))
            if chosen:
                self.step(chosen)
                self.check(chosen)
