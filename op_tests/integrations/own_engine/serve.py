"""Serves rounds of requests with SGLang's engine: the script that test_sglang_engine.py runs in a process of its own.

    python serve.py ORDER RESULT

ORDER is a JSON file: `engine`, the arguments of `sglang.Engine`, and `rounds`, lists of (prompt, sampling parameters)
that are sent together. RESULT has a record of each request of each round: `tokens`, and `logprobs` of them.
"""

import json
import sys


def main(order_file: str, result_file: str) -> None:
    """Runs the order."""
    import sglang

    with open(order_file, encoding="utf-8") as file:
        order = json.load(file)
    engine, found = sglang.Engine(**order["engine"]), []
    for requests in order["rounds"]:
        prompts, parameters = zip(*requests)
        outputs = engine.generate(input_ids=list(prompts), sampling_params=list(parameters), return_logprob=True)
        found.append(
            [
                {
                    "tokens": output["output_ids"],
                    "logprobs": [value for value, *_ in output["meta_info"]["output_token_logprobs"]],
                    "steps": output["meta_info"].get("spec_verify_ct") or 0,
                }
                for output in outputs
            ]
        )
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump(found, file)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
