# The verbs: setup demo test check base-policy bench report. `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 10000

.PHONY: setup demo test test-engines test-adapters conversations check base-policy bench bench-agent bench-demo bench-retail bench-compare \
	bench-audit bench-resume bench-endpoint bench-peers bench-generate bench-train bench-memory bench-schedule bench-async \
	bench-async-learning bench-routes bench-publish bench-simulate bench-gpu chaos report fuzz sizes

setup: .venv/.ready

# torch first and pinned: any looser request brings gigabytes of CUDA packages along.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/unstale train retail

test: setup
	$(BIN)/pytest -n 2 --dist loadfile

# Minutes, and 3 GB on the disk: real inference servers have an environment of their own.
test-engines: .venv-engines/.ready
	.venv-engines/bin/pytest tests/engines

.venv-engines/.ready: constraints.txt constraints-engines.txt
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-engines/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints-engines.txt
	touch $@

# Minutes, and 1 GB on the disk: libraries that want environments of their own, each with .venv behind it. tau2-bench is no
# package: make test-adapters TAU2=<folder of its source>.
ADAPTERS := openenv verifiers $(if $(TAU2),tau2)
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
test-adapters: $(ADAPTERS:%=.venv-adapters/%/.ready)
	set -e; for name in $(ADAPTERS); do \
		TAU2_DATA_DIR=$(TAU2)/data .venv-adapters/$$name/bin/python -m pytest tests/adapters/test_$$name.py; done

.venv-adapters/%/.ready: .venv/.ready constraints-adapters.txt
	$(PYTHON) -m venv .venv-adapters/$*
	$(BIN)/python $(PURELIB) > $$(.venv-adapters/$*/bin/python $(PURELIB))/shared.pth
	test $* = tau2 || .venv-adapters/$*/bin/pip install --quiet --disable-pip-version-check -c constraints-adapters.txt $* uv
	test $* != tau2 || $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("$(TAU2)/pyproject.toml", "rb"))\
	["project"]["dependencies"], sep="\n")' > .venv-adapters/requirements.txt
	test $* != tau2 || .venv-adapters/tau2/bin/pip install --quiet --disable-pip-version-check -r .venv-adapters/requirements.txt
	test $* != tau2 || .venv-adapters/tau2/bin/pip install --quiet --no-deps --ignore-requires-python $(TAU2)
	touch $@

# Minutes: 10,000 generated conversations with each chat template, where the suite has 150.
conversations: setup
	CONVERSATIONS=10000 $(BIN)/pytest -n 2 tests/rollout/test_endpoint.py -k whatever

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

base-policy: setup
	$(BIN)/python -m tools.base_policy

# How fast it is, question by question (docs/speed.md): under 40 minutes on two cores, with fewer repeats and models than the
# verb of a question has by itself, to benchmarks/results/short. Where one fails the others go on, and it is named at the end.
QUESTIONS := generate train memory schedule async routes publish simulate
SHORT_generate := --repeats 2 --sizes 1M
SHORT_train := --repeats 2 --models 1M
SHORT_memory := --repeats 1
SHORT_schedule := --repeats 2
SHORT_async := --repeats 1
SHORT_routes := --rounds 1
SHORT_publish := --repeats 3
SHORT_simulate := --repeats 1
bench: bench-peers .venv/.bench
	@export BENCH_RESULTS="$(CURDIR)/benchmarks/results/short"; failed=; began=$$(date +%s); $(foreach question,$(QUESTIONS),$(MAKE) --no-print-directory bench-$(question) \
		ARGS="$(SHORT_$(question))" || failed="$$failed bench-$(question)";) \
	echo "$$((($$(date +%s) - began) / 60)) minutes"; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

.venv/.bench: .venv/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

# Whom it is measured against, each in an environment of its own: minutes, and 4 GB on the disk.
bench-peers: .venv-peers/.ready .venv-engines/.ready

.venv-peers/.ready: constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt transformers trl
	touch $@

# A quarter of an hour: sampled tokens a second, beside transformers and vLLM's CPU build.
bench-generate: bench-peers .venv/.bench
	$(BIN)/python -m benchmarks.generate $(ARGS)

# Twelve minutes: trained tokens a second, and whole steps, beside TRL.
bench-train: bench-peers .venv/.bench
	$(BIN)/python -m benchmarks.train $(ARGS)

# Ten minutes: the peak of scoring and training by size of the vocabulary.
bench-memory: .venv/.bench
	$(BIN)/python -m benchmarks.memory $(ARGS)

# Ten minutes: what a turn costs, and an episode takes, with 10 to 100,000 alive.
bench-schedule: .venv/.bench
	$(BIN)/python -m benchmarks.schedule $(ARGS)

# 25 minutes: asynchronous against synchronous over the share of tool time, the staleness bound and the window. 35: success.
bench-async: .venv/.bench
	$(BIN)/python -m benchmarks.asynchrony $(ARGS)

bench-async-learning: .venv/.bench
	$(BIN)/python -m benchmarks.asynchrony --learning $(ARGS)

# Ten minutes: what each route costs, alone and of a real step, and how wrong it is.
bench-routes: .venv/.bench
	$(BIN)/python -m benchmarks.routes $(ARGS)

# Four minutes: bytes and seconds of a published version, whole and as a delta.
bench-publish: .venv/.bench
	$(BIN)/python -m benchmarks.publish $(ARGS)

# A quarter of an hour: the planner's predictions beside measured runs, and beside published ones.
bench-simulate: .venv/.bench
	$(BIN)/python -m benchmarks.simulate $(ARGS)

# 25 minutes on a machine with a GPU, in the environment that has its torch: make bench-gpu BIN=/usr/bin
bench-gpu:
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-demo: setup
	$(BIN)/python benchmarks/demo.py

# An agent of the OpenAI SDK through the endpoint, beside the desk's own environment: half an hour.
bench-agent: setup
	$(BIN)/python benchmarks/agent.py

bench-retail: setup
	$(BIN)/python benchmarks/retail_degenerate.py

# The routes against each other where staleness hurts, timed without the audit: hours. What was cut short goes on.
bench-compare: setup
	$(BIN)/unstale compare retail --name compare-routes --seeds 5 \
		--routes rollout current_recompute interp_prox_loglinear ppo_ewma_async snapshot_old \
		--arms "ewma_prox: old_logps.route=ewma_prox old_logps.beta=0.75" --audit.share 0 \
		--schedule.max_staleness 6 --schedule.groups_per_step 8 --trainer.lr_schedule constant \
		--steps 60 --eval.tasks 128 --eval.every 20

# Minutes: every route replayed on one recorded run, against the theory.
bench-audit: setup
	$(BIN)/python benchmarks/audit.py

# Minutes: what the journal and checkpoints cost, and how soon a killed run trains again.
bench-resume: setup
	$(BIN)/python benchmarks/resume.py

# Five minutes: 64 streaming episodes at once behind the endpoint, while the weights change.
bench-endpoint: setup
	$(BIN)/python benchmarks/endpoint.py

# Runs and engines killed, N times and twice N / 2 times: make chaos N=10 takes minutes.
N ?= 100
chaos: setup
	$(BIN)/python benchmarks/chaos.py --kills $(N)

# Minutes: inputs from a disk, a user or a model, made wrong. Without atheris it says so and draws them at random.
fuzz: setup
	-$(BIN)/python -c 'import atheris' || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python -m fuzz.run $(ARGS)

report: setup
	$(BIN)/unstale report $(RUN)

# The table of sizes: lines, files, functions, parameters, options.
sizes: setup
	$(BIN)/python -m tools.sizes
