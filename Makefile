# `make demo` and `make test` do their own set-up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# For the environment in which pip builds the package, too; newer versions of pip read the second variable there.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
# Tests start some dozens of Python processes, which share compiled modules also where the environment turns that off.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all gpu-test lint docs wheel-check clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -n 2 -m "not long"

test-all: lint
	$(BIN)/python -m pytest -n 2

# On a machine with a GPU: the laws of the kernels, and all cells against the CPU. Takes the torch that is installed there.
gpu-test:
	TRITON_INTERPRET=0 PYTHONPATH=src $(PYTHON) -m pytest tests/gpu tests/layers/test_device.py

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The documentation, into site/. Fails on a dead link, a missing image and a public name without an entry in the reference.
docs: .venv/ready
	$(BIN)/python tools/build_site.py

# The wheel is pure Python, installs into an empty environment, and runs there.
wheel-check: .venv/ready
	rm -rf dist .wheel-venv
	$(BIN)/pip wheel -q --no-deps --wheel-dir dist .
	$(PYTHON) -m venv .wheel-venv
	.wheel-venv/bin/pip install -q -c constraints.txt dist/*.whl
	cd "$$(mktemp -d)" && $(CURDIR)/.wheel-venv/bin/python -W error -c "import torch, unfading; \
	out, state = unfading.STAR(3, 5)(torch.randn(7, 2, 3)); assert out.shape == (7, 2, 5), out.shape; \
	print('wheel', unfading.__version__, 'runs')"
	.wheel-venv/bin/unfading cells list --json > /dev/null
	rm -rf .wheel-venv

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e ".[dev,docs]"
	touch $@

clean:
	rm -rf .venv .wheel-venv dist site .cache
