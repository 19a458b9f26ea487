"""Random calls of the ops that draft, sample and verify: each argument given or not, each flag, sizes around tiles.

Batches are uneven: every request has its own lengths, temperature and filters, among them those that turn a thing off.
Trees are random, their nodes kept in rows of any order, a few tokens are none, and a few requests are dead.
"""

import importlib
import random
from collections.abc import Callable

import torch

from op_tests.harness.trees import LINKS
from op_tests.ops.verify.cases import MALFORMED, padded

INFINITY, NAN = float("inf"), float("nan")
LARGEST = 2**31 - 1
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class Choice(random.Random):
    """Chooses; number: that of the call; is_malformed: whether its trees are, where drafts are accepted."""

    number, is_malformed = 0, False


def some(choice: Choice, values: dict, *names: str, chance: float = 0.5) -> None:
    """Leaves out each of these arguments, or not."""
    for name in names:
        if choice.random() > chance:
            values.pop(name, None)


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    """low .. high, both included."""
    return torch.randint(low, high + 1, shape)


def each_of(values: list, number: int, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (number,))]


def tree(choice: Choice, batch_size: int, num_nodes: int, vocab_size: int, any_order: bool = False) -> dict:
    """Links of random trees: bushy ones, chains, stars and all between; some requests dead.

    any_order: links lead back as well.
    """
    first = torch.full((batch_size, num_nodes), -1)
    sibling = first.clone()
    retrieved = torch.empty_like(first)
    for request in range(batch_size):
        depth_wanted = choice.choice((0.0, 0.3, 0.6, 0.9))
        last_child: dict[int, int] = {}
        name = list(range(1, num_nodes))
        if any_order:
            choice.shuffle(name)
        name.insert(0, 0)
        for node in range(1, num_nodes):
            parent = node - 1 if choice.random() < depth_wanted else choice.randrange(node)
            if parent in last_child:
                sibling[request, name[last_child[parent]]] = name[node]
            else:
                first[request, name[parent]] = name[node]
            last_child[parent] = node
        retrieved[request] = torch.randperm(num_nodes) + request * num_nodes
    links = dict(zip(LINKS, (integers(0, vocab_size - 1, batch_size, num_nodes), retrieved, first, sibling)))
    if choice.is_malformed:
        share_children(choice, links)
    if choice.random() < 0.2:
        dead = choice.randrange(batch_size)
        for tensor in links.values():
            tensor[dead] = -1
    return links


def share_children(choice: Choice, links: dict) -> None:
    """Gives nodes children that another node lists too, and rows of another request; drafts are yet to be accepted."""
    batch_size, num_nodes = links["candidates"].shape
    for request in range(batch_size):
        for _ in range(choice.choice((0, 1, 2, 4)) if num_nodes > 2 else 0):
            above = choice.randrange(num_nodes - 1)
            name = choice.choice(("retrieve_next_token", "retrieve_next_token", "retrieve_next_sibling"))
            links[name][request, above] = choice.randrange(above + 1, num_nodes)
        if num_nodes > 2 and choice.random() < 0.4:
            away = choice.choice((-1, 1, batch_size)) * num_nodes
            links["retrieve_index"][request, choice.randrange(1, num_nodes)] += away


def lead_back(choice: Choice, links: dict) -> None:
    """Lets links lead back, or to their own node, where tokens are those of the children that should follow."""
    batch_size, num_nodes = links["candidates"].shape
    for request in range(batch_size):
        for node in range(num_nodes):
            name = choice.choice(LINKS[2:])
            there, back = int(links[name][request, node]), choice.randint(0, node)
            if 0 < there < num_nodes and choice.random() < 0.4:
                links[name][request, node] = back
                links["candidates"][request, back] = links["candidates"][request, there]


def spoil_tokens(choice: Choice, links: dict, vocab_size: int) -> None:
    """A few candidates that are no tokens: at the end of the vocabulary, past it, and no number at all."""
    flat = links["candidates"].view(-1)
    for _ in range(choice.choice((0, 0, 1, 2))):
        flat[choice.randrange(len(flat))] = choice.choice((-1, vocab_size, vocab_size, vocab_size + 1, LARGEST))


def spoil_links(choice: Choice, values: dict) -> None:
    """Links that lead back, away and round, and rows of other requests, in a third of all calls."""
    links = {name: values[name] for name in LINKS}
    size = links["candidates"].shape[1]
    kind = choice.random()
    if choice.is_malformed:
        if kind < 0.4:
            lead_back(choice, links)
    elif kind < 0.17:
        MALFORMED[choice.choice([*MALFORMED])](links)
    elif kind < 0.34:
        is_any = torch.rand(2, *links["candidates"].shape) < choice.choice((0.1, 0.5))
        for name, places in zip(LINKS[2:], is_any):
            values[name] = torch.where(places, integers(-2, size + 6, *places.shape), values[name])
        is_far = torch.rand(is_any[0].shape) < 0.05
        values["retrieve_index"] = values["retrieve_index"] + is_far * integers(-size - 7, size + 7, *is_far.shape)


def coins_of(batch_size: int, rows: int) -> dict:
    positions = integers(0, 60, rows)
    positions[0] = LARGEST
    return {"positions": positions, "seeds": integers(-(2**62), 2**62, batch_size)}


def temperatures(number: int) -> torch.Tensor:
    return each_of([0.0, 1e-6, 0.5, 0.8, 1.0, 1.0, 1.7], number)


def filters(choice: Choice, number: int, vocab_size: int) -> dict:
    """Of each row its own; all ways to turn one off, as well."""
    values = {
        "top_k": each_of([-1, 0, 1, 5, 20, 40, 200, vocab_size - 1, vocab_size, 2 * vocab_size], number, torch.int64),
        "top_p": each_of([0.0, 0.2, 0.5, 0.8, 0.9, 0.99, 1.0, 1.5], number),
        "min_p": each_of([-1.0, 0.0, 0.0, 0.0, 0.01, 0.2, 0.6, 1.0, 2.0], number),
    }
    some(choice, values, *values, chance=0.6)
    return values


def words(*shape: int) -> torch.Tensor:
    """int32 of which three bits in four are set."""
    drawn = torch.randint(-(2**31), 2**31, (2, *shape))
    return (drawn[0] | drawn[1]).int()


def processors(choice: Choice, number: int, rows: int, vocab_size: int) -> dict:
    """Penalties so large that a draft that counts as output, or does not, is another token; on a dyadic grid."""
    num_words = -(-vocab_size // 32)
    values = {
        "repetition_penalty": each_of([0.5, 1.0, 2.0, 4.0], number),
        "frequency_penalty": each_of([0.0, -0.5, 2.0, 4.0], number),
        "presence_penalty": each_of([0.0, -1.0, 2.0, 4.0], number),
        "prompt_mask": words(number, num_words) & words(number, num_words) & words(number, num_words),
        "output_counts": integers(0, 1, number, vocab_size).int() * integers(0, 2, number, vocab_size).int(),
        "logit_bias": (integers(-4, 4, number, vocab_size) / 4.0).to(choice.choice((torch.float32, torch.bfloat16))),
        "token_bitmask": words(rows, num_words),
    }
    some(choice, values, *PENALTIES, "logit_bias", "token_bitmask")
    some(choice, values, "prompt_mask", chance=0.7 * ("repetition_penalty" in values))
    some(choice, values, "output_counts", chance=0.7 * any(name in values for name in PENALTIES))
    return values


def rows_of_logits(choice: Choice, number: int, vocab_size: int) -> torch.Tensor:
    """Flat, peaked and tied rows at any height, a few without a number; on a dyadic grid, which half precision has."""
    scale = each_of([0.0, 0.25, 1.0, 3.0], number)[:, None]
    logits = (torch.randn(number, vocab_size) * scale * 4).round() / 4
    logits += each_of([-24.0, 0.0, 0.0, 20.0], number)[:, None]
    if choice.random() < 0.3:
        logits[choice.randrange(number), :: choice.choice((1, 2, 5))] = choice.choice((NAN, -INFINITY, INFINITY))
    logits = logits.to(choice.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)))
    return padded(logits) if choice.random() < 0.3 else logits


def favour_children(choice: Choice, links: dict, logits: torch.Tensor, peak: float) -> None:
    """Adds to the logit of a random child's token at every node that has one."""
    batch_size, num_nodes = links["candidates"].shape
    for request in range(batch_size):
        for node in range(num_nodes):
            child = int(links["retrieve_next_token"][request, node])
            while child > 0 and int(links["retrieve_next_sibling"][request, child]) > 0 and choice.random() < 0.5:
                child = int(links["retrieve_next_sibling"][request, child])
            token = int(links["candidates"][request, child]) if child > 0 else -1
            if 0 <= token < logits.shape[1]:
                logits[request * num_nodes + node, token] += peak


def accept_what_is_drawn(path: str, values: dict, choice: Choice) -> None:
    """Gives a child of each node at which a walk ends the token that ended it, until walks are long.

    What is drawn at one node then depends on the drafts on the path to it.
    """
    name = path.rpartition(".")[2]
    reference = getattr(importlib.import_module(f"eagle_kernels.reference.ops.{path}"), name)
    links = values["candidates"], values["retrieve_next_token"], values["retrieve_next_sibling"]
    batch_size, num_nodes = links[0].shape
    for _ in range(values["spec_steps"]):
        output = reference(**values)
        is_changed = False
        for request in range(batch_size):
            length = int(output.accept_token_num[request])
            if output.accept_index[request, 0] < 0 or length >= values["spec_steps"] or choice.random() < 0.1:
                continue
            retrieved = values["retrieve_index"][request].tolist()
            node = retrieved.index(int(output.accept_index[request, length]))
            child = int(links[1][request, node])
            while child > 0 and int(links[2][request, child]) > 0 and choice.random() < 0.5:
                child = int(links[2][request, child])
            if child > 0:
                links[0][request, child] = output.predicts[request * num_nodes + node]
                is_changed = True
        if not is_changed:
            break
    if values["spec_steps"] > 0 and choice.is_malformed:
        send_away(choice, values, output.accept_index)


def send_away(choice: Choice, values: dict, accept_index: torch.Tensor) -> None:
    """Gives an accepted draft, or a sibling before it, a row of another request: the list of children ends there."""
    batch_size, num_nodes = values["candidates"].shape
    for request in range(batch_size):
        retrieved = values["retrieve_index"][request]
        path = [retrieved.tolist().index(row) for row in accept_index[request].tolist() if row >= 0]
        if len(path) > 1 and choice.random() < 0.6:
            place = choice.randrange(1, len(path))
            child = int(values["retrieve_next_token"][request, path[place - 1]])
            while child != path[place] and choice.random() < 0.7:
                child = int(values["retrieve_next_sibling"][request, child])
            retrieved[child] += choice.choice((-1, 1)) * batch_size * num_nodes


def tree_sizes(choice: Choice) -> tuple[int, int, int]:
    """(batch size, nodes, steps)."""
    num_nodes = choice.choice((1, 5, 8, 8, 9, 9, 9, 13))
    return choice.choice((1, 3, 3, 3, 4)), num_nodes, choice.choice((0, 1, 2, 2, 3, 3, 4, 4, 5, num_nodes))


def vocabulary(choice: Choice) -> int:
    """Around multiples of tiles of 16 tokens, from one to six of them."""
    return choice.choice((1, 3, 15, 16, 17, 33, 47, 48, 49, 64, 80))


# the calls, by op


def verify_tree_greedy(choice):
    batch_size, num_nodes, spec_steps = tree_sizes(choice)
    vocab_size = vocabulary(choice)
    has_ids, any_order = choice.random() < 0.4, choice.random() < 0.5
    links = tree(choice, batch_size, num_nodes, vocab_size, has_ids and any_order)
    values = links | {"spec_steps": spec_steps, "keep_unvisited": choice.random() < 0.3}
    policy = choice.choice(("normal", "normal", "reject_all", "accept_all", "simulate"))
    values["accept_policy"] = policy
    if policy == "simulate":
        values |= coins_of(batch_size, batch_size * num_nodes)
        values["simulated_rates"] = torch.rand(spec_steps).sort(descending=True).values
    if has_ids:
        spoil_tokens(choice, links, vocab_size)
        likely = torch.rand(batch_size * num_nodes, vocab_size + 1)
        favour_children(choice, links, likely, 1.0)
        values["target_predict"] = likely.argmax(1).view(batch_size, num_nodes)
        values["any_order"] = policy == "normal" and any_order
    else:
        logits = rows_of_logits(choice, batch_size * num_nodes, vocab_size)
        favour_children(choice, links, logits, 6.0)
        values["target_logits"] = logits
    return values


def verify_tree_sampled(choice):
    batch_size, num_nodes, spec_steps = tree_sizes(choice)
    vocab_size = choice.choice((3, 40, 64, 900, 1024, 2100))
    num_rows = batch_size * num_nodes
    values = tree(choice, batch_size, num_nodes, vocab_size)
    values |= coins_of(batch_size, num_rows) | filters(choice, batch_size, vocab_size)
    if choice.random() < 0.6:
        values |= processors(choice, batch_size, num_rows, vocab_size)
    values |= {
        "target_logits": rows_of_logits(choice, num_rows, vocab_size),
        "temperature": temperatures(batch_size),
        "spec_steps": spec_steps,
        "filter_order": choice.choice(("top_k_first", "joint")),
        "return_logprobs": choice.random() < 0.4,
        "accept_policy": choice.choice(("normal",) * 4 + ("reject_all", "accept_all", "simulate")),
        "seq_lens": integers(0, 90, batch_size),
        "is_live": integers(0, 3, batch_size) > 0,
    }
    if values["accept_policy"] == "simulate":
        values["simulated_rates"] = torch.rand(spec_steps).sort(descending=True).values
    some(choice, values, "is_live")
    if "is_live" not in values:
        some(choice, values, "seq_lens")
    if "seq_lens" in values:  # rows that are committed are those of the nodes
        rows = torch.arange(num_rows).view(batch_size, num_nodes)
        is_own = values["retrieve_index"] // num_nodes == rows // num_nodes
        values["retrieve_index"] = torch.where(is_own, rows, values["retrieve_index"])
    accept_what_is_drawn("sampling.verify_tree_sampled", values, choice)
    return values


def sample_from_logits(choice):
    num_rows, vocab_size = choice.choice((1, 6, 6)), choice.choice((1, 33, 300, 1023, 1024, 2049, 4096))
    values = {"logits": rows_of_logits(choice, num_rows, vocab_size), "temperature": temperatures(num_rows)}
    values |= coins_of(num_rows, num_rows) | filters(choice, num_rows, vocab_size)
    if choice.random() < 0.5:
        values |= processors(choice, num_rows, num_rows, vocab_size)
    return values | {"filter_order": choice.choice(("top_k_first", "joint"))}


def penalize_logits(choice):
    batch_size, num_nodes, _ = tree_sizes(choice)
    vocab_size = vocabulary(choice)
    num_rows = batch_size * num_nodes
    values = tree(choice, batch_size, num_nodes, vocab_size)
    spoil_tokens(choice, values, vocab_size)
    values |= processors(choice, batch_size, num_rows, vocab_size)
    values["target_logits"] = rows_of_logits(choice, num_rows, vocab_size)
    if choice.random() < 0.6:
        values |= {"min_tokens": integers(0, 6, batch_size), "num_output_tokens": integers(0, 5, batch_size)}
        values["end_token_ids"] = listed(choice, batch_size, vocab_size)
    if choice.random() < 0.6:
        values["bad_token_ids"] = listed(choice, batch_size, vocab_size)
    return values


def listed(choice, batch_size, vocab_size):
    """Tokens for all requests or for each; long lists are mostly padding."""
    length = choice.choice((0, 1, 5, 290))
    shape = (batch_size, length) if choice.random() < 0.5 else (length,)
    return torch.where(torch.rand(shape) < 4 / (4 + length), integers(-1, vocab_size, *shape), -1)


def renorm(name, parameters):
    def call(choice):
        num_rows, vocab_size = choice.choice((1, 3, 6)), choice.choice((1, 31, 128, 129, 384, 400, 640))
        probs = torch.softmax(torch.randn(num_rows, vocab_size) * each_of([0.0, 1e-4, 1.0, 4.0], num_rows)[:, None], 1)
        if choice.random() < 0.5:
            probs = (probs * 256).round() / 256  # ties, and sums without rounding
        if choice.random() < 0.3:
            probs[choice.randrange(num_rows), :: choice.choice((1, 3))] = choice.choice((0.0, NAN, INFINITY, -1.0))
        probs = probs.to(choice.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)))
        dtype = torch.int64 if name == "top_k" else torch.float32
        return {"probs": probs, name: each_of(parameters, num_rows, dtype)}

    return call


def pair_of(choice, links, num_target, num_draft, batch_size, draft_of_target, has_peaks=False) -> dict:
    """Rows of target and draft, each as logits or probabilities, the draft's with a vocabulary of its own or not."""
    vocab_size = choice.choice((5, 16, 17, 31, 32, 33, 48))
    values = {}
    target = torch.randn(num_target, vocab_size) * 2
    draft = target[draft_of_target] + choice.choice((0.1, 0.3, 0.7, 1.2)) * torch.randn(num_draft, vocab_size)
    if has_peaks and choice.random() < 0.2:  # once these are rejected next to nothing is left of the draft
        draft.scatter_(1, torch.randint(vocab_size, (num_draft, 1)), 30.0)
    kind = choice.choice(("same", "same", "same", "reduced", "shorter", "longer", "longer"))
    if kind == "reduced":
        kept = torch.randperm(vocab_size)[: choice.randint(1 + vocab_size // 2, vocab_size)].sort().values
        values["d2t"] = kept - torch.arange(len(kept))
        draft = draft[:, kept]
    elif kind == "shorter":
        draft = draft[:, : choice.randint(1 + vocab_size // 2, vocab_size)]
    elif kind == "longer":
        draft = torch.cat([draft, torch.randn(num_draft, choice.choice((1, 16, 20)))], 1)
    values["temperature"] = each_of([0.0, 0.7, 1.0, 1.0, 1.0, 1.3], batch_size)
    values["draft_temperature"] = each_of([0.0, 0.7, 1.0, 1.0, 1.0, 1.3], batch_size)
    some(choice, values, "draft_temperature")
    # of each eight calls all four, at all nodes and level by level
    kinds = {"target": choice.number // 2 % 2 == 0, "draft": choice.number // 4 % 2 == 0}
    for name, rows in (("target", target), ("draft", draft)):
        if choice.random() < 0.15:
            rows[:, :: choice.choice((2, 3))] = -INFINITY
        if choice.random() < 0.15:
            rows[choice.randrange(len(rows)), ::2] = choice.choice((NAN, INFINITY))
        given = f"{name}_temperature" if f"{name}_temperature" in values else "temperature"
        own = values[given].clamp(min=0.02).repeat_interleave(max(len(rows) // batch_size, 1))[: len(rows)]
        probs = torch.softmax(rows.nan_to_num(-50.0, 50.0, -INFINITY) / own[:, None], -1).nan_to_num(0.0)
        values[f"{name}_probs"] = probs if kinds[name] else None
        dtype = choice.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
        values[f"{name}_logits"] = None if kinds[name] else rows.to(dtype)
        values[f"{name} drawn"] = probs
    return values


def draw_drafts(choice, values, parents, replacement) -> None:
    """Draws the tokens of children from the draft's rows; parents: (row of the draft, its children's places)."""
    probs, flat = values.pop("draft drawn"), values["candidates"].view(-1)
    vocab_size = values.pop("target drawn").shape[1]
    shift = values["d2t"] if values.get("d2t") is not None else torch.zeros(probs.shape[1], dtype=torch.int64)
    for row, places in parents:
        left = probs[row].clone()
        for place in places:
            if left.sum() <= 0:
                flat[place] = -1
                continue
            token = int(torch.multinomial(left, 1))
            flat[place] = token + int(shift[token])
            if not replacement:
                left[token] = 0
    spoil_tokens(choice, values, vocab_size)
    if choice.random() < 0.3:
        spoil_tokens(choice, values, max(vocab_size, probs.shape[1]))


def rejection_tree(choice, has_replacement):
    batch_size, num_nodes = choice.choice((1, 2, 2, 3)), choice.choice((1, 5, 5, 5, 5, 6, 8, 8))
    spec_steps = choice.choice((0, 1, 2, 2, 3, 3, 4, 4, num_nodes))
    links = tree(choice, batch_size, num_nodes, 1)
    num_rows = batch_size * num_nodes
    values = links | coins_of(batch_size, num_rows) | {"spec_steps": spec_steps}
    values |= pair_of(choice, links, num_rows, num_rows, batch_size, torch.arange(num_rows), has_replacement)
    replacement = has_replacement and choice.random() < 0.4
    if has_replacement:
        values["replacement"] = replacement
    parents = []
    for request in range(batch_size):
        for node in range(num_nodes):
            child, places = int(links["retrieve_next_token"][request, node]), []
            while child > 0:
                places.append(request * num_nodes + child)
                child = int(links["retrieve_next_sibling"][request, child])
            parents.append((request * num_nodes + node, places))
    draw_drafts(choice, values, parents, replacement)
    return values


def verify_chain(choice):
    batch_size, num_tokens = choice.choice((1, 4, 6)), choice.choice((1, 2, 4, 4, 5, 9))
    num_target, num_draft = batch_size * num_tokens, batch_size * (num_tokens - 1)
    values = {"candidates": torch.zeros(batch_size, num_tokens, dtype=torch.int64)} | coins_of(batch_size, num_target)
    of_target = torch.arange(num_target).view(batch_size, num_tokens)[:, :-1].flatten()
    if num_draft == 0:
        values |= pair_of(choice, values, num_target, num_target, batch_size, torch.arange(num_target))
        for name in ("draft_logits", "draft_probs"):
            values[name] = None if values[name] is None else values[name][:0]
        values["draft drawn"] = values["draft drawn"][:0]
    else:
        values |= pair_of(choice, values, num_target, num_draft, batch_size, of_target)
    draw_drafts(choice, values, [(row, [int(place) + 1]) for row, place in enumerate(of_target)], True)
    if choice.random() < 0.3:
        values["candidates"][choice.randrange(batch_size), choice.randrange(num_tokens) :] = -1
    return values | {"method": choice.choice(("standard", "standard", "block"))}


def sample_children(choice):
    num_rows, vocab_size = choice.choice((1, 3, 5)), vocabulary(choice)
    logits = torch.randn(num_rows, vocab_size) * 2
    if choice.random() < 0.4:
        logits[choice.randrange(num_rows), :: choice.choice((1, 2, 5))] = choice.choice((NAN, -INFINITY, INFINITY))
    values = coins_of(num_rows, num_rows) | {
        "draft_logits": logits.to(choice.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))),
        "temperature": temperatures(num_rows),
        "nodes": integers(0, 65535, num_rows),
        "d2t": integers(0, 30, vocab_size),
        "num_children": choice.choice((1, 2, 5, 19)),
        "replacement": choice.random() < 0.5,
    }
    some(choice, values, "nodes", "d2t")
    return values


def verify_tree_typical(choice):
    batch_size, num_nodes, spec_steps = tree_sizes(choice)
    vocab_size = vocabulary(choice)
    links = tree(choice, batch_size, num_nodes, vocab_size)
    logits = rows_of_logits(choice, batch_size * num_nodes, vocab_size)
    favour_children(choice, links, logits, choice.choice((0.0, 2.0, 6.0)))
    spoil_tokens(choice, links, vocab_size)
    return links | coins_of(batch_size, batch_size * num_nodes) | {
        "target_logits": logits,
        "temperature": temperatures(batch_size),
        "epsilon": each_of([0.0, 0.05, 0.3, 2.0], batch_size),
        "delta": each_of([0.0, 0.1, 0.6, 3.0], batch_size),
        "spec_steps": spec_steps,
    }  # fmt: skip


def verify_tree_coins(choice):
    """Probabilities and coins are multiples of 1 / 64, so that sums often stand on a coin or a threshold."""
    batch_size, num_nodes, spec_steps = tree_sizes(choice)
    vocab_size = vocabulary(choice)
    any_order = choice.random() < 0.3
    links = tree(choice, batch_size, num_nodes, min(vocab_size, choice.choice((3, 96))), any_order)
    counts = torch.zeros(batch_size * num_nodes, vocab_size)
    drawn = torch.randint(vocab_size, (batch_size * num_nodes, 24))
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32))
    favour_children(choice, links, counts, 8.0)
    if choice.random() < 0.3:
        counts[choice.randrange(len(counts)), :: choice.choice((1, 3))] = choice.choice((NAN, INFINITY, -1.0, 0.0))
    spoil_tokens(choice, links, vocab_size)
    probs = counts / 64
    return links | {
        "target_probs": probs if choice.random() < 0.5 else probs.view(batch_size, num_nodes, vocab_size),
        "uniform_samples": integers(0, 40, batch_size, num_nodes) / 64,
        "uniform_samples_for_final_sampling": integers(0, 63, batch_size) / 64,
        "spec_steps": spec_steps,
        "threshold_single": choice.choice((1.0, 1.0, 0.125, 0.25, 0.0)),
        "threshold_acc": choice.choice((1.0, 1.0, 0.5, 0.25, 0.0)),
        "any_order": any_order,
        "keep_unvisited": choice.random() < 0.3,
    }


def verify_tree_topp(choice):
    batch_size, num_nodes, spec_steps = tree_sizes(choice)
    vocab_size, num_candidates = choice.choice((2, 3, 5)), choice.choice((1, 2, 3, 5))
    links = tree(choice, batch_size, num_nodes, vocab_size)
    spoil_tokens(choice, links, vocab_size)
    ids = integers(-1, vocab_size, batch_size * num_nodes, num_candidates)
    for rank in range(min(2, num_candidates)):
        likely = torch.zeros(len(ids), vocab_size)
        favour_children(choice, links, likely, 1.0)
        ids[:, rank] = torch.where(torch.rand(len(ids)) < 0.8, likely.argmax(1), ids[:, rank])
    return links | {
        "candidate_ids": ids,
        "candidate_lens": each_of([-1, 0, 0, 1, num_candidates, num_candidates + 1], len(ids), torch.int64),
        "target_predict": integers(-1, LARGEST + 1, batch_size, num_nodes),
        "spec_steps": spec_steps,
        "verify_window": choice.choice((0, 1, 2, 3)),
    }


def verify_commit(choice):
    batch_size, num_columns, num_nodes = choice.choice((1, 3, 5)), choice.choice((1, 2, 4, 7)), choice.choice((1, 4, 9))
    first = torch.arange(batch_size)[:, None] * num_nodes
    values = {
        "predicts": integers(-1, 40, batch_size * num_nodes),
        "accept_index": integers(-1, num_nodes, batch_size, num_columns) + first,
        "accept_token_num": integers(-1, num_columns + 1, batch_size),
        "seq_lens": integers(0, 2**20, batch_size),
        "is_live": integers(0, 2, batch_size),
    }
    some(choice, values, "is_live")
    if "is_live" in values and choice.random() < 0.5:
        values["is_live"] = values["is_live"] > 0
    values["accept_index"][torch.rand(batch_size) < 0.2, 0] = -1
    return values


def pack_verify_rows(choice):
    batch_size, num_nodes = choice.choice((0, 1, 3, 7)), choice.choice((1, 4, 8, 9, 13))
    values = {
        "draft_tokens": integers(-2, 40, batch_size, num_nodes),
        "num_tokens": integers(-1, num_nodes + 1, batch_size),
        "positions": integers(-2, 90, batch_size, num_nodes),
        "seq_lens": integers(-3, 90, batch_size),
        "max_rows": choice.choice((0, 1, 8, 9, batch_size * num_nodes, batch_size * num_nodes + 23)),
    }
    some(choice, values, "positions")
    if "positions" in values:
        some(choice, values, "seq_lens")
    return values


def append_output(choice):
    """Few tokens, so that stop sequences occur."""
    batch_size, num_columns = choice.choice((1, 3, 6)), choice.choice((1, 4, 7, 16, 17))
    num_stops, stop_size = choice.choice((1, 2, 9)), choice.choice((1, 2, 3, 5, 8))
    row_size, highest = choice.choice((12, 40)), choice.choice((1, 2, 3))
    prompt = integers(0, row_size // 2, batch_size)
    length = prompt + integers(-1, row_size // 2 + 1, batch_size)
    tokens = integers(0, highest, batch_size, num_columns)
    tokens[torch.arange(num_columns) >= integers(0, 2 * num_columns, batch_size, 1)] = choice.choice((-1, LARGEST + 1))
    stops = integers(0, highest, batch_size, num_stops, stop_size)
    stops[torch.arange(stop_size) < integers(0, stop_size, batch_size, num_stops, 1)] = -1
    values = {
        "token_ids": integers(0, highest, batch_size + 3, row_size),
        "num_tokens": length,
        "num_prompt_tokens": prompt,
        "tokens": tokens,
        "max_tokens": length + integers(-1, 2 * num_columns, batch_size),
        "end_token_ids": integers(-1, 4 * highest, *choice.choice(((batch_size, 3), (batch_size, 40), (1,), (20,)))),
        "stop_sequences": stops,
        "min_tokens": integers(0, row_size // 2, batch_size),
        "is_live": integers(0, 4, batch_size) > 0,
        "rows": torch.randperm(batch_size + 3)[:batch_size] - integers(0, 1, 1) * integers(0, 1, batch_size) * 99,
    }
    some(choice, values, "max_tokens", "end_token_ids", "stop_sequences", "min_tokens", "is_live", "rows", chance=0.7)
    return values


def ngram_match(choice):
    """Few tokens, so that matches are many and long."""
    batch_size, width = choice.choice((1, 3, 5)), choice.choice((1, 15, 16, 17, 48, 50, 64, 100))
    highest, given = choice.choice((0, 1, 2, 5)), choice.choice((1, 3, 8))
    token_ids = integers(0, highest, batch_size, width)
    token_ids[torch.rand(batch_size, width) < choice.choice((0.0, 0.0, 0.1))] = -1
    drafts = integers(0, highest, batch_size, given)
    most = choice.choice((1, 2, 2, 4, 9, 32))
    values = {
        "token_ids": token_ids,
        "seq_lens": integers(-1, width + 2, batch_size),
        "draft_tokens": torch.where(torch.arange(given) >= integers(0, given, batch_size, 1), -1, drafts),
        "max_drafts": integers(-1, 20, batch_size),
        "num_speculative_tokens": choice.choice((1, 4, 12, 40)),
        "spec_steps": choice.choice((1, 3, 5, 64)),
        "max_ngram_size": most,
        "min_ngram_size": choice.randint(1, most),
        "max_matches": choice.choice((1, 1, 2, 3, 8, 16)),
        "prefer": choice.choice(("latest", "earliest")),
        "token_budget": choice.choice((0, 5, 17, 30)),
    }
    some(choice, values, "draft_tokens", "max_drafts", "spec_steps", "token_budget")
    return values


def trie(choice, batch_size, size):
    """Most nodes below the one before, a few below nothing."""
    node = torch.arange(1, size + 1)
    elsewhere = (torch.rand(batch_size, size) * node).long()
    parents = torch.where(torch.rand(batch_size, size) < choice.random(), elsewhere, node - 1)
    parents[torch.rand(batch_size, size) < choice.choice((0.0, 0.0, 0.1))] = choice.choice((-1, size, LARGEST))
    tokens = integers(0, choice.choice((1, 3)), batch_size, size)
    tokens[torch.rand(batch_size, size) < choice.choice((0.0, 0.0, 0.1))] = -1
    return tokens, parents


def reroot_drafts(choice):
    sizes = (1, 3, 4), (1, 7, 8, 15, 30), (0, 1, 2, 4)
    batch_size, size, path_size = map(choice.choice, sizes)
    tokens, parents = trie(choice, batch_size, size)
    path = integers(0, 1, batch_size, path_size)
    for request in range(batch_size):
        end = 0
        for place in range(choice.randint(0, path_size)):
            below = (parents[request] == end).nonzero().flatten().tolist()
            if not below:
                break
            end = choice.choice(below) + 1
            path[request, place] = tokens[request, end - 1]
        path[request, choice.randint(0, path_size) :] = -1 if choice.random() < 0.5 else path[request, -1:]
    values = {"tokens": tokens, "parents": parents, "path": path}
    sizes = {"num_speculative_tokens": (1, 4, 16, 40), "spec_steps": (1, 2, 5, 40)}
    return values | {name: choice.choice(given) for name, given in sizes.items()}


def share_drafts(choice):
    batch_size, num_drafters, size = choice.choice((1, 3, 4)), choice.choice((1, 2, 3)), choice.choice((0, 1, 5, 8))
    shape = batch_size, num_drafters, size
    tokens, parents = (each.view(shape) for each in trie(choice, batch_size * num_drafters, size))
    values = {"tokens": tokens, "parents": parents, "probs": torch.randint(9, shape).float() / 8}
    values["probs"][torch.rand(shape) < choice.choice((0.0, 0.1))] = choice.choice((NAN, -1.0, 2.0))
    values["factors"] = torch.randint(9, (num_drafters, choice.choice((1, 2, 9)))).float() / 4
    some(choice, values, "factors")
    return values | {"num_speculative_tokens": choice.choice((1, 4, 8, 17))}


def merge_drafts(choice):
    batch_size, size, other = choice.choice((1, 3, 4)), choice.choice((0, 1, 5, 8)), choice.choice((0, 1, 4, 9))
    names = ("tokens", "parents", "other_tokens", "other_parents", "attach")
    made = *trie(choice, batch_size, size), *trie(choice, batch_size, other), integers(-1, size + 1, batch_size)
    return dict(zip(names, made)) | {"num_speculative_tokens": choice.choice((1, 4, 8, 17))}


CALLS: dict[str, Callable[[Choice], dict]] = {
    "draft.merge_drafts": merge_drafts,
    "draft.ngram_match": ngram_match,
    "draft.reroot_drafts": reroot_drafts,
    "draft.share_drafts": share_drafts,
    "rejection.sample_children": sample_children,
    "rejection.verify_chain": verify_chain,
    "rejection.verify_tree_rejection": lambda choice: rejection_tree(choice, has_replacement=True),
    "rejection.verify_tree_traversal": lambda choice: rejection_tree(choice, has_replacement=False),
    "sampling.min_p_renorm": renorm("min_p", [-1.0, 0.0, 0.01, 0.25, 0.5, 1.0, 2.0, NAN]),
    "sampling.penalize_logits": penalize_logits,
    "sampling.sample_from_logits": sample_from_logits,
    "sampling.top_k_renorm": renorm("top_k", [-1, 0, 1, 2, 9, 40, 128, 300, 1000]),
    "sampling.top_p_renorm": renorm("top_p", [-1.0, 0.0, 0.1, 0.5, 0.75, 0.9, 0.999, 1.0, NAN]),
    "sampling.verify_tree_sampled": verify_tree_sampled,
    "verify.append_output": append_output,
    "verify.pack_verify_rows": pack_verify_rows,
    "verify.verify_commit": verify_commit,
    "verify.verify_tree_coins": verify_tree_coins,
    "verify.verify_tree_greedy": verify_tree_greedy,
    "verify.verify_tree_topp": verify_tree_topp,
    "verify.verify_tree_typical": verify_tree_typical,
}  # fmt: skip


def drawn_call(path: str, number: int, is_malformed: bool = False) -> tuple[dict, random.Random]:
    """The arguments of a call, the same every time, and what to go on drawing with."""
    choice = Choice(f"{path} {number}")
    choice.number, choice.is_malformed = number, is_malformed
    torch.manual_seed(choice.getrandbits(32))
    values = CALLS[path](choice)
    if "retrieve_index" in values:
        spoil_links(choice, values)
    return values, choice


# of all requests together
SHARED = ("d2t", "simulated_rates")


def without_requests(path: str, values: dict) -> dict:
    """The call of an empty batch."""
    kept = {*SHARED, "token_ids"} if path == "verify.append_output" else SHARED
    is_list = {name for name in ("end_token_ids", "bad_token_ids") if name in values and values[name].dim() == 1}
    return {
        name: value[:0] if isinstance(value, torch.Tensor) and name not in kept and name not in is_list else value
        for name, value in values.items()
    }
