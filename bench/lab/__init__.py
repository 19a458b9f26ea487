"""A laboratory on top of the public engine: on which models and prompts it is measured, and what is written down.

    python -m bench.lab.registry                                            pairs by name, and which cannot be run
    python -m bench.lab.loader --model gpt2 --dtype float16 --n-tokens 20   loads a model and tries it
    python -m bench.lab.prompts --tokenizer gpt2                            150 prompts of three domains
    python -m bench.run --app experiment --config bench/lab/configs/grid.yaml
    python -m bench.lab.ollama                                              is a server here, and what does it hold
    python -m bench.lab.train_head --target T --data F --output HEAD        trains an EAGLE-3 head for a target
    python -m bench.lab.train_demo_pair --output PAIR                       trains the embedded pair
    python -m bench.report --experiment experiment.jsonl --output report    its page and pictures

An experiment takes `loader.load_pair(name)` for its engine, `prompts.PromptDataset` for its prompts,
`config.BenchmarkConfig` for a cell, and `GenerationResult.from_stream(engine.stream(ids, n, **cell.stream_options()))`
for what came of it; `log.EventLog` keeps it, `log.read_events` finds what is done already.
"""
