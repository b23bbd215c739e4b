# The verbs: setup demo test check base-policy bench report. `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY := PASSIVE

.PHONY: setup demo test check base-policy bench bench-demo bench-retail report

setup: .venv/.ready

# torch first and pinned: any looser request brings gigabytes of CUDA packages along.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/afterimage train retail

test: setup
	$(BIN)/pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

base-policy: setup
	$(BIN)/python -m afterimage.recipes.base_policy

bench: bench-retail bench-demo

bench-demo: setup
	$(BIN)/python benchmarks/demo.py

bench-retail: setup
	$(BIN)/python benchmarks/retail_degenerate.py

report: setup
	$(BIN)/afterimage report $(RUN)
