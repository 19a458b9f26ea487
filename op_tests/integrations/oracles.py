"""The algorithms of SGLang's CUDA ops, transcribed one thread after another into plain Python: lists in, lists out."""

from __future__ import annotations

import itertools

from eagle_kernels.integrations.sgl_kernel import TreeMaskMode


def oracle_build(parent_list, selected_index, seq_lens, topk, num_nodes):
    """Rows of bool [N, N], positions and links of every request, as SGLang's op writes them for sound trees."""
    rows, positions, next_token, next_sibling = [], [], [], []
    for slots, kept, seq_len in zip(parent_list.tolist(), selected_index.tolist(), seq_lens.tolist()):

        def parent(node, slots=slots, kept=kept):
            slot = kept[node - 1] // topk
            return 0 if slot == 0 else 1 + kept.index(slots[slot])

        first, sibling = [-1] * num_nodes, [-1] * num_nodes
        for node in range(num_nodes - 1, 0, -1):
            above = parent(node)
            if first[above] != -1:
                sibling[node] = first[above]
            first[above] = node
        for node in range(num_nodes):
            seen, hop, depth = {0, node}, node, 0
            while hop != 0:
                seen.add(hop)
                hop, depth = parent(hop), depth + 1
            rows.append([other in seen for other in range(num_nodes)])
            positions.append(seq_len + depth)
        next_token.append(first)
        next_sibling.append(sibling)
    return rows, positions, next_token, next_sibling


def oracle_mask(rows, seq_lens, num_nodes, mode, fill):
    """The mask's cells, or words, from those rows; `fill` stands in FULL_MASK's prefix."""
    if mode == TreeMaskMode.FULL_MASK:
        lengths = [seq_len for seq_len in seq_lens.tolist() for _ in range(num_nodes)]
        return [cell for seq_len, row in zip(lengths, rows) for cell in [fill] * seq_len + row]
    if mode == TreeMaskMode.QLEN_ONLY:
        return list(itertools.chain(*rows))
    return [sum(1 << other for other, is_seen in enumerate(row) if is_seen) for row in rows]


def oracle_verify(predicts, accept_index, candidates, index, next_token, next_sibling, target_predict):
    """predicts, accept_index (lists, changed in place) and the accepted counts."""
    target, counts = list(itertools.chain(*target_predict)), []
    for request, path in enumerate(accept_index):
        last, accepted, current = index[request][0], 0, 0
        path[0] = last
        for _ in range(1, len(path)):
            current = next_token[request][current]
            while current != -1 and candidates[request][current] != target[last]:
                current = next_sibling[request][current]
            if current == -1:
                break
            predicts[last] = candidates[request][current]
            accepted += 1
            last = path[accepted] = index[request][current]
        counts.append(accepted)
        predicts[last] = target[last]
    return counts


def oracle_sample(outputs, tree, coins, final_coins, target_probs, threshold_single, threshold_acc):
    """predicts and accept_index (lists, changed in place) and the accepted counts, as SGLang's tree sampler gives them.

    A matrix of what was rejected stands beside the target's, and the last row's difference is drawn from. For trees
    whose siblings carry distinct tokens.
    """
    predicts, accept_index = outputs
    candidates, index, next_token, next_sibling = tree
    threshold_acc, counts = max(threshold_acc, 1e-9), []
    for request, path in enumerate(accept_index):
        rejected = [[0.0] * len(row) for row in target_probs[request]]
        row, acc, coin, accepted = 0, 0.0, coins[request][0], 0
        last = path[0] = index[request][0]
        for _ in range(1, len(path)):
            child = next_token[request][row]
            while child != -1:
                token = candidates[request][child]
                prob = target_probs[request][row][token]
                acc += prob
                if prob > 0 and (coin < acc / threshold_acc or prob >= threshold_single):
                    acc, coin, row = 0.0, coins[request][child], child
                    predicts[last] = token
                    accepted += 1
                    last = path[accepted] = index[request][child]
                    break
                rejected[row][token] = prob
                child = next_sibling[request][child]
            if child == -1:
                break
        counts.append(accepted)
        is_full = accepted == len(path) - 1
        left = [max(p - (0.0 if is_full else r), 0.0) for p, r in zip(target_probs[request][row], rejected[row])]
        level, reached, token = final_coins[request] * sum(left), 0.0, None
        for candidate, prob in enumerate(left):
            reached += prob
            if prob > 0 and (token is None or token[1] <= level):
                token = (candidate, reached)
        predicts[last] = len(left) - 1 if token is None else token[0]
    return counts


def oracle_reconstruct(mask, seq_lens):
    """positions and links from the ancestor masks [B, N, N]."""
    positions, next_token, next_sibling = [], [], []
    for rows, seq_len in zip(mask.tolist(), seq_lens.tolist()):
        nodes = range(len(rows))
        parents = [max((other for other in range(node) if rows[node][other]), default=-1) for node in nodes]
        positions += [seq_len + sum(rows[node][:node]) for node in nodes]
        next_token.append([min((k for k in nodes if k > node and rows[k][node]), default=-1) for node in nodes])
        later = [[k for k in nodes if k > node and parents[k] == parents[node] >= 0] for node in nodes]
        next_sibling.append([min(siblings, default=-1) for siblings in later])
    return positions, next_token, next_sibling
