# Two commands matter: 'make demo' and 'make test'. Both set up everything they need.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
FUZZER := .venv/.fuzzer

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-flower test test-all fuzz lint types docs docs-serve lock audit results bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(READY) ## Create the virtual environment with the tested versions

$(READY): pyproject.toml constraints.txt
	@echo "setting up .venv (once; a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedrp needs Python 3.11 or newer")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@$(BIN)/python -m fedrp.engines.compile
	@touch $@

demo: $(READY) ## Train FedRP and its comparison partners on the bundled data, then with noise for every record
	@rm -rf runs/demo runs/demo-records
	@$(BIN)/fedrp compare examples/demo.toml
	@echo
	@echo "client-level noise (fedavg-dp above) is for many small clients; few sites protect each record instead:"
	@$(BIN)/fedrp run examples/demo_records.toml

demo-flower: $(READY) ## The same algorithm on a real Flower deployment of three sites on this machine, TLS and all
	@$(BIN)/python scripts/demo_flower.py

test: $(READY) lint types ## Lint, strict types and all tests but the slow ones
	@$(BIN)/pytest -q -n 2 --dist worksteal -m "not slow"

test-all: $(READY) lint types ## The same with the slow tests, and a minute of fuzzing
	@$(BIN)/pytest -q -n 2 --dist worksteal
	@$(MAKE) --no-print-directory fuzz

fuzz: $(FUZZER) ## Fuzz the decoder and both state machines, guided by coverage, for a minute
	@$(BIN)/python scripts/fuzz.py --seconds 60

$(FUZZER): $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@touch $@

lint: $(READY) ## Check style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY) ## Check types, strictly
	@$(BIN)/mypy

docs: $(READY) ## Build the docs site into site/, strictly: every link and name must lead somewhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

docs-serve: $(READY) ## Show the docs site on 127.0.0.1:8000, and build it anew when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

# PyPI's builds for Linux on x86-64, where torch brings CUDA. pip refuses everything else.
lock: $(READY) ## Write requirements.lock: constraints.txt with hashes, for the image (needs a network)
	@$(BIN)/uv pip compile pyproject.toml --extra flower --constraint constraints.txt --upgrade --generate-hashes \
	    --only-binary :all: --default-index https://pypi.org/simple --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_28 --no-annotate --custom-compile-command "make lock" --quiet \
	    --output-file requirements.lock

audit: $(READY) ## Look for known vulnerabilities in what the image installs (needs a network)
	@$(BIN)/uv tool run pip-audit --strict --require-hashes --disable-pip --requirement requirements.lock

results: $(READY) ## Run every published experiment that is not kept yet, and render docs/results.md (hours)
	@$(BIN)/python benchmarks/results.py run
	@$(BIN)/python benchmarks/results.py render

bench: $(READY) ## Measure the simulator against a plain loop, the projections against a copy and other libraries
	@$(BIN)/fedrp bench simulator --clients 20 --repeats 3 --processes 2
	@$(BIN)/python benchmarks/projection.py

clean: ## Remove the environment and caches; run folders stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build src/*.egg-info
