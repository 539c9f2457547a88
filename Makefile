# Commands for contributors; see CONTRIBUTING.md.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv unit test lint format

venv: $(BIN)/pytest

$(BIN)/pytest: setup.cfg
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -e '.[test]'
	touch $@

unit: venv
	$(BIN)/python -m pytest -m unit -n 2

test: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --instafail

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	.ci/types $(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
