# One door to everything. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Written last: an installation that was cut off is done again, a finished one is reused.
STAMP := $(VENV)/.installed
RUN_DIR ?= runs/demo
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo stages test test-all test-unit test-dist test-fault mutants slurm-lab slurm-lab-end bench gpu gpu-wheels check fix

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

setup: $(STAMP) ## make .venv with pinned versions (about 2 GB with torch for CPU)

# torch comes first and alone: pip takes it with the machine's own configuration, so that where a
# CPU wheel is offered it is the one installed, and what follows finds it in place.
# Megatron-Core 0.19.2 has a wheel for Python 3.11 but declares 3.12: asked for past that there.
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; use make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch==2.13.0
	$(PIP) install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then \
	  $(PIP) install --quiet --no-deps --ignore-requires-python megatron-core==0.19.2; fi
	touch $(STAMP)

demo: $(STAMP) ## train a tiny Kimi on real data, resume it, measure it (RUN_DIR=, ARGS="train.steps=40")
	$(BIN)/kimi-pretrain demo --run-dir $(RUN_DIR) $(ARGS)

stages: $(STAMP) ## captions, projector, joint, long context in toy form, from one file (docs/STAGES.md)
	$(BIN)/kimi-pretrain demo --stages --run-dir runs/stages $(ARGS)

# One more at a time than there are cores: many tests wait, for servers, timeouts or other processes.
# Files go out in their order (tests/conftest.py): the long ones begin first and none ends alone.
WORKERS := $(shell expr $$(nproc) + 1)
test: $(STAMP) ## all tests but the slow ones (ARGS="-k digits" to choose)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --maxprocesses=4 --dist=loadfile --no-loadscope-reorder $(ARGS)

test-all: test ## all tests, then the slow ones: repetitions of a proof, short forms of benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

test-unit: $(STAMP) ## tests without processes and servers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" tests/unit $(ARGS)

test-dist: $(STAMP) ## tests that start several processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "dist and not slow" $(ARGS)

# The campaign measures how long faults take to be noticed, so it has the machine for itself.
test-fault: $(STAMP) ## every fault and every slow test, then the campaign that writes docs/RELIABILITY.md's table
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "fault or slow" $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fault.campaign

mutants: $(STAMP) ## plant faults in the critical organs, list those that no test notices (ARGS="--organ plan")
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.mutants $(ARGS)

slurm-lab: $(STAMP) ## bring up a real SLURM of two nodes on this machine, without systemd (root; docs/SLURM.md)
	@$(BIN)/python -m tests.slurm.lab up --folder runs/slurm_lab

slurm-lab-end: $(STAMP) ## end it, and its jobs
	@$(BIN)/python -m tests.slurm.lab down --folder runs/slurm_lab

bench: $(STAMP) ## measure planning, statistics, the page, DEP, bubbles, predicted steps, memory, MuonClip, checkpoints, and loading against other loaders (4 hours; ARGS="--quick": ours only)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_plan.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_index.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_facts.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_serve.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_sync.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_loader.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_dep.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_bubbles.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_step_plan.py $(filter --quick,$(ARGS))
	$(BIN)/python benchmarks/bench_muon.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_muonclip.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_checkpoint.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_memory.py $(filter --quick,$(ARGS))
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_fp8.py $(filter --quick,$(ARGS))

# On a machine with a CUDA device, by its own Python and torch; no .venv.
GPU_WHEELS ?= runs/gpu_wheels
GPU_SITE := $(CURDIR)/runs/gpu_site
gpu: ## all tests marked gpu and all benchmarks on one CUDA device, under 9 minutes (docs/GPU.md)
	@if ls $(GPU_WHEELS)/*.whl >/dev/null 2>&1; then $(PYTHON) -m pip install --quiet --no-index --no-deps \
	  --no-compile --upgrade --target $(GPU_SITE) $(GPU_WHEELS)/*.whl; fi
	PYTHONPATH=$(GPU_SITE) $(PYTHON) -m benchmarks.gpu.run $(ARGS)

gpu-wheels: $(STAMP) ## collect what `make gpu` needs beside torch into runs/gpu_wheels
	$(BIN)/python -m benchmarks.gpu.wheels $(GPU_WHEELS) $(ARGS)

check: $(STAMP) ## format, lint, spelling, types and shell scripts; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/basedpyright
	$(BIN)/shellcheck .ci/run launch/slurm/job.sbatch
	$(BIN)/python -m pytest -p no:cacheprovider tests/unit/launch/test_slurm.py -k shellcheck

fix: $(STAMP) ## format, mend what lint can mend, and write docs/FILES.md
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m tests.house.files_page
