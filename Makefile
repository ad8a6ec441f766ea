# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both first make .venv what uv.lock says (scripts/setup), which takes no time when it already is.

PYTHON := .venv/bin/python
SCHEDULES ?= 1500
INPUTS ?= 2000
SEED ?= 1
WORLD ?= partition
WORKERS ?= auto

export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup demo quick test lint types imports unit integration e2e chaos format sim mutations fuzz docs bench build clean console typescript screenshots

help:
	@echo "make demo                      set up, then show that a killed leader loses nothing"
	@echo "make quick                     lint, types, import rules and the fast unit tests: one to two minutes on two cores, for people at work"
	@echo "make test                      set up, then lint, types, import rules and tests"
	@echo "make sim SCHEDULES=n SEED=s    n seeded fault schedules of the simulator; WORLD=losses: of two lost disks at a time; grown: of a group that grew from one; cluster: of the coordinator; applications: of whole clients; jobs: of work queues; transactions: of transactions"
	@echo "make mutations                 each rule switched off: the simulator has to notice, by the promise that is then broken"
	@echo "make fuzz INPUTS=n SEED=s      n wrong inputs for every decoder of others' bytes, then for a live replica"
	@echo "make chaos [SLICE=1]           nodes, coordinators, leaders, drivers and queries killed on real clusters; some minutes"
	@echo "make e2e                       what a person does at a terminal: commands, pipes, signals; and long tests"
	@echo "make bench [QUICK=1]           every published figure, measured again"
	@echo "make console                   the console's checks and tests, then its page built anew (needs Node 20)"
	@echo "make typescript                the TypeScript client's stubs, checks and tests with a real gateway, and its package"
	@echo "make screenshots               the pictures of the console in docs/img, made by its test in Chromium"
	@echo "make docs                      the documentation as a site, in site/; fails on a dead link"
	@echo "make format                    let ruff rewrite what it can"
	@echo "make lint types imports unit integration    the parts of make test"

setup:
	@scripts/setup

demo: setup
	@$(PYTHON) -m rayqueue.cli demo

# The parts of `make test` that answer while one waits. What is slow is marked so by what `--durations` says.
quick: lint types imports
	$(PYTHON) -m pytest tests/unit -m "not slow" -n $(WORKERS) -q
	@echo "make quick: all passed; make test runs the rest"

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
	$(PYTHON) -m pytest tests/unit tests/sim -m "not mutation" -n $(WORKERS)

# Two files at a time: starting a Ray is mostly waiting. The deadlines in them leave room for that, but for the tests
# that promise how soon something happens: those have the machine to themselves. The groups of plain processes have a
# process of their own, too: in one that had had a Ray, a descriptor of theirs was once closed by somebody else.
integration: setup
	$(PYTHON) -m pytest tests/integration -m "not alone and not long" -n 2 --dist loadfile --max-worker-restart 0 \
		--durations 10 --ignore tests/integration/test_process_group.py
	$(PYTHON) -m pytest tests/integration/test_process_group.py
	$(PYTHON) -m pytest tests/integration -m alone

# What a person does at a terminal, each step a process; and what takes long of the rest. CI runs them after `make test`.
e2e: setup
	@scripts/try-wheel
	$(PYTHON) -m pytest tests/integration -m long --durations 0

# Whole nodes and drivers die in these, and are waited for. CI runs a slice of them: SLICE=1, those that are not long.
chaos: setup
	$(PYTHON) -m pytest tests/chaos --durations 0 $(if $(SLICE),-m "not long")

format: setup
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

fuzz: setup
	$(PYTHON) -m pytest -q tests/fuzz
	@$(PYTHON) -m tests.fuzz.campaign --inputs $(INPUTS) --seed $(SEED)

sim: setup
	@$(PYTHON) -m tests.sim.campaign --world $(WORLD) --schedules $(SCHEDULES) --seed $(SEED)

# Whether the simulator would notice: CI runs them after `make test`.
mutations: setup
	$(PYTHON) -m pytest tests/sim -m mutation -n $(WORKERS) --durations 10

docs: setup
	$(PYTHON) scripts/options
	$(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going docs site

# The page is committed, so that a wheel is built, and installed, without Node. CI builds it again and compares.
console:
	cd console && npm ci --no-audit --no-fund --loglevel error && npm run --silent check && npm run --silent build

typescript: setup
	cd clients/typescript && npm ci --no-audit --no-fund --loglevel error && npm run --silent generate && npm run --silent check && npm pack --silent --dry-run

screenshots: setup
	SCREENSHOTS=docs/img $(PYTHON) -m pytest -q tests/chaos/test_console.py

bench: setup
	@set -e; for script in benchmarks/[!_]*.py; do \
		echo "== $$script"; $(PYTHON) $$script $(if $(QUICK),--quick); \
	done

build: setup
	$(PYTHON) -m build --no-isolation

clean:
	rm -rf .venv .uv dist build site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
