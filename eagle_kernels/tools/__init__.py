"""L4, what a person runs: the command line, drawings of trees, inspection, benchmarks and measurements."""
