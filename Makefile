.PHONY: check test test-gpu bench

check:  ## what a review would say first
	ruff check .
	ruff format --check .
	python -m pytest -q op_tests/test_architecture.py op_tests/test_mirror.py

test:  ## everything that runs without a GPU (kernels through Triton's interpreter); with one, everything
	python -m pytest -q op_tests

test-gpu:  ## refuses to pass by skipping
	python -c "import torch; assert torch.cuda.is_available(), 'no GPU that torch can use'"
	python -m pytest -q op_tests

bench:  ## make bench OP=build_tree
	python -m bench.run --op $(OP)
