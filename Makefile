# ARGS goes to the command (`gateway up`, pytest, the bench), ENGINE_ARGS to vLLM.
# PYTHON=python3.12, DEVICE=cpu|cuda and GATEWAY_TORCH_INDEX steer the install: deploy/README.md.
SHELL := /bin/bash
VENV := .venv
MODEL_NAME := SmolLM2-135M-Instruct
MODEL := .models/$(MODEL_NAME)
VLLM ?= 0.28.0
ENGINE_VENV := .venv-engine-$(VLLM)
.DEFAULT_GOAL := help
.PHONY: help up test unit lint bench test-engine venv model tools clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 20

up: model ## two vLLM workers (one per GPU, if there are any) and the gateway on port 8000
	@exec $(VENV)/bin/gateway up "$$PWD/$(MODEL)" $(ARGS) -- --served-model-name $(MODEL_NAME) $(ENGINE_ARGS)

test: tools model lint ## lint and every test, real vLLM included
	@exec $(VENV)/bin/pytest $(ARGS)

unit: venv ## the quick tests
	@exec $(VENV)/bin/pytest tests/unit $(ARGS)

lint: venv ## ruff and mypy
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy

bench: model ## side-by-side measurements, also as JSON in build/bench.json
	@deploy/test-tools.sh wrk:wrk
	@exec $(VENV)/bin/python tests/bench/run.py $(ARGS)

test-engine: ## contract and engine tests on another vLLM: make test-engine VLLM=0.28.0
	@deploy/venv.sh $(ENGINE_VENV) cpu-$(VLLM)
	@$(ENGINE_VENV)/bin/python deploy/model.py $(MODEL)
	@exec $(ENGINE_VENV)/bin/pytest tests/contract tests/engine $(ARGS)

venv:
	@deploy/venv.sh $(VENV)

model: venv
	@[ -d $(MODEL) ] || $(VENV)/bin/python deploy/model.py $(MODEL)

tools:
	@deploy/test-tools.sh

clean: ## removes the virtual environments, the model and all caches
	rm -rf .venv .venv-engine-* .models build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find gateway tests deploy -name __pycache__ -prune -exec rm -rf {} +
