.PHONY: check test test-gpu mutants bench

check:  ## what a review would say first
	ruff check .
	ruff format --check .
	python -m pytest -q op_tests/test_architecture.py op_tests/test_mirror.py

test:  ## everything that runs without a GPU (kernels through Triton's interpreter); with one, everything
	python -m pytest -q op_tests

JOBS ?= 8
test-gpu:  ## everything on the GPU, full crosses too; refuses to start without one; with pytest-xdist on JOBS cores
	python -c "import torch; assert torch.cuda.is_available(), 'no GPU that torch can use'"
	python -m pytest -q op_tests $(shell python -c "import xdist" 2>/dev/null && echo "-n $(JOBS) --dist worksteal")

mutants:  ## bugs planted in kernel and reference alike, each of which a law test must catch
	python -m op_tests.mutants

bench:  ## make bench OP=build_tree
	python -m bench.run --op $(OP)
