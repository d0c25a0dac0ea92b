# `make` lists the targets. Python of the virtual environment first on PATH, so that DVC's stages use it too.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
SGLANG := .venv-sglang
PEERS := .venv-peers
CONFIGS ?= benchmarks/peers/configs
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE ?= 1
export DVC_NO_ANALYTICS := true
export UV_COMPILE_BYTECODE := 1
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := true

.PHONY: help install run test check fast rehearse bench bench-codecs plan status lock ui clean test-sglang remote push pull options bench-step bench-states

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

install: $(VENV)/.run ## create .venv from the locked requirements

# pip takes torch (it alone finds a CPU build where the machine offers one); uv takes the rest in seconds.
$(VENV)/.run: requirements/torch.txt requirements/base.lock requirements/data.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eyas needs Python >= 3.11")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -r requirements/torch.txt -r requirements/uv.txt
	$(VENV)/bin/uv pip install -q -r requirements/base.lock
	$(VENV)/bin/uv pip install -q --no-deps -r requirements/data.lock -e .
	touch $@

$(VENV)/.s3: $(VENV)/.run requirements/s3.lock
	$(VENV)/bin/uv pip install -q -r requirements/s3.lock
	touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.lock
	$(VENV)/bin/uv pip install -q -r requirements/dev.lock
	touch $@

$(VENV)/.bench: $(VENV)/.dev requirements/bench.lock
	$(VENV)/bin/uv pip install -q -r requirements/bench.lock
	touch $@

run: $(VENV)/.run ## prompts to drafter: compose, dvc repro, summary
	eyas params
	dvc repro
	eyas summary

test: $(VENV)/.dev ## format, lint, types, all tests, coverage
	$(MAKE) --no-print-directory check
	pytest --cov --cov-report=term --cov-fail-under=90

# SGLang has an environment of its own (2.7 GB). Without dependencies, so that no CUDA package is ever fetched.
$(SGLANG)/.ready: requirements/torch.txt requirements/sglang.lock pyproject.toml | $(VENV)/.run
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install -q --disable-pip-version-check --no-deps --only-binary :all: -r requirements/torch.txt \
	  || { echo "make: the index has no such torch; name one that has in PIP_INDEX_URL or PIP_FIND_LINKS"; exit 1; }
	$(SGLANG)/bin/python -m pip show torch | grep '^Version: .*+cpu' > /dev/null \
	  || { $(SGLANG)/bin/python -m pip uninstall -q -y torch; \
	       echo "make: pip found a CUDA build of torch and it is removed again; name an index of CPU builds in PIP_INDEX_URL"; exit 1; }
	$(VENV)/bin/uv pip install -q --python $(SGLANG) --no-deps --no-build -r requirements/sglang.lock \
	  || { echo "make: the index lacks a wheel of requirements/sglang.lock for this Python (3.11 is known to work), see above"; exit 1; }
	$(VENV)/bin/uv pip install -q --python $(SGLANG) --no-deps -e .
	touch $@

test-sglang: $(VENV)/.dev $(SGLANG)/.ready ## a real SGLang serves the drafter of `make run`, else a tiny one, and captures states: all as here
	python benchmarks/serve_sglang.py $(if $(wildcard models/export/config.json),--folder .,--tiny)
	pytest tests/test_sglang_extract.py

# The peers of benchmarks/train_step.py have an environment of their own too, and nothing of CUDA.
$(PEERS)/.ready: requirements/torch.txt requirements/peers.lock | $(VENV)/.run
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -r requirements/torch.txt
	$(VENV)/bin/uv pip install -q --python $(PEERS) --no-deps -r requirements/peers.lock
	touch $@

bench-step: $(VENV)/.run $(PEERS)/.ready ## the training step beside SpecForge's and speculators' (about 25 minutes)
	for config in small long masked smol; do python benchmarks/train_step.py --config $(CONFIGS)/$$config.json || exit 1; done

fast: $(VENV)/.dev ## the fast tests only
	pytest -m "not slow"

check: $(VENV)/.dev ## format, lint, types, parameters in step
	ruff format --check .
	ruff check .
	pyrefly check
	eyas params --check

remote: $(VENV)/.run $(if $(filter s3://%,$(TO)),$(VENV)/.s3) ## where the team's data lies: TO=/mnt/team/eyas, or TO=s3://bucket/prefix [ENDPOINT=https://...]
	@test -n "$(TO)" || { echo "make: where? make remote TO=/mnt/team/eyas, or TO=s3://bucket/prefix"; exit 1; }
	dvc remote add -q -d -f team "$(TO)"
	@test -z "$(ENDPOINT)" || dvc remote modify -q team endpointurl "$(ENDPOINT)"

push: $(VENV)/.run ## data, answers, drafter and hidden states to the remote
	dvc push
	eyas store push

pull: $(VENV)/.run ## the same from the remote
	dvc pull
	eyas store pull

rehearse: $(VENV)/.run ## the Kimi project's whole spend against a simulated market, in compressed time
	python benchmarks/rehearse.py

bench: $(VENV)/.bench ## the generation client's figures, beside its peers (about 15 minutes)
	python benchmarks/generate.py --concurrency 2000 --answers 20000 --delay-mean-s 8 --answer-kb 20
	python benchmarks/budget.py --concurrency 500 --budget-tokens 10000000
	python benchmarks/budget.py --concurrency 2000 --budget-tokens 10000000
	python benchmarks/crash.py --kills 20

bench-states: $(VENV)/.dev $(SGLANG)/.ready ## hidden states: bytes, speeds, backends against each other, kills, a bounded disk (about 20 minutes)
	python benchmarks/store.py
	python benchmarks/extract.py --sglang
	python benchmarks/extract_kill.py --kills 10
	python benchmarks/window.py

bench-codecs: $(VENV)/.run ## what each way to store states costs in acceptance, on the data of `make run` (about 100 minutes)
	python benchmarks/codecs.py

plan: $(VENV)/.run ## what the configured run would take: requests, tokens, dollars, minutes, disk
	eyas plan

status: $(VENV)/.run ## the stages at work
	eyas status

options: $(VENV)/.run ## docs/options.md anew, from src/eyas/settings.py and conf/
	eyas options > docs/.options.md && mv docs/.options.md docs/options.md

lock: $(VENV)/.run ## resolve requirements/*.in again
	cd requirements && for name in base s3 ray "s3 dev" bench; do \
	  uv pip compile -q --no-header --no-annotate --generate-hashes base.in \
	    $$( [ "$$name" = base ] || printf '%s.in ' $$name ) -o $${name##* }.lock; done
	cd requirements && for name in data sglang peers; do \
	  uv pip compile -q --no-deps --no-header --no-annotate --generate-hashes $$name.in -o $$name.lock; done

ui: $(VENV)/.run ## MLflow on http://127.0.0.1:5000
	mlflow server --backend-store-uri sqlite:///var/mlflow.db --host 127.0.0.1 --port 5000 --workers 1

clean: ## remove journals, checkpoints, shards and caches under var/ (asks; paid answers are in there)
	@read -r -p "remove var/ with every journal in it? [y/N] " answer && [ "$$answer" = y ] && rm -rf var
