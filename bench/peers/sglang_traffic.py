"""Serves mixed traffic with a running SGLang engine: what `sglang_child.py` runs for an order with traffic.

It is copied beside that script, and imports nothing of this repository.
"""

import asyncio

READY_TOKENS = 8  # of a request, before the one that waits for it joins
SOON_S = 0.01  # after which a request is aborted that need not have any token
GREEDY = {"temperature": 0.0}


def serve(engine, traffic: dict, write) -> None:
    """Runs all waves, and writes a record `texts` for each; `failed` for one that raised, which is the last.

    traffic: `requests` with a prompt and a number of tokens each; `alone` and `sampled`, indices into them; `joining`,
    with the index of a request, the place in the wave of the one that it waits for, whether it is sampled, and after
    how many tokens it is aborted; `sampling`; `idle_s`, the pause before the last request.
    """
    wave = ""

    async def waves() -> None:
        nonlocal wave
        requests, sampling = traffic["requests"], traffic["sampling"]
        indices = range(len(requests))
        wave = "together"
        found = await asyncio.gather(*(request(engine, wave, index, index, requests[index]) for index in indices))
        write("texts", wave=wave, texts=found)
        wave = "alone"
        found = [await request(engine, wave, *place, requests[place[1]]) for place in enumerate(traffic["alone"])]
        write("texts", wave=wave, texts=found)
        wave = "joining"
        write("texts", wave=wave, texts=await join(engine, traffic["joining"], requests, sampling))
        wave = "sampled"
        places = [
            request(engine, wave, *place, requests[place[1]] | {"max_new_tokens": traffic["sampled_tokens"]}, sampling)
            for place in enumerate(traffic["sampled"])
        ]
        found = [text | {"tokens": len(text["tokens"])} for text in await asyncio.gather(*places)]
        write("texts", wave=wave, texts=found)
        wave = "after idling"
        await asyncio.sleep(traffic["idle_s"])
        index = traffic["alone"][0]
        write("texts", wave=wave, texts=[await request(engine, wave, 0, index, requests[index])])

    try:
        engine.loop.run_until_complete(waves())
    except Exception as error:
        write("failed", wave=wave, error=f"{type(error).__name__}: {error}"[:500])


async def join(engine, joining: list[dict], requests: list[dict], sampling: dict) -> list[dict]:
    """Runs requests that start while others run, and aborts some of them."""
    ready = [asyncio.Event() for _ in joining]

    async def one(place: int, new: dict) -> dict:
        try:
            if new["waits_for"] is not None:
                await ready[new["waits_for"]].wait()
            chosen = sampling if new["is_sampled"] else GREEDY
            index, ends = new["index"], (new["abort_at"], ready[place])
            return await request(engine, "joining", place, index, requests[index], chosen, *ends)
        finally:
            ready[place].set()

    return await asyncio.gather(*(one(place, new) for place, new in enumerate(joining)))


async def request(
    engine, wave: str, place: int, index: int, wanted: dict, sampling=GREEDY, abort_at=None, ready=None
) -> dict:
    """Runs one request, and returns its tokens, its verification steps, what they accepted, and why it ended.

    abort_at: tokens after which it is aborted; 0: soon after it was sent. ready: is set when it has some tokens.
    """
    rid = f"{wave}-{place:04d}-"  # SGLang aborts all whose name begins with that of the aborted one
    parameters = sampling | {"max_new_tokens": wanted["max_new_tokens"], "ignore_eos": True}
    tokens, about, is_aborted = [], {}, abort_at == 0

    def abort() -> None:
        engine.tokenizer_manager.abort_request(rid=rid)

    if is_aborted:
        asyncio.get_running_loop().call_later(SOON_S, abort)
    outputs = await engine.async_generate(input_ids=wanted["prompt"], sampling_params=parameters, rid=rid, stream=True)
    try:
        async for output in outputs:
            about = output["meta_info"]
            if len(output["output_ids"]) >= len(tokens):  # all tokens so far, but for one that was aborted in the queue
                tokens = list(output["output_ids"])
            if ready is not None and len(tokens) >= READY_TOKENS:
                ready.set()
            if abort_at and not is_aborted and len(tokens) >= abort_at:
                is_aborted = True
                abort()
    except Exception:
        if not is_aborted:
            raise
    steps = about.get("spec_verify_ct") or 0
    is_cut = is_aborted and len(tokens) < wanted["max_new_tokens"]
    is_fixed = not sampling["temperature"]
    accepted = about.get("spec_accept_histogram") or []  # steps by how many drafts they accepted
    about = {"steps": steps, "accepted": accepted, "is_cut": is_cut, "is_fixed": is_fixed}
    return {"index": index, "tokens": tokens} | about
