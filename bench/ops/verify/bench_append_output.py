"""append_output for a step that keeps all its tokens, with end tokens alone and with stop sequences."""

import torch

from bench.harness import grid
from bench.harness.inputs import VOCABULARY

PROMPT, OUTPUT = 1024, 256
NUM_STOPS, STOP_SIZE = 4, 8

CASES = grid(has_stops=[False, True], batch_size=[1, 8, 32, 128], num_columns=6)
SMALL_CASES = grid(batch_size=3, num_columns=4, has_stops=[False, True])
HEADLINES = [f"B=32 T=6 end tokens and {NUM_STOPS} stop sequences"]


def name(batch_size, num_columns, has_stops):
    return f"B={batch_size} T={num_columns} end tokens" + (f" and {NUM_STOPS} stop sequences" if has_stops else "")


def make(device, batch_size, num_columns, has_stops):
    """Nothing ends: that is what a step all but always finds, after it has looked at everything."""
    length = PROMPT + OUTPUT
    values = {
        "token_ids": torch.randint(VOCABULARY, (batch_size, length + 64), dtype=torch.int32, device=device),
        "num_tokens": torch.full((batch_size,), length, dtype=torch.int32, device=device),
        "num_prompt_tokens": torch.full((batch_size,), PROMPT, dtype=torch.int32, device=device),
        "tokens": torch.randint(VOCABULARY, (batch_size, num_columns), device=device),
        "max_tokens": torch.full((batch_size,), length + 64, dtype=torch.int32, device=device),
        "end_token_ids": torch.full((2,), VOCABULARY, dtype=torch.int32, device=device),
    }
    if has_stops:
        stops = torch.randint(VOCABULARY, (batch_size, NUM_STOPS, STOP_SIZE), device=device)
        stops[:, :, -1] = VOCABULARY
        values["stop_sequences"] = stops
    return values


def count_bytes(batch_size, num_columns, has_stops):
    """Tokens read and written, text written as int32, four numbers of each request read and three written."""
    window = (8 * NUM_STOPS * STOP_SIZE + 4 * (STOP_SIZE - 1)) if has_stops else 0
    return batch_size * ((8 + 8 + 4) * num_columns + 24 + window)


def prepare_torch(values):
    history, tokens, stops = values["token_ids"], values["tokens"], values.get("stop_sequences")
    device, num_columns = tokens.device, tokens.shape[1]
    column = torch.arange(num_columns, device=device)

    def run():
        length = values["num_tokens"].long()
        count = (tokens >= 0).long().cumprod(1).sum(1)
        is_end = (tokens[:, :, None] == values["end_token_ids"]).any(-1)
        # the column, and of one column the lowest reason
        keys = [torch.where(is_end, column, num_columns).amin(1) * 4 + 1]
        if stops is not None:
            size = stops.shape[2]
            place = length[:, None] + torch.arange(1 - size, 0, device=device)
            text = torch.cat([history.gather(1, place.clamp(min=0)).long(), tokens], dim=1)
            is_output = (place >= values["num_prompt_tokens"][:, None]) & (place >= 0)
            text[:, : size - 1] = torch.where(is_output, text[:, : size - 1], -2)
            windows = text.unfold(1, size, 1)[:, :, None, :]
            is_stop = ((windows == stops[:, None]) | (stops[:, None] < 0)).all(-1)
            is_stop = (is_stop & (stops[:, :, -1] >= 0)[:, None, :]).any(-1)
            keys.append(torch.where(is_stop, column, num_columns).amin(1) * 4 + 2)
        room = values["max_tokens"].clamp(max=history.shape[1])
        keys.append((room - length - 1).clamp(min=-1, max=num_columns) * 4 + 3)
        key = torch.stack(keys).amin(0)
        ends_at, reason = key >> 2, key & 3
        is_finished = (ends_at < count) & (count > 0)
        kept = torch.where(is_finished, ends_at + 1, count)
        is_kept = column < kept[:, None]
        place = (length[:, None] + column).clamp(max=history.shape[1] - 1)
        history.scatter_(1, place, torch.where(is_kept, tokens.to(history.dtype), history.gather(1, place)))
        return {
            "new_num_tokens": (length + kept).int(),
            "tokens": torch.where(is_kept, tokens, -1),
            "num_kept": kept.int(),
            "finish_reason": torch.where(is_finished, reason, 0).int(),
        }

    return run
