.PHONY: check test test-gpu bench

check:  ## what a review would say first
	ruff check .
	ruff format --check .
	python -m pytest -q op_tests/test_architecture.py op_tests/test_mirror.py

test:  ## everything that runs without a GPU (kernels through Triton's interpreter); with one, everything
	python -m pytest -q op_tests

test-gpu:  ## everything on the GPU, full crosses too; refuses to pass by skipping; pytest-xdist, if there, saves an hour
	python -c "import torch; assert torch.cuda.is_available(), 'no GPU that torch can use'"
	python -m pytest -q op_tests $(shell python -c "import xdist" 2>/dev/null && echo "-n 12")

bench:  ## make bench OP=build_tree
	python -m bench.run --op $(OP)
