# SPDX-License-Identifier: Apache-2.0
#
# Every target works in a fresh checkout with nothing but python3 and a C++ compiler: the first one
# makes .venv, and later ones install again only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
INSTALLED := .venv/.installed
PEERS := .venv/.peers
VENV_PYTHON := .venv/bin/python
CXX_FILES := csrc/*.cpp csrc/*.h csrc/cuda/*.cu csrc/cuda/*.h tests/*.cpp

# DeepSpeed builds its ops with the ninja on PATH, and pip puts it into .venv/bin.
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH" $(VENV_PYTHON)

# Prints the Debian packages to install, a line each; nothing if none is missing.
MISSING = command -v $(PYTHON) >/dev/null || echo python3; \
  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv; \
  $(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
    2>/dev/null || echo python3-dev; \
  command -v $${CXX:-c++} >/dev/null || echo g++; \
  test -e /usr/include/libaio.h || echo libaio-dev

.PHONY: help setup train bench gpu-check test test-slow test-full lint missing-packages

help:
	@echo "make train      train a small GPT with fp32 AdamW and with Adam8bitBlockwise, and compare;"
	@echo "                takes STEPS, RANKS, CONFIG, DATA, OUT, SEED: see launch/local.sh"
	@echo "make bench      time the step against other optimizers; writes OUT (runs/bench_step.json)"
	@echo "                and a table and a figure beside it"
	@echo "make gpu-check  on a machine with a GPU: tests, training, times, compute-sanitizer; under 10"
	@echo "                minutes; with GPU_PYTHON=python3 by that Python, and nothing is installed"
	@echo "make test       run the quick tests: minutes"
	@echo "make test-slow  run the others: trainings, measurements, every mode of ZeRO"
	@echo "make test-full  run both"
	@echo "make lint       check style, without changing anything"
	@echo "make setup      only make .venv"

setup: $(INSTALLED)

train: $(INSTALLED)
	PYTHON=$(VENV_PYTHON) launch/local.sh

bench: $(INSTALLED)
	$(RUN) -m zero8.cli bench step --json $(or $(OUT),runs/bench_step.json)

# Of a machine without a network: a Python that has torch with CUDA, and all else, already.
gpu-check: $(if $(GPU_PYTHON),,$(PEERS))
	$(or $(GPU_PYTHON),$(RUN)) -m zero8.bench.gpu_check

# Two files at a time, as most tests use one core; long files before those of ranks, which are short
# and stand last in the alphabet.  Threads that wait leave their core to the other file.
PYTEST := OMP_WAIT_POLICY=passive $(RUN) -m pytest
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST) -m "not slow" $(TWO_FILES)

test-slow: $(INSTALLED)
	$(PYTEST) -m slow $(TWO_FILES)

test-full: test test-slow

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	.venv/bin/clang-format --style=file:csrc/.clang-format --dry-run --Werror $(CXX_FILES)

missing-packages:
	@$(MISSING)

# torch is pinned in constraints.txt: pip takes its CPU build where a folder or index offers one.
$(INSTALLED): pyproject.toml constraints.txt
	@missing=$$({ $(MISSING); } | xargs); test -z "$$missing" || { \
	  echo "zero8: missing on this machine; as root: apt-get install $$missing" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "zero8: expected Python 3.10 or newer, got $$($(PYTHON) --version);" \
	    "set one: make PYTHON=python3.11" >&2; exit 1; }
	@case "$(CURDIR)" in *" "*) echo "zero8: got a path with a space, '$(CURDIR)': torch cannot" \
	  "link extensions there; move the checkout" >&2; exit 1;; esac
	$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(VENV_PYTHON) -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

# The optimizers that `zero8 bench step` compares with.
$(PEERS): $(INSTALLED)
	$(VENV_PYTHON) -m pip install -c constraints.txt -e '.[peers]'
	@touch $@
