# `make demo` and `make test` are the whole set-up: each creates .venv if absent, installs the pinned packages, and runs.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
ENGINE_TESTS := tests/kernels tests/specfold tests/test_structure.py
# Commands as people give them, on a Ray of their own or on a running head.
COMMAND_TESTS := tests/jobs tests/cluster/evaluation $(wildcard tests/cluster/test_remote_*.py) \
  $(patsubst %,tests/cluster/test_%.py,examples live_metrics submit)

.PHONY: demo test lint format clean

demo: .venv/installed
	$(BIN)/python jobs/generate.py

# Three parts side by side: one computes, the others mostly wait for Ray. What the first ones say comes last.
test: .venv/installed-dev
	@$(PYTEST) $(ENGINE_TESTS) >.venv/engine-tests.log 2>&1 & engine=$$!; \
	$(PYTEST) $(COMMAND_TESTS) >.venv/command-tests.log 2>&1 & commands=$$!; \
	$(PYTEST) tests $(patsubst %,--ignore=%,$(ENGINE_TESTS) $(COMMAND_TESTS)); cluster=$$?; \
	wait $$engine; engine=$$?; wait $$commands; commands=$$?; cat .venv/engine-tests.log .venv/command-tests.log; \
	[ $$cluster = 0 ] && [ $$engine = 0 ] && [ $$commands = 0 ]

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
