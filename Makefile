.PHONY: check test test-slow test-gpu smoke mutants bench

check:  ## what a review would say first
	ruff check .
	ruff format --check .
	python -m pytest -q op_tests/test_architecture.py op_tests/test_mirror.py

test:  ## what is quick without a GPU (kernels through Triton's interpreter); with one, everything
	python -m pytest -q -n auto --dist worksteal op_tests

test-slow:  ## what takes long without a GPU, too
	python -m pytest -q -n auto --dist worksteal --slow op_tests

JOBS ?= 8
test-gpu:  ## everything on the GPU, full crosses too; refuses to start without one
	python -c "import torch; assert torch.cuda.is_available(), 'no GPU that torch can use'"
	python -m pytest -q -n $(JOBS) --dist worksteal op_tests

smoke:  ## the first case of each test of an op with other versions of triton: make smoke TRITON="3.4.0 3.6.0"
	python -m op_tests.versions $(TRITON)

mutants:  ## bugs planted one by one, each of which a test of the short suite must catch
	python -m op_tests.mutants

bench:  ## make bench OP=build_tree
	python -m bench.run --op $(OP)
