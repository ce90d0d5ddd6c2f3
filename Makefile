# Everything is run from here, by people and by .ci/run alike.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
TESTS  ?= tests/unit tests/contracts tests/system
ARGS   ?=
BENCHES ?= microbatch dp_balance train_step train_throughput memory streams generation async_vs_sync

# One thread per process: the processes are the parallelism, here as in a run.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup run test lint format docs bench clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## make .venv with the pinned dependencies and realsys itself (once)

$(STAMP): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make setup PYTHON=python3.11")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

run: setup  ## train the small model of experiment=arith on this machine; ARGS="train.total_steps=10" changes it
	$(VENV)/bin/realsys run experiment=arith $(ARGS)

test: setup  ## unit, contract and system tests; the end lists what was skipped and why, and the slowest
	$(PY) -m pytest $(TESTS) -ra --durations=15 $(ARGS)

lint: setup  ## style, format, types, and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: setup  ## rewrite the code in the project's format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: setup  ## rewrite the field tables in docs/configuration.md from the schema
	$(PY) -m realsys.config.reference

bench: setup  ## run every benchmark; results go to benchmarks/results/
	@set -e; for name in $(BENCHES); do echo "== $$name"; $(PY) -m benchmarks.$$name; done

clean:  ## remove caches and build products; .venv and runs/ stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
