# SPDX-License-Identifier: Apache-2.0
#
# Every target works as the first command in a fresh checkout: it installs the Debian packages that
# are missing, makes .venv and installs into it what the target needs.  Later calls install again
# only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
CXX_FILES := csrc/*.cpp csrc/*.h csrc/cuda/*.cu csrc/cuda/*.h tests/support/*.cpp

# .venv/.NAME says that the extra NAME of pyproject.toml is installed; `test` and `dev` have others
# in them.
IN_test := train bench
IN_dev := test docs $(IN_test)
IN_integrations := test torchao $(IN_test)

# DeepSpeed builds its ops with the ninja on PATH, and pip puts it into .venv/bin.
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH" $(VENV_PYTHON)

# Prints the Debian packages to install, a line each; nothing if none is missing.
MISSING = command -v $(PYTHON) >/dev/null || echo python3; \
  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv; \
  $(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
    2>/dev/null || echo python3-dev; \
  command -v $${CXX:-c++} >/dev/null || echo g++

# Installs them for root, and for whoever needs no password for sudo; tells others what is missing.
INSTALL_MISSING = missing=$$({ $(MISSING); } | xargs); \
  as_root=$$(test "$$(id -u)" = 0 || echo sudo -n); \
  if test -n "$$missing" && command -v apt-get >/dev/null && $$as_root true 2>/dev/null; then \
    echo "zero8: missing on this machine, now installed: $$missing"; \
    $$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive \
      apt-get install -qq -y --no-install-recommends $$missing; \
    missing=$$({ $(MISSING); } | xargs); \
  fi; \
  test -z "$$missing" || { \
    echo "zero8: missing on this machine; as root: apt-get install $$missing" >&2; exit 1; }

.PHONY: help setup train bench fidelity maps mutate gpu-check gpu-train test test-slow test-nightly \
  test-multinode test-integrations test-full test-sanitizers arm-check fuzz fuzz-kernel soak lint \
  docs wheel wheel-aarch64
.NOTPARALLEL:

help:
	@echo "make train      train a small GPT with fp32 AdamW and with Adam8bitBlockwise, and compare;"
	@echo "                takes MODEL, STEPS, RANKS, CONFIG, DATA, OUT, SEED: see launch/local.sh;"
	@echo "                with ENGINE=fsdp2 under PyTorch's FSDP2 instead of DeepSpeed; with OPTIMIZER="
	@echo "                Lion8bitBlockwise, SGD8bitBlockwise or Muon8bitBlockwise with these and their"
	@echo "                fp32 twins; with CODEC=log6, dynamic, fp8 or linear4 with states in these"
	@echo "                codes, under either engine; with WEIGHTS=int8 with torchao's INT8 weights"
	@echo "                under FSDP2"
	@echo "make bench      time the step against other optimizers; writes OUT (runs/bench_step.json)"
	@echo "                and a table beside it"
	@echo "make fidelity   measure how far Adam's codecs are from fp32, in a quarter of an hour; writes OUT"
	@echo "                (runs/fidelity_quick.json) and a table beside it; with FULL=1 every algorithm,"
	@echo "                codec and task, in an hour"
	@echo "make maps       compare the maps of the 8-bit optimizers paper with log, in some minutes; writes"
	@echo "                OUT (runs/maps.json), tables and figures beside it"
	@echo "make gpu-check  on a machine with a GPU: tests, training, times, compute-sanitizer; PARTS are"
	@echo "                those to run; with GPU_PYTHON=python3 by that Python, which installs nothing"
	@echo "make gpu-train  train a GPT of 1.2 G parameters there, under ZeRO-2 and under FSDP2, with its"
	@echo "                optimizer states in host memory, as make train"
	@echo "make arm-check  on an ARM host: the quick tests, all of the kernel, and times; what it writes"
	@echo "                into runs/arm is to be sent back: see docs/processors.md"
	@echo "make test       run the quick tests: minutes"
	@echo "make test-slow  run more: every mode of ZeRO, FSDP2 and NVMe, all conversions"
	@echo "make test-nightly  run what compiles or trains for minutes: sanitizers, emulated ARM,"
	@echo "                trainings, every recipe, thousands of damaged files"
	@echo "make test-multinode  run those on several hosts, in network namespaces; needs root"
	@echo "make test-integrations  run those with Hugging Face's packages, Lightning, torchtitan"
	@echo "make test-full  run all five"
	@echo "make test-sanitizers  of the slow ones those with the compiler's sanitizers"
	@echo "make fuzz       damage checkpoints in CASES (3000) ways, from the one with number FIRST (0)"
	@echo "                on, and load them; prints what went wrong, and how to see it again"
	@echo "make fuzz-kernel  step over CASES (3000) random segments on every instruction set, and"
	@echo "                compare the bits with those of the reference"
	@echo "make mutate     break PLACES (100) places of the code drawn by SEED (0), one at a time, and"
	@echo "                see whether a test fails; prints the coverage of lines, too; hours"
	@echo "make soak       kill trainings KILLS (100) times, and compare them with undisturbed ones"
	@echo "make lint       check style and types, without changing anything"
	@echo "make docs       make runs/site/index.html of the documentation, with an API reference"
	@echo "make wheel      make dist/: the wheels of x86-64 and aarch64, and the source distribution"
	@echo "make setup      only install what CI needs"

setup: .venv/.dev

train: .venv/.train $(if $(filter int8,$(WEIGHTS)),.venv/.torchao)
	PYTHON=$(VENV_PYTHON) launch/local.sh

bench: .venv/.bench
	$(RUN) -m benchmarks.step --json $(or $(OUT),runs/bench_step.json)

FIDELITY_OUT = $(or $(OUT),runs/fidelity_$(if $(FULL),full,quick).json)
fidelity: .venv/.bench
	$(RUN) -m benchmarks.fidelity $(if $(FULL),,--quick )--json $(FIDELITY_OUT)

maps: .venv/.bench
	$(RUN) -m benchmarks.maps --json $(or $(OUT),runs/maps.json)

# On a machine without a network: with a Python that has torch with CUDA, and all else, already.
gpu-check: $(if $(GPU_PYTHON),,.venv/.dev .venv/.peers)
	$(or $(GPU_PYTHON),$(RUN)) -m benchmarks.gpu_check$(if $(PARTS), --parts $(PARTS))

gpu-train: $(if $(GPU_PYTHON),,.venv/.train)
	PYTHON=$(or $(GPU_PYTHON),$(VENV_PYTHON)) MODEL=1b STEPS=50 OUT=runs/gpu_zero2 \
	  CONFIG=configs/gpu/zero2_offload_1b.json launch/local.sh
	PYTHON=$(or $(GPU_PYTHON),$(VENV_PYTHON)) MODEL=1b STEPS=50 OUT=runs/gpu_fsdp2 ENGINE=fsdp2 \
	  CONFIG=configs/gpu/fsdp2_offload_1b.toml launch/local.sh

# Two files at a time, as most tests use one core, in the order of tests/conftest.py.  Threads that
# wait leave their core to the other file.
PYTEST := OMP_WAIT_POLICY=passive $(RUN) -m pytest
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder
# Within tests, which have time limits, ranks would wait for it.
BUILD := $(RUN) -c 'from zero8.op import build; build.load()'
# And DeepSpeed's AdamW beside it.  By another name of the compiler, ranks would build it again.
BUILD_ADAMW := PATH="$(CURDIR)/tests/support/quick_cxx:$(CURDIR)/.venv/bin:$$PATH" \
  $(VENV_PYTHON) -m examples.gpt --build --optimizer AdamW

test: .venv/.test
	$(BUILD) & ours=$$!; $(BUILD_ADAMW) && wait $$ours
	$(PYTEST) -m "not slow and not multinode and not integrations" $(TWO_FILES)

test-slow: .venv/.test
	$(BUILD) && $(BUILD_ADAMW)
	$(PYTEST) -m "slow and not nightly" $(TWO_FILES)

test-nightly: .venv/.test
	$(BUILD) && $(BUILD_ADAMW)
	$(PYTEST) -m nightly $(TWO_FILES)

# Three tests at a time, each on two hosts of its own; they wait more than they compute.
test-multinode: .venv/.test
	$(BUILD)
	$(PYTEST) tests/multinode -m multinode -n 3 --dist worksteal

# Last of all: what it installs, every process that imports DeepSpeed imports, too.
test-integrations: .venv/.integrations
	$(BUILD)
	$(PYTEST) tests/integrations -m integrations $(TWO_FILES)

test-full: test test-slow test-nightly test-multinode test-integrations

# Times first: they are worth having where a test fails, too.
ARM_OUT = runs/arm
arm-check: .venv/.dev
	@test "$$(uname -m)" = aarch64 || \
	  { echo "zero8: arm-check: got a machine of $$(uname -m), expected aarch64" >&2; exit 1; }
	mkdir -p $(ARM_OUT)
	lscpu > $(ARM_OUT)/lscpu.txt
	$(BUILD) & ours=$$!; $(BUILD_ADAMW) && wait $$ours
	$(RUN) -m benchmarks.step --json $(ARM_OUT)/step.json
	$(PYTEST) -m "not slow and not multinode and not integrations" $(TWO_FILES)
	$(PYTEST) tests/kernel/test_codec_maps.py tests/kernel/test_csrc.py -m slow

test-sanitizers: .venv/.test
	$(PYTEST) tests/kernel/test_sanitized.py tests/kernel/test_thread_sanitizer.py -k sanitizer

fuzz: .venv/.test
	$(BUILD)
	PYTHONPATH=.:tests/support $(RUN) tests/support/mutations.py $(or $(CASES),3000) \
	  --first $(or $(FIRST),0)

fuzz-kernel: .venv/.test
	$(BUILD)
	PYTHONPATH=.:tests/support $(RUN) tests/kernel/test_random_steps.py $(or $(CASES),3000) \
	  --first $(or $(FIRST),0)

# In a clean checkout, which it changes and changes back.
mutate: .venv/.test
	git diff --quiet
	$(BUILD) && $(BUILD_ADAMW)
	$(RUN) tests/mutate.py cover
	$(RUN) tests/mutate.py kill --places $(or $(PLACES),100) --seed $(or $(SEED),0) \
	  $(if $(BESIDE),--beside $(BESIDE))

soak: .venv/.test
	$(BUILD) && $(BUILD_ADAMW)
	OMP_NUM_THREADS=1 $(RUN) tests/soak.py --kills $(or $(KILLS),100) --seed $(or $(SEED),0)

TIDY := .venv/bin/clang-tidy --quiet
PRINT_INCLUDE := import sysconfig; print(sysconfig.get_path("include"))

lint: .venv/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	.venv/bin/clang-format --style=file:csrc/.clang-format --dry-run --Werror $(CXX_FILES)
	$(TIDY) csrc/*.cpp -- -std=c++17 -isystem $$($(VENV_PYTHON) -c '$(PRINT_INCLUDE)')

# A broken link, or a docstring that does not fit its signature, is an error.
docs: .venv/.docs
	$(RUN) -m mkdocs build --strict

# The binary of aarch64 is Debian's cross compiler's, g++-aarch64-linux-gnu.  In an environment of its
# own a build would get CMake for aarch64, too.  auditwheel names the oldest glibc that a wheel runs
# with.
WHEELS := build/wheels
BUILD_WHEEL = $(RUN) -m build --no-isolation --outdir $(WHEELS)
wheel: .venv/.wheel
	rm -rf $(WHEELS) dist
	$(BUILD_WHEEL) --sdist
	$(BUILD_WHEEL) --wheel
	$(MAKE) wheel-aarch64
	$(RUN) -m auditwheel repair --wheel-dir dist $(WHEELS)/*.whl
	mv $(WHEELS)/*.tar.gz dist

# VENV_PYTHON needs the tools of .venv/.wheel, which `wheel` installs; a test has its own.
wheel-aarch64:
	CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 \
	  CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64" $(BUILD_WHEEL) --wheel

# Where it is set, every process would compile torch and DeepSpeed to bytecode anew.
export PYTHONDONTWRITEBYTECODE :=

# Compiling every module to bytecode would double the time; Python does it at first import.
PIP_INSTALL := $(VENV_PYTHON) -m pip install --no-compile -c constraints.txt

.venv/.integrations: pyproject.toml constraints.txt | .venv/.made
	$(PIP_INSTALL) -e '.[integrations]'
	$(PIP_INSTALL) --no-deps torchtitan==0.3.0 axolotl==0.19.0 llamafactory==0.9.5 \
	  ms-swift==4.6.0 verl==0.9.1
	@touch $@ $(IN_integrations:%=.venv/.%)

.venv/.%: pyproject.toml constraints.txt | .venv/.made
	$(PIP_INSTALL) -e '.[$*]'
	@touch $@ $(IN_$*:%=.venv/.%)

.venv/.made:
	@$(INSTALL_MISSING)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "zero8: expected Python 3.11 or newer, got $$($(PYTHON) --version);" \
	    "set one: make PYTHON=python3.11" >&2; exit 1; }
	@case "$(CURDIR)" in *" "*) echo "zero8: got a path with a space, '$(CURDIR)': torch cannot" \
	  "link extensions there; move the checkout" >&2; exit 1;; esac
	$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@touch $@
