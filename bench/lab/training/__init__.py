"""The parts of `bench.lab.train_head` and `bench.lab.train_demo_pair`: data, recipes, losses, one loop, records."""
