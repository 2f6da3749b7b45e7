# Evolving Infra. `make help` lists every verb. All set-up happens in .venv, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml setup.py scripts/setup constraints/cpu.txt $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-cluster lint bench clean

help:   ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install into it (the other verbs do this themselves)

$(STAMP): $(SOURCES)
	@PYTHON="$(PYTHON)" scripts/setup $(VENV)
	@touch $@

demo: $(STAMP) ## start a 3-node cluster here, replay real agent traces, print the report
	@$(BIN)/evolving-infra demo

test: $(STAMP) ## run the tests
	@$(BIN)/python -m pytest -q -m "not cluster"

test-cluster: $(STAMP) ## run the slower tests, which start real clusters
	@$(BIN)/python -m pytest -q -m cluster

lint: $(STAMP) ## ruff, mypy --strict on the pure parts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy --strict evolving_infra/control evolving_infra/types.py evolving_infra/errors.py
	@$(BIN)/mypy evolving_infra

bench: $(STAMP) ## run the benchmarks, one table each
	@for name in eviction; do $(BIN)/python -m benchmarks $$name || exit 1; done

clean:  ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info evolving_infra/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
