# One command each: `make demo`, `make test`, `make check`. Everything is installed into .venv and nowhere else.

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that runs and is new enough; a name on PATH may be a shim without a version behind it.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; \
	done)
# Test processes, each with one thread of the tensor library: two pools of threads on the same cores slow each other down.
WORKERS ?= auto
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## install, pull the embedded model, show what the prompt cache saves
	$(BIN)/kvist pull smollm2-135m
	$(BIN)/kvist demo $(ARGS)

test: $(VENV)/.installed-test ## install, pull the embedded model, run all tests but the slow ones
	$(BIN)/kvist pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-test ## run the soaks that take minutes
	$(BIN)/kvist pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.installed-dev ## format, lint, types, layers, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.installed-dev ## lay the code out, and fix what can be fixed safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-test ## measure what the control plane costs
	$(BIN)/python benchmarks/control_plane.py $(ARGS)

clean: ## remove the virtual environment and everything that was built; pulled models stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv and ensurepip on PATH; install one (on Debian: python3 python3-venv), or set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than Python 3.11; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A finished installation leaves a stamp, so that the next run starts at once; a changed pyproject.toml renews it.
# --no-compile: thousands of modules of torch and transformers are never imported, and compiling them takes a minute.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python tools/check_torch.py
	$(BIN)/python -m pip install --no-compile --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[test]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $@
