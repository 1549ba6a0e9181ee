# `make help` lists the targets. Everything runs from .venv, which `make install` builds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINUTES ?= 10
# OpenMP threads that spin while they wait take the cores from the server under test.
export OMP_WAIT_POLICY ?= PASSIVE
PYTEST_FLAGS ?=
# Much of a live test is waiting, so two run at a time.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help install demo serve test check lint types unit instruction-sets live slow bench bench-peers bench-zipformer bench-gpu chaos format clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP) ## Make .venv with the server, the client and the tools, all pinned

# The pins are those of Python 3.11; other versions take what pyproject.toml allows.
IS_PINNED := $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info[:2] == (3, 11) else "")')
WANTED := $(if $(IS_PINNED),-r requirements/ci.txt,torch==2.13.0 setuptools triton '.[dev]')

$(STAMP): requirements/ci.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(WANTED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: install ## Start tritonserver, stream a WAV at real-time pace, show live captions, stop
	$(BIN)/python -m oasr_backend.serve.demo

serve: install ## Serve model_repository/ until Ctrl-C
	$(BIN)/oasr-serve

test: check instruction-sets live slow ## Everything that must pass: lint, types, all tests

check: lint types unit ## The fast loop: lint, types and the tests that need no server

lint: install ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

types: install ## mypy --strict on the package and the client
	MYPYPATH=client $(BIN)/mypy -p oasr_backend -p oasr_client

unit: install ## Tests that need no server; PYTEST_FLAGS are passed on, here and below
	$(PYTEST) -m "not live and not slow"

live: install ## Tests against live tritonservers
	$(PYTEST) -m "live and not slow"

slow: install ## The longest tests: chaos, long streams, kernels in the interpreter
	$(PYTEST) -m "slow"

instruction-sets: install ## The tests of numbers again, as on processors with other instructions and cores
	$(BIN)/python -m tests.instruction_sets

bench: install ## CPU benchmarks: engine, server, baseline; writes benchmarks/results/*.json
	$(BIN)/python -m benchmarks.run

bench-peers: install ## This machine beside sherpa-onnx, by turns; a quarter of an hour without other work
	$(BIN)/python -m benchmarks.peers

bench-zipformer: install ## A medium Zipformer on this machine's cores beside the PyPI package zipformer, by turns
	$(BIN)/pip install --quiet --no-deps zipformer==0.1.3
	$(BIN)/python -m benchmarks.zipformer_package --size medium --num-left-chunks 8

bench-gpu: install ## The same on a GPU machine; one device step, the steady state
	$(BIN)/python -m benchmarks.run --device cuda
	$(BIN)/python -m benchmarks.device_step --dtype float16
	$(BIN)/python -m benchmarks.device_step --family zipformer --num-left-chunks 8 --dtype float16
	$(BIN)/python -m benchmarks.slot_runtime --family zipformer --num-left-chunks 8 --dtype float16
	$(BIN)/python -m benchmarks.steady_state

chaos: install ## MINUTES=10: hostile clients against a live server; fails unless nothing leaks
	$(BIN)/python -m benchmarks.chaos --minutes $(MINUTES)

format: install ## Reformat the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv and caches
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
