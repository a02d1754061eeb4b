# `make demo` and `make test` are the whole set-up: each creates .venv if absent, installs the pinned packages, and runs.
PYTHON ?= python3
BIN := .venv/bin
ENGINE_TESTS := tests/kernels tests/specfold tests/test_structure.py

.PHONY: demo test lint format clean

demo: .venv/installed
	$(BIN)/python jobs/generate.py

# Two halves side by side: one computes, the other mostly waits for Ray. What the first one says comes last.
test: .venv/installed-dev
	@$(BIN)/python -m pytest $(ENGINE_TESTS) >.venv/engine-tests.log 2>&1 & engine=$$!; \
	$(BIN)/python -m pytest tests $(patsubst %,--ignore=%,$(ENGINE_TESTS)); jobs=$$?; \
	wait $$engine; engine=$$?; cat .venv/engine-tests.log; [ $$jobs = 0 ] && [ $$engine = 0 ]

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
