# The verbs of Millrace. Each makes the virtual environment first, and is quick the second time.
PYTHON ?= python3
# Where the CPU build of PyTorch is looked for when the configured package sources do not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
LOCK := deploy/lock/cpu.txt
BIN := $(VENV)/bin
SOURCES := services tests benchmarks
MODEL ?= tiny

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-all lint format proto bench lock clean

help: ## Shows the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: ## Makes .venv and installs the locked packages
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" deploy/install.sh $(VENV) $(LOCK)

demo: setup ## Trains a small policy through the whole stack, and shows it learn (MODEL=tiny or MODEL=smollm2)
	@$(BIN)/python -m services.demo.run --model $(MODEL)

up: setup ## Starts all services on this machine
	@$(BIN)/millrace up

test: setup ## Unit, integration and a short end-to-end test (under 15 minutes on two cores)
	@$(BIN)/python -m pytest -q -m "not slow"

test-all: setup ## Also the long ones
	@$(BIN)/python -m pytest -q

lint: setup ## ruff, mypy, the generated protobuf code, the import boundaries
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/mypy
	@deploy/check-proto.sh $(BIN)/python
	@$(BIN)/python -m pytest -q tests/unit/test_boundaries.py

format: setup ## Formats the sources
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

proto: setup ## Generates services/common/pb from proto/
	@$(BIN)/python -m grpc_tools.protoc -Iservices/common/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/weight_sync.proto

bench: setup ## Prints the figures of benchmarks/
	@for bench in benchmarks/*.py; do $(BIN)/python $$bench || exit 1; done

lock: setup ## Resolves deploy/lock/requirements.in anew
	@$(BIN)/python -m pip install --quiet uv
	@UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip compile --python-version 3.11 --override deploy/lock/overrides.txt deploy/lock/requirements.in \
		--no-annotate --no-header --output-file $(LOCK)

clean: ## Removes what the verbs made, models and runs too
	rm -rf $(VENV) .millrace build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
