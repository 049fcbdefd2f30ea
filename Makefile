# The verbs of Millrace. Each makes the virtual environment first, and is quick the second time.
PYTHON ?= python3
# Where the CPU build of PyTorch is looked for when the configured package sources do not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
LOCK := deploy/lock/cpu.txt
BIN := $(VENV)/bin
SOURCES := millrace services examples tests benchmarks deploy
MODEL ?= tiny
# The Python of `make test-gpu`.
GPU_PYTHON ?= python3
# Where this is set, every process of the tests would compile our modules once more.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo up down serve test-unit test test-all coverage chaos test-compose test-ascend-versions test-gpu test-verl test-trackers test-environments lint format proto dashboards bench bench-algorithms bench-peers lock lock-peers lock-trackers lock-environments lock-ascend audit clean

help: ## Shows the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

setup: ## Makes .venv and installs the locked packages
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" deploy/install.sh $(VENV) $(LOCK)

demo: setup ## Trains a small policy through the whole stack, and shows it learn (MODEL=tiny or MODEL=smollm2; GAME=guess or GAME=calculator: turns with an environment; SEED=1: other training tasks)
	@$(BIN)/python -m examples.demo.run --model $(or $(GAME),$(MODEL)) $(if $(SEED),--seed $(SEED))

up: ## Starts everything in containers: makes the secrets that are missing, then `docker compose up`
	@deploy/secrets.sh
	@docker compose up --detach --build --wait
	@echo "gateway: $$(docker compose port gateway 8080)   token: .millrace/secrets/gateway_token"
	@echo "grafana: $$(docker compose port grafana 3000)   user admin, password: .millrace/secrets/grafana_password"
	@echo "next:    docs/deploy.md tells how to put a model there and submit a job"

down: ## Stops the containers; volumes stay
	@docker compose down

serve: setup ## Starts all services on this machine, without containers
	@$(BIN)/millrace up

test-unit: ## The unit tests, in an environment of their own without torch or an engine
	@PYTHON="$(PYTHON)" PIP_NO_COMPILE=1 deploy/install.sh .venv-unit deploy/lock/unit.txt
	@.venv-unit/bin/python -m pytest -q -n 3 --dist worksteal tests/unit

test: setup ## Unit, integration and a short end-to-end test (about twelve minutes on two idle cores)
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not compose and not chaos"

test-all: setup ## Also the long ones
	@$(BIN)/python -m pytest -q -m "not compose and not chaos"

coverage: setup ## Which lines the unit and integration tests reach, child processes included
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile --cov --cov-report=term:skip-covered -m "not slow" tests/unit tests/integration

chaos: setup ## Every fault of docs/reliability.md at its full count (hours), and the table written anew
	@$(BIN)/python -m pytest -q -s -m chaos tests/chaos; status=$$?; $(BIN)/python -m tests.chaos.table; exit $$status

test-compose: setup ## The whole stack in containers, with a real Docker engine: builds, trains, scales, kills, recovers
	@$(BIN)/python -m pytest -q -s -m compose tests/compose

test-ascend-versions: ## The rollout service's and the learner's tests on the versions that Ascend pairs with, on the CPU, in environments of their own
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" deploy/test-ascend-versions.sh

test-gpu: ## The learner's tests on CUDA, as far as one GPU goes; GPU_PYTHON: a Python with the learner's packages and a torch for CUDA
	@MILLRACE_TEST_PLATFORM=cuda $(GPU_PYTHON) -m pytest -q -n 5 --dist loadfile -m "not slow" tests/integration/learner/test_trainer.py \
		tests/integration/learner/test_roles.py tests/integration/learner/test_experts.py tests/integration/learner/test_fsdp2.py \
		tests/integration/learner/test_replay_gpu.py tests/integration/learner/training/test_cuda_kernels.py

test-verl: setup ## Our formulas against verl's own functions, which are installed into a folder of their own
	@$(BIN)/python -m pip install --quiet --quiet --no-deps --upgrade --target .venv-verl -r deploy/lock/verl.txt
	@PYTHONPATH=.:.venv-verl $(BIN)/python -m pytest -q tests/unit/learner/algorithms/test_verl.py

test-trackers: ## Each tracker's own client against local servers and folders, in an environment of their own
	@PYTHON="$(PYTHON)" PIP_NO_COMPILE=1 deploy/install.sh .venv-trackers deploy/lock/trackers.txt
	@.venv-trackers/bin/python -m pytest -q tests/trackers

test-environments: setup ## Environments that need packages of their own, TextArena's games and OpenEnv's server: alone, and in jobs
	@PYTHON="$(PYTHON)" PIP_NO_COMPILE=1 deploy/install.sh .venv-environments deploy/lock/environments.txt
	@.venv-environments/bin/python -m pytest -q tests/environments --ignore tests/environments/test_jobs.py
	@MILLRACE_ENVIRONMENT_PYTHON=.venv-environments/bin/python $(BIN)/python -m pytest -q tests/environments/test_jobs.py

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
	@$(BIN)/python -m grpc_tools.protoc -Iservices/common/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/*.proto

dashboards: setup ## Writes the dashboards' JSON, then trains a job under a real Prometheus and writes docs/dashboards.md and the previews
	@$(BIN)/python -m deploy.dashboards
	@$(BIN)/python -m deploy.dashboards.record

bench: setup ## Prints the figures of benchmarks/
	@for bench in benchmarks/[a-z]*.py; do $(BIN)/python -m benchmarks.$$(basename $$bench .py) || exit 1; done

bench-algorithms: setup ## Every preset on the demo's task, and DAPO with older and older data; writes docs/algorithms.md (about half an hour)
	@$(BIN)/python -m benchmarks.algorithms.run --write

bench-peers: setup ## TRL's plain loop against ours on the same jobs; writes docs/performance.md (GSM8K=FILE: its train.jsonl, for the third job)
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" deploy/install.sh .venv-peers deploy/lock/peers.txt
	@$(BIN)/python -m benchmarks.peers.run --write $(if $(GSM8K),--gsm8k "$(GSM8K)")

lock: setup ## Resolves deploy/lock/requirements.in anew, for every machine that Millrace runs on
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/python deploy/lock/resolve.py $(BIN)/uv $(LOCK) deploy/lock/requirements.in
	@for service in gateway reward environment rollout learner; do $(BIN)/python deploy/lock/resolve.py $(BIN)/uv deploy/lock/$$service.txt \
		--extra $$service pyproject.toml || exit 1; done
	@$(BIN)/python deploy/lock/resolve.py $(BIN)/uv deploy/lock/unit.txt --extra test pyproject.toml

lock-peers: setup ## Resolves deploy/lock/peers.in anew, with the versions of the whole lock
	@$(BIN)/python -m pip install --quiet uv
	@UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip compile --quiet --python-version 3.11 --override deploy/lock/overrides.txt --constraint $(LOCK) \
		deploy/lock/peers.in --no-annotate --no-header --output-file deploy/lock/peers.txt >/dev/null

lock-trackers: setup ## Resolves the trackers' clients anew; SwanLab's says that it wants an older protobuf, and runs with the locked one
	@$(BIN)/python -m pip install --quiet uv
	@sort -u deploy/lock/gateway.txt deploy/lock/unit.txt >.venv-trackers.constraints
	@{ cat deploy/lock/overrides.txt; grep '^protobuf==' deploy/lock/gateway.txt; } >.venv-trackers.overrides
	@UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip compile --quiet --python-version 3.11 --override .venv-trackers.overrides \
		--constraint .venv-trackers.constraints --extra test --extra mlflow --extra wandb --extra swanlab pyproject.toml \
		--no-annotate --no-header --output-file deploy/lock/trackers.txt >/dev/null
	@rm .venv-trackers.constraints .venv-trackers.overrides

lock-environments: setup ## Resolves the packages of environments anew; OpenEnv's server is tested without its web interface (gradio)
	@$(BIN)/python -m pip install --quiet uv
	@sort -u deploy/lock/environment.txt deploy/lock/unit.txt >.venv-environments.constraints
	@{ cat deploy/lock/overrides.txt; echo 'gradio ; sys_platform == "never"'; } >.venv-environments.overrides
	@UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip compile --quiet --python-version 3.11 --override .venv-environments.overrides \
		--constraint .venv-environments.constraints --extra test --extra textarena --extra openenv-server pyproject.toml \
		--no-annotate --no-header --output-file deploy/lock/environments.txt >/dev/null
	@rm .venv-environments.constraints .venv-environments.overrides

lock-ascend: setup ## Resolves deploy/lock/ascend-*.in anew
	@$(BIN)/python -m pip install --quiet uv
	@deploy/lock-ascend.sh $(BIN)/uv

audit: ## Looks for known vulnerabilities in the locked packages (asks PyPI's advisory database)
	@[ -x .venv-audit/bin/pip-audit ] || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet pip-audit; }
	@sed 's/+cpu//' $(LOCK) >.venv-audit/lock.txt
	@.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r .venv-audit/lock.txt

clean: ## Removes what the verbs made, models and runs too
	rm -rf $(VENV) .venv-* .millrace build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
