"""Sampling with a seed: the same text with and without a tree, alone and in a batch.

    pip install -e '.[models]' && python -m eagle_kernels.examples.seeds

Noise is keyed by the request's seed, the token's position and its id. So the token drawn at a position does not depend
on how many nodes were verified, or on what else is in the batch. In bf16 the target's logits depend a little on the
number of rows computed together, so two texts may diverge at a near-tie; here weights are fp32.
"""

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.loading import demo_pair

SEEDS = (1, 2, 1)


def main() -> None:
    """Prints three texts for one prompt; the first and the last have the same seed and are equal."""
    target, draft = demo_pair()
    engine = EAGLEInference.from_pretrained(draft, target, EAGLEConfig(topk=4, num_steps=4))
    prompt = engine.tokenizer.encode("def area(")
    seeds = list(SEEDS)

    trees, stats = engine.generate([prompt] * 3, 40, seeds=seeds, temperature=0.9, top_p=0.95)
    plain, _ = engine.generate([prompt] * 3, 40, seeds=seeds, temperature=0.9, top_p=0.95, speculative=False)
    alone, _ = engine.generate(prompt, 40, seeds=SEEDS[1], temperature=0.9, top_p=0.95)
    assert trees == plain and trees[1] == alone and trees[0] == trees[2] != trees[1]

    # the same through a server's calls, where requests come and go
    request = engine.submit(prompt, SamplingParams(seed=SEEDS[1], max_new_tokens=40, temperature=0.9, top_p=0.95))
    while engine.has_work:
        engine.step()
    assert request.output_ids == alone

    for seed, tokens in zip(SEEDS, trees):
        print(f"seed {seed}: {engine.tokenizer.decode(tokens)!r}")
    print(f"{stats.mean_accept_length:.2f} tokens a step, and the text of plain decoding")


if __name__ == "__main__":
    main()
