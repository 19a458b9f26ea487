"""Lets SGLang's engine serve random requests for some time: the script of test_sglang_engine.py's endurance run.

    python endure.py ORDER RESULT

ORDER is a JSON file: `engine`, the arguments of `sglang.Engine`; `seconds`; `clients` that send one request after
another; `texts` of which prompts are pieces, and `parameters` to choose from. Some requests are aborted after a while,
some want several copies. RESULT has a record of each: `prompt`, `parameters`, `tokens`, `may_be_cut`: by its abort.
"""

import asyncio
import json
import random
import sys
import time

MOST_PROMPT, MOST_TOKENS, IDLE_S = 300, 64, 5.0


def main(order_file: str, result_file: str) -> None:
    """Runs the order, then leaves the engine idle for a while, in which it looks for lost memory."""
    import sglang

    with open(order_file, encoding="utf-8") as file:
        order = json.load(file)
    engine = sglang.Engine(**order["engine"])
    records: list[dict] = []
    stop_s = time.monotonic() + order["seconds"]

    async def all_clients() -> None:
        await asyncio.gather(*(client(engine, number, order, stop_s, records) for number in range(order["clients"])))
        await asyncio.sleep(IDLE_S)

    engine.loop.run_until_complete(all_clients())
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump(records, file)
    engine.shutdown()


async def client(engine, number: int, order: dict, stop_s: float, records: list[dict]) -> None:
    """Sends requests until the time is over."""
    coin, count = random.Random(number), 0
    while time.monotonic() < stop_s:
        text = coin.choice(order["texts"])
        start = coin.choice((0, 0, coin.randrange(len(text) - 1)))  # many begin alike, for the radix cache
        prompt = text[start : start + 1 + round(MOST_PROMPT ** coin.random())]
        parameters = coin.choice(order["parameters"])
        parameters = parameters | {
            "max_new_tokens": coin.randint(parameters.get("min_new_tokens", 1), MOST_TOKENS),
            "sampling_seed": coin.randrange(2**40),
            "ignore_eos": True,
        }
        copies = 2 if coin.random() < 0.1 else 1
        abort_s = coin.random() ** 2 * 2 if coin.random() < 0.2 and copies == 1 else None
        count += 1
        found = await request(engine, f"{number}-{count}-", prompt, parameters, copies, abort_s)
        records += [{"prompt": prompt, "parameters": parameters} | each for each in found]


async def request(engine, rid: str, prompt, parameters: dict, copies: int, abort_s: float | None) -> list[dict]:
    """Runs one request; returns the tokens of each copy."""
    if copies > 1:
        outputs = await engine.async_generate(input_ids=prompt, sampling_params=parameters | {"n": copies})
        return [{"tokens": output["output_ids"], "may_be_cut": False} for output in outputs]
    tokens: list[int] = []
    if abort_s is not None:
        asyncio.get_running_loop().call_later(abort_s, engine.tokenizer_manager.abort_request, rid)
    try:
        outputs = await engine.async_generate(input_ids=prompt, sampling_params=parameters, rid=rid, stream=True)
        async for output in outputs:
            if len(output["output_ids"]) >= len(tokens):
                tokens = list(output["output_ids"])
    except Exception:
        if abort_s is None:
            raise
    return [{"tokens": tokens, "may_be_cut": abort_s is not None}]


if __name__ == "__main__":
    main(*sys.argv[1:])
