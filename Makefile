# `make demo` and `make test` set everything up in .venv; a second run installs nothing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test lint bench bench-ciar bench-csd protos clean
help:
	@echo 'make demo    draw one picture with a verifier and a device on this machine'
	@echo 'make test    lint, types and the whole test suite'
	@echo 'make bench   the speed figures of the README, as ratios from one run'
	@echo 'make bench-ciar   speed and quality of method ciar, by mode, link, score and budget'
	@echo 'make bench-csd    passes and quality of methods sjd and csd, by rule'
	@echo 'make protos  generate the gRPC stubs again'
	@echo 'make clean   remove the virtual environment and caches'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cloud: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[cloud]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.cloud

demo: $(VENV)/.cloud
	$(BIN)/python -m benchmarks.demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m protos.generate --check

test: lint
	$(BIN)/python -m pytest

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.speed

bench-ciar: $(VENV)/.dev
	$(BIN)/python -m benchmarks.ciar

bench-csd: $(VENV)/.dev
	$(BIN)/python -m benchmarks.csd

protos: $(VENV)/.dev
	$(BIN)/python -m protos.generate

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
