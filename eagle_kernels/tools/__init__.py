"""L4, what a person runs: the command line, drawings of trees, training, inspection, benchmarks and measurements."""
