"""The algorithms of SGLang's CUDA ops, transcribed one thread after another into plain Python: lists in, lists out."""

import itertools

from eagle_kernels.integrations.sgl_kernel import TreeMaskMode


def oracle_build(parent_list, selected_index, seq_lens, topk, depth, num_nodes):
    """Rows of bool [N, N], positions and links of every request, as SGLang's op writes them, malformed trees as well.

    A parent is looked up among the request's own selection, in whatever order that stands, and one that is missing (or
    whose id leads out of the parent list) links nothing. The way up from a node ends at the root, at a node without a
    parent, or after `depth` nodes.
    """
    rows, positions, next_token, next_sibling = [], [], [], []
    for slots, kept, seq_len in zip(parent_list.tolist(), selected_index.tolist(), seq_lens.tolist()):

        def parent(node, slots=slots, kept=kept):
            slot = kept[node - 1] // topk
            if not 0 < slot < len(slots):
                return 0 if slot == 0 else None
            return 1 + kept.index(slots[slot]) if slots[slot] in kept else None

        first, sibling = [-1] * num_nodes, [-1] * num_nodes
        for node in range(num_nodes - 1, 0, -1):
            above = parent(node)
            if above is None:
                continue
            if first[above] != -1:
                sibling[node] = first[above]
            first[above] = node
        for node in range(num_nodes):
            seen, hop, steps = {0, node}, node, 0
            while hop and steps < depth:
                seen.add(hop)
                hop, steps = parent(hop), steps + 1
            rows.append([other in seen for other in range(num_nodes)])
            positions.append(seq_len + steps)
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


# KV slots: one program of SGLang's kernels after another, each writing into lists that stand for its buffers


def oracle_draft_indices(table, rows, lens, grid, page_size, window_size, sink_size, indices, indptr):
    """generate_draft_decode_kv_indices; indices [N][*] and indptr [N][*] are changed in place."""
    num_steps, num_requests, topk = grid
    cap = window_size + sink_size if window_size else max([0, *lens])
    for step, request, branch in itertools.product(range(num_steps), range(num_requests), range(topk)):
        iters, seq_len = step + 1, lens[request]
        before = sum(min(length, cap) for length in lens[:request])
        kept = min(seq_len, cap)
        sink = min(sink_size, seq_len) if window_size else 0
        offset = before * topk + request * iters * topk + branch * (kept + iters)
        for entry in range(kept):
            column = entry if entry < sink else seq_len - (kept - sink) + entry - sink
            indices[step][offset + entry] = table[rows[request]][column]
        for entry in range(iters):
            column = _chain_column(seq_len, branch, entry, num_steps, topk, page_size)
            indices[step][offset + kept + entry] = table[rows[request]][column]
        zone = request * topk + branch or num_requests * topk
        lengths = [min(length, cap) for length in lens for _ in range(topk)]
        indptr[step][zone] = sum(lengths[:zone]) + zone * iters


def oracle_window_indices(table, rows, lens, grid, page_size, window, indices, indptr):
    """generate_draft_decode_window_kv_indices, likewise."""
    num_steps, num_requests, topk = grid
    for step, request, branch in itertools.product(range(num_steps), range(num_requests), range(topk)):
        iters, seq_len, zone = step + 1, lens[request], request * topk + branch
        clipped = [min(length + iters, window) for length in lens for _ in range(topk)]
        chain = [_chain_column(seq_len, branch, entry, num_steps, topk, page_size) for entry in range(iters)]
        columns = (list(range(seq_len)) + chain)[-window:]
        for entry, column in enumerate(columns):
            indices[step][sum(clipped[:zone]) + entry] = table[rows[request]][column]
        zone = zone or num_requests * topk
        indptr[step][zone] = sum(clipped[:zone])


def _chain_column(seq_len, branch, entry, num_steps, topk, page_size):
    if page_size == 1 or topk == 1:
        return seq_len + branch * num_steps + entry
    last_page_len = seq_len % page_size
    pages = (last_page_len + num_steps + page_size - 1) // page_size
    return seq_len // page_size * page_size + branch * pages * page_size + last_page_len + entry


def oracle_flat_indices(table, rows, lens, indptr, starts, indices):
    """create_flashinfer_kv_indices_triton; indices is changed in place."""
    for request, length in enumerate(lens):
        start = starts[request] if starts else 0
        for entry in range(length):
            indices[indptr[request] + entry] = table[rows[request]][start + entry]


def oracle_assign(table, rows, starts, ends, slots):
    """assign_req_to_token_pool; table is changed in place."""
    taken = 0
    for row, start, end in zip(rows, starts, ends):
        table[row][start:end] = slots[taken : taken + end - start]
        taken += end - start


def oracle_extend(table, rows, starts, ends):
    """assign_extend_cache_locs: what is written, from the front."""
    return [slot for row, start, end in zip(rows, starts, ends) for slot in table[row][start:end]]


def oracle_fill_accept(accept_index, slots, accepted):
    """fill_accept_out_cache_loc; accepted is changed in place."""
    for entry, index in enumerate(accept_index):
        if index > -1:
            accepted[sum(other != -1 for other in accept_index[:entry])] = slots[index]


def oracle_target(slots, accept_length, num_free, num_tokens):
    """get_target_cache_loc: tgt_cache_loc and to_free_slots."""
    targets, freed = [], []
    for request, (accepted, free) in enumerate(zip(accept_length, num_free)):
        window = slots[request * num_tokens : (request + 1) * num_tokens]
        targets += window[: accepted + 1]
        freed += window[num_tokens - free :]
    return targets, freed


def oracle_align(seq_lens, mask, page_size, num_tokens):
    """align_evict_mask_to_page_size; mask is changed in place."""
    for request, seq_len in enumerate(seq_lens):
        first = request * num_tokens
        num_false = mask[first : first + num_tokens].count(False)
        start = (seq_len + num_false - 1) // page_size * page_size - seq_len
        for place in range(max(start, 0), min(start + page_size, num_tokens)):
            mask[first + place] = False
