# Commands for contributors; see CONTRIBUTING.md.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv unit test matrix lint format docs docs-serve docs-browser

venv: $(BIN)/pytest

$(BIN)/pytest: setup.cfg
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -e '.[test]'
	touch $@

unit: venv
	$(BIN)/python -m pytest -m unit -n 2

test: venv
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --instafail

# All supported versions, each in an environment of its own; noxfile.py has more commands.
matrix: venv
	$(BIN)/pip install -q 'nox[uv]'
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/nox

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	.ci/types $(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The packages of the site only: it is built from the sources, without TensorFlow.
.docs-venv/bin/mkdocs: setup.cfg
	$(PYTHON) -m venv .docs-venv
	.docs-venv/bin/pip install -q $$(sed -n '/^docs =/,/^[a-z]* =/s/^    \([a-z].*\)/\1/p' setup.cfg)
	touch $@

docs: .docs-venv/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 $< build --strict

# Needs Chromium.
docs-browser: docs
	.docs-venv/bin/pip install -q 'playwright>=1.40,<2'
	.docs-venv/bin/python docs/check_in_browser.py

docs-serve: .docs-venv/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 $< serve
