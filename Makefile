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
.PHONY: help demo test test-slow test-native-asan test-native-emulated native check check-native format bench clean

NATIVE_SOURCES := CMakeLists.txt $(wildcard native/src/* native/include/kvist/*)
# One build folder for all editable installations: what did not change is not compiled again. Without isolation, since
# the headers of nanobind must stay where they were.
INSTALL := $(BIN)/python -m pip install --no-compile --no-build-isolation --config-settings build-dir=build/native --editable
CMAKE := PATH="$(abspath $(BIN)):$$PATH" cmake
CONFIGURE := $(CMAKE) -S . -G Ninja -DPython_EXECUTABLE="$(abspath $(BIN))/python"
# The build under the sanitizers, and beside it the Python files it is tested with.
ASAN := build/native-asan
# The same for instruction sets that the CPU lacks.
EMULATED := build/native-emulated

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.native ## install, pull the embedded model, show what the prompt cache saves
	$(BIN)/kvist pull smollm2-135m
	$(BIN)/kvist demo $(ARGS)

test: $(VENV)/.installed-test $(VENV)/.native ## install, pull the embedded model, run all tests but the slow ones
	$(BIN)/kvist pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-test $(VENV)/.native ## run the soaks that take minutes
	$(BIN)/kvist pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

test-native-asan: $(VENV)/.installed-test ## run the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(CONFIGURE) -B $(ASAN) -DKVIST_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(CMAKE) --build $(ASAN)
	rm -rf $(ASAN)/package && mkdir $(ASAN)/package
	cp -rs "$(CURDIR)/src/kvist" $(ASAN)/package && cp --remove-destination $(ASAN)/_native*.so $(ASAN)/package/kvist
	# --capture=sys: the report of a sanitizer is written past Python.
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PYTHONPATH=$(ASAN)/package \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -p no:cacheprovider --capture=sys tests/native $(ARGS)

test-native-emulated: $(VENV)/.installed-test ## run the native tests for AVX-512 and NEON on an x86 CPU without them, through SIMDe
	@echo '#include <simde/x86/avx512.h>' | $(CXX) -E -x c++ - -o /dev/null || { echo "make: SIMDe is not installed (on Debian: libsimde-dev)" >&2; exit 1; }
	$(CONFIGURE) -B $(EMULATED) "-DKVIST_EMULATE=avx512;neon"
	$(CMAKE) --build $(EMULATED)
	rm -rf $(EMULATED)/package && mkdir $(EMULATED)/package
	cp -rs "$(CURDIR)/src/kvist" $(EMULATED)/package && cp --remove-destination $(EMULATED)/_native*.so $(EMULATED)/package/kvist
	PYTHONPATH=$(EMULATED)/package OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 -p no:cacheprovider tests/native -k "not avx2 and not serial" $(ARGS)

native: $(VENV)/.native ## build the native kernels into src/kvist, after a change to native/

check: check-native $(VENV)/.installed-dev ## format, lint, types, layers, spelling, warnings of the C++ compiler
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

check-native: $(VENV)/.installed-dev
	$(BIN)/clang-format --dry-run --Werror $(filter native/%,$(NATIVE_SOURCES))
	$(CONFIGURE) -B build/native-check -DKVIST_WERROR=ON
	$(CMAKE) --build build/native-check

format: $(VENV)/.installed-dev ## lay the code out, and fix what can be fixed safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(filter native/%,$(NATIVE_SOURCES))

bench: $(VENV)/.installed-test $(VENV)/.native ## measure what the control plane costs
	$(BIN)/python benchmarks/control_plane.py $(ARGS)

clean: ## remove the virtual environment and everything that was built; pulled models stay
	rm -rf $(VENV) build dist src/kvist/_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv and ensurepip on PATH; install one (on Debian: python3 python3-venv), or set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than Python 3.11; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A finished installation leaves a stamp, so that the next run starts at once; a changed pyproject.toml renews it.
# --no-compile: thousands of modules of torch and transformers are never imported, and compiling them takes a minute.
$(VENV)/.installed: pyproject.toml tools/build_requirements.py | $(BIN)/python
	$(BIN)/python tools/check_torch.py
	$(BIN)/python tools/build_requirements.py | $(BIN)/python -m pip install --quiet --requirement /dev/stdin
	$(INSTALL) .
	$(BIN)/kvist --version
	touch $(VENV)/.native $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed | $(BIN)/python
	$(INSTALL) '.[test]' --quiet
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed | $(BIN)/python
	$(INSTALL) '.[dev]' --quiet
	touch $@

# The installation has built the kernels; after that, only what changed. Its build folder is unfinished where there was
# no compiler, and then there is nothing to keep up to date.
$(VENV)/.native: $(NATIVE_SOURCES) | $(VENV)/.installed
	@test ! -f build/native/build.ninja || { set -x; $(CMAKE) --build build/native; }
	touch $@
