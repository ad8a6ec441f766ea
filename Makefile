# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both first make .venv what uv.lock says (scripts/setup), which takes no time when it already is.

PYTHON := .venv/bin/python
SCHEDULES ?= 1500
INPUTS ?= 2000
SEED ?= 1
WORLD ?= partition
WORKERS ?= auto

export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup demo test lint types imports unit integration e2e chaos format sim fuzz docs bench build clean

help:
	@echo "make demo                      set up, then show that a killed leader loses nothing"
	@echo "make test                      set up, then lint, types, import rules and tests"
	@echo "make sim SCHEDULES=n SEED=s    n seeded fault schedules of the simulator; WORLD=cluster: of the coordinator"
	@echo "make fuzz INPUTS=n SEED=s      n wrong inputs for every decoder of others' bytes, then for a live replica"
	@echo "make chaos                     nodes, coordinators, leaders, drivers and queries killed on real clusters; some minutes"
	@echo "make e2e                       what a person does at a terminal: commands, pipes, signals; and long tests"
	@echo "make bench [QUICK=1]           every published figure, measured again"
	@echo "make docs                      the documentation as a site, in site/; fails on a dead link"
	@echo "make format                    let ruff rewrite what it can"
	@echo "make lint types imports unit integration    the parts of make test"

setup:
	@scripts/setup

demo: setup
	@$(PYTHON) -m rayqueue.cli demo

test: lint types imports unit integration
	@echo "make test: all passed"

lint: setup
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check

types: setup
	$(PYTHON) -m mypy

imports: setup
	.venv/bin/lint-imports

unit: setup
	$(PYTHON) -m pytest tests/unit $(wildcard tests/sim) -n $(WORKERS)

# Two files at a time: starting a Ray is mostly waiting. The deadlines in them leave room for that, but for the tests
# that promise how soon something happens: those have the machine to themselves.
integration: setup
	$(PYTHON) -m pytest tests/integration -m "not alone and not long" -n 2 --dist loadfile --max-worker-restart 0 --durations 10
	$(PYTHON) -m pytest tests/integration -m alone

# What a person does at a terminal, each step a process; and what takes long of the rest. CI runs them after `make test`.
e2e: setup
	@scripts/try-wheel
	$(PYTHON) -m pytest tests/integration -m long --durations 0

# Whole nodes and drivers die in these, and are waited for. CI runs them after `make test`.
chaos: setup
	$(PYTHON) -m pytest tests/chaos --durations 0

format: setup
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

fuzz: setup
	$(PYTHON) -m pytest -q tests/fuzz
	@$(PYTHON) -m tests.fuzz.campaign --inputs $(INPUTS) --seed $(SEED)

sim: setup
	@$(PYTHON) -m tests.sim.campaign --world $(WORLD) --schedules $(SCHEDULES) --seed $(SEED)

docs: setup
	$(PYTHON) scripts/options
	$(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going docs site

bench: setup
	@set -e; for script in benchmarks/[!_]*.py; do \
		echo "== $$script"; $(PYTHON) $$script $(if $(QUICK),--quick); \
	done

build: setup
	$(PYTHON) -m build --no-isolation

clean:
	rm -rf .venv .uv dist build site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
