# Every target sets up .venv by itself, once; it is rebuilt when its inputs change.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

setup: $(READY)  ## create .venv and install everything

demo: $(READY)  ## baseline against reuse on the embedded model, about a minute
	@$(BIN)/kvboost demo

check: $(READY)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## check, then every test
	$(BIN)/pytest

format: $(READY)  ## rewrite files the way check wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## time to first token against stock transformers
	@$(BIN)/kvboost bench ttft

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
