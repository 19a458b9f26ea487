"""Requests in a made vLLM's states, by vLLM's rules: what they must write, and a server of a Markov chain."""

from __future__ import annotations

import importlib
import inspect
import math
from types import SimpleNamespace

import numpy as np
import torch

from eagle_kernels.integrations.vllm.trees import TreeShape
from eagle_kernels.reference.ops.sampling.sample_from_logits import sample_from_logits

VOCAB, DRAFTS, LENGTH = 40, 3, 9
# logits after each token, and prompts
TABLE = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
PROMPT = [5, 9, 2, 31]
OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "logprobs": None, "repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "allowed_token_ids": None, "logit_bias": None, "min_tokens": 0,
    "all_stop_token_ids": set(), "bad_words_token_ids": None, "logprob_token_ids": None, "structured_outputs": None,
}  # fmt: skip
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.8}
WANTED = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "seed": 1} | PENALTIES,
    "seed": {"seed": 0},
    "a seed below 0": {"temperature": 0.7, "seed": -(2**63)},
    "a large seed": {"temperature": 1.5, "seed": 2**63 - 1},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6, "temperature": 1.3},
    "min-p": {"min_p": 0.2, "temperature": 1.7},
    "top-k, top-p": {"top_k": 6, "top_p": 0.7, "temperature": 1.4},
    "min-p, top-k": {"min_p": 0.1, "top_k": 4, "temperature": 1.6},
    "min-p, top-p": {"min_p": 0.15, "top_p": 0.75, "temperature": 1.8},
    "all filters": {"min_p": 0.05, "top_k": 7, "top_p": 0.8, "temperature": 1.9},
    "repetition": {"repetition_penalty": 1.6},
    "frequency": {"frequency_penalty": 1.1},
    "presence": {"presence_penalty": 1.9},
    "biases": {"logit_bias": {3: 4.0, 11: -6.0}},
    "allowed": {"allowed_token_ids": [1, 4, 9, 16, 25, 36], "temperature": 1.5},
    "ends": {"min_tokens": 6, "all_stop_token_ids": {3, 11}, "logit_bias": {3: 5.0, 11: 4.0}},
    "everything": {
        "temperature": 1.4, "min_p": 0.03, "top_k": 9, "top_p": 0.9, "logit_bias": {8: 2.0}, "min_tokens": 4,
        "all_stop_token_ids": {8},
    } | PENALTIES,
}  # fmt: skip
MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


def request(**changes) -> SimpleNamespace:
    return SimpleNamespace(**OFF | changes)


def speculation(**changes) -> SimpleNamespace:
    fields = {
        "num_speculative_tokens": DRAFTS, "rejection_sample_method": "standard", "synthetic_acceptance_rates": None,
        "enable_adaptive_verification": False, "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


# what must be written


def adjusted(wants, output: list[int]) -> torch.Tensor:
    """Logits float64 [V] after this output: biases, then penalties, then bans."""
    logits = TABLE[[*PROMPT, *output][-1]].double()
    if wants.allowed_token_ids:
        banned = [token for token in range(VOCAB) if token not in wants.allowed_token_ids]
        logits[banned] = float("-inf")
    for token, value in (wants.logit_bias or {}).items():
        logits[token] += value
    if len(output) < wants.min_tokens:
        logits[list(wants.all_stop_token_ids)] = float("-inf")
    for token in {*PROMPT, *output}:
        logits[token] *= 1 / wants.repetition_penalty if logits[token] > 0 else wants.repetition_penalty
    for token in set(output):
        logits[token] -= output.count(token) * wants.frequency_penalty + wants.presence_penalty
    for *start, last in wants.bad_words_token_ids or ():
        if output[len(output) - len(start) :] == start:
            logits[last] = float("-inf")
    return logits


def kept(logits: torch.Tensor, wants) -> torch.Tensor:
    """Logits float64 [V] over the temperature, -inf where a filter removes a token: min-p, of what it leaves top-k,
    and of what that leaves top-p."""
    logits = logits / (wants.temperature or 1.0)
    probs = logits.softmax(-1)
    logits = logits.masked_fill(probs < wants.min_p * probs.max(), float("-inf"))
    order = logits.argsort(descending=True)
    removed = order[wants.top_k or VOCAB :]
    logits[removed] = float("-inf")
    probs = logits.softmax(-1)[order]
    logits[order[probs.cumsum(-1) - probs >= wants.top_p]] = float("-inf")
    return logits


def written(requests, length: int = LENGTH) -> list[list[int]]:
    """The texts of requests by vLLM's rules, with the noise of their seeds; greedy ones take the best token."""
    texts = [[] for _ in requests]
    seeds = torch.tensor([each.seed for each in requests])
    temperatures = torch.tensor([float(each.temperature > 0) for each in requests], dtype=torch.float64)
    for index in range(length):
        rows = torch.stack([kept(adjusted(each, text), each) for each, text in zip(requests, texts)])
        positions = torch.full((len(requests),), len(PROMPT) + index)
        for text, token in zip(texts, sample_from_logits(rows, positions, seeds, temperatures).tolist()):
            text.append(token)
    return texts


# a server of it


class Server:
    """Requests in vLLM's states, each at a place of its own, and the sampler and verification on them."""

    def __init__(self, sampling, requests, device, mode="raw_logprobs", method="standard", rates=None, **options):
        size, self.device, self.requests = len(requests) + 3, torch.device(device), requests
        self.places = np.random.default_rng(2).permutation(size)[: len(requests)].astype(np.int32)
        self.texts = [[] for _ in requests]
        number = lambda: SimpleNamespace(  # noqa: E731
            np=np.zeros(size, np.int32), gpu=torch.zeros(size, dtype=torch.int32, device=device)
        )
        self.states = SimpleNamespace(
            max_num_reqs=size, vocab_size=VOCAB, device=self.device, prompt_len=number(), prefill_len=number(),
            total_len=number(),
            all_token_ids=SimpleNamespace(gpu=torch.zeros(size, 64, dtype=torch.int32, device=device)),
        )  # fmt: skip
        kind = importlib.import_module("vllm.v1.worker.gpu.sample.sampler").Sampler
        given = {
            "vllm_config": SimpleNamespace(reasoning_config=None), "max_num_reqs": size, "vocab_size": VOCAB,
            "device": self.device, "req_states": self.states, "logprobs_mode": mode,
            "num_speculative_tokens": DRAFTS,
        }  # fmt: skip
        known = inspect.signature(kind).parameters
        made = kind(**{name: value for name, value in given.items() if name in known}, **options)
        self.is_newer = hasattr(made, "logits_processors")
        self.sampler = sampling.MatchSampler.of(made)
        assert self.sampler.sampling_states is made.sampling_states
        config = speculation(rejection_sample_method=method, synthetic_acceptance_rates=rates)
        self.verifier = sampling.MatchVerifier(self.sampler, config, self.device)

    def _write(self) -> None:
        """Writes what vLLM's states hold after these texts."""
        states = self.states
        for place, wants, text in zip(self.places.tolist(), self.requests, self.texts):
            tokens = [*PROMPT, *text]
            states.all_token_ids.gpu[place, : len(tokens)] = torch.tensor(tokens)
            for numbers, value in (
                (states.prompt_len, len(PROMPT)), (states.prefill_len, len(tokens)), (states.total_len, len(tokens)),
            ):  # fmt: skip
                numbers.np[place] = value
                numbers.gpu[place] = value
            self.sampler.add_request(place, *(() if self.is_newer else (len(PROMPT),)), wants)
        self.sampler.apply_staged_writes()
        states.prefill_len.gpu[self.places] = len(PROMPT) - 1  # all drafts come after it

    def batch(self, drafts, length_of_a_chunk=None) -> tuple[torch.Tensor, SimpleNamespace]:
        """Makes a step's logits and batch, in which each request has a row, and one more for each of its drafts."""
        self._write()
        counts = [1 + len(each) for each in drafts]
        ends = [([*PROMPT, *text])[-1] for text in self.texts]
        ids = [token for end, each in zip(ends, drafts) for token in (end, *each)]
        lengths = [len(PROMPT) + len(text) for text in self.texts]
        local = [row for count in counts for row in range(count)]
        firsts = np.repeat(lengths, counts) - 1
        on = lambda values, kind=torch.int32: torch.tensor(np.array(values)).to(self.device, kind)  # noqa: E731
        bounds = np.array([0, *np.cumsum(counts)], np.int32)
        fields = {
            # rows of the step are not at its front
            "input_ids": on([1, *ids]), "positions": on([0, *(firsts + local)], torch.int64),
            "logits_indices": on(range(1, len(ids) + 1), torch.int64), "idx_mapping": on(self.places),
            "idx_mapping_np": self.places, "expanded_idx_mapping": on(np.repeat(self.places, counts)),
            "expanded_local_pos": on(local), "cu_num_logits": on(bounds), "cu_num_logits_np": bounds,
            "seq_lens": on([length + len(each) for length, each in zip(lengths, drafts)]), "num_reqs": len(counts),
            "num_tokens": len(ids) + 1,
            "seq_lens_cpu_upper_bound": torch.tensor([length + len(each) for length, each in zip(lengths, drafts)]),
        }  # fmt: skip
        return TABLE[ids].to(self.device), SimpleNamespace(**fields)

    def take(self, output) -> list[int]:
        """Adds a step's tokens to the texts; returns how many."""
        counts = output.num_sampled.tolist()
        for text, tokens, count in zip(self.texts, output.sampled_token_ids.tolist(), counts):
            text += tokens[:count]
        assert output.sampled_token_ids.dtype == torch.int64
        return counts

    def decode(self):
        output = self.sampler(*self.batch([[]] * len(self.requests)))
        assert self.take(output) == [1] * len(self.requests) and output.num_rejected.eq(0).all()
        return output

    def verify(self, drafts):
        output = self.verifier(*self.batch(drafts))
        counts = self.take(output)
        assert output.num_rejected.tolist() == [1 + len(each) - count for each, count in zip(drafts, counts)]
        return counts


class Watch:
    """Notes of each call of our samplers what their kernels are compiled for: types, alignments and what is None."""

    OPS = ("sample_from_logits", "verify_tree_greedy", "verify_tree_sampled")

    def __init__(self, monkeypatch, sampling):
        self.seen, self.streams = set(), set()
        for name in self.OPS:
            monkeypatch.setattr(sampling, name, self._watched(name, getattr(sampling, name)))

    def _watched(self, name, op):
        def call(*args, **values):
            given = [*enumerate(args), *sorted(values.items())]
            self.seen.add((name, *((key, self._look(value)) for key, value in given)))
            first = next(value for _, value in given if isinstance(value, torch.Tensor))
            self.streams.add(torch.cuda.current_stream() if first.is_cuda else None)
            return op(*args, **values)

        return call

    @staticmethod
    def _look(value):
        if not isinstance(value, torch.Tensor):
            return value
        is_wide = value.ndim > 1 and value.is_floating_point()
        return value.dtype, value.data_ptr() % 16, math.gcd(value.stride(0), 16) if is_wide else None


def padded(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits as a model gives them: in 16 bits, in rows that are longer than its vocabulary."""
    rows = torch.zeros(len(logits), VOCAB + 8, dtype=torch.bfloat16, device=logits.device)
    return rows[:, :VOCAB].copy_(logits)


# what all requests of a batch may have
SINGLE = ({"temperature": 0.0}, {}, {"top_p": 0.7}, {"top_k": 6}, {"top_k": 6, "top_p": 0.7}, {"logprobs": 2})


def runner_of(server: Server, num_drafts: int, **changes) -> SimpleNamespace:
    """Returns what `warmup_kernels` needs to know of vLLM's runner."""
    fields = {
        "sampler": server.sampler, "rejection_sampler": server.verifier if num_drafts else None, "vocab_size": VOCAB,
        "num_speculative_steps": num_drafts, "max_num_reqs": 5, "max_num_tokens": 64, "dtype": torch.float32,
        "device": server.device,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


ALL = [request(**{"seed": 100 + index} | each) for index, each in enumerate(WANTED.values())]


class Tree:
    """A tree of drafts: the token and the parent of each node, parents first; -1 for the root."""

    def __init__(self, tokens: list[int], parents: list[int]):
        self.tokens, self.parents = tokens, parents

    @classmethod
    def random(cls, shape: TreeShape, coming: list[int], coin) -> Tree:
        """Some nodes carry what comes, and siblings differ."""
        tree, depths = cls([-1], [-1]), [0]
        while len(tree.tokens) < shape.num_nodes:
            parent = int(coin.choice([node for node, depth in enumerate(depths) if depth < shape.depth]))
            path = tree.path(parent)
            is_right = [tree.tokens[node] for node in path[1:]] == coming[: len(path) - 1]
            token = coming[len(path) - 1] if is_right and coin.random() < 0.7 else int(coin.integers(VOCAB))
            if token in (tree.tokens[node] for node, above in enumerate(tree.parents) if above == parent):
                continue
            tree.tokens.append(token)
            tree.parents.append(parent)
            depths.append(depths[parent] + 1)
        return tree

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one."""
        return [*(self.path(self.parents[node]) if node else []), node]

    def state(self, shape: TreeShape) -> torch.Tensor:
        """What `Trees.state` holds of it, [3 + W, N]."""
        size = shape.num_nodes
        made = torch.full((3 + shape.num_words, size), -1, dtype=torch.int64)
        made[3:] = 0
        for node in range(size):
            made[0, node] = len(self.path(node)) - 1 - node
            children = [child for child in range(size) if self.parents[child] == node]
            made[1, node] = children[0] if children else -1
            made[2, children[:-1]] = torch.tensor(children[1:], dtype=torch.int64)
            for seen in self.path(node):
                bit = 1 << seen % 64
                made[3 + seen // 64, node] |= bit - (1 << 64) if bit >> 63 else bit
        return made
