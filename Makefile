# Every target sets up its own environment through scripts/install.sh, which answers at once when nothing has changed.
#   make test PYTHON=python3.12          choose the interpreter
#   make test-fast ARGS="-k routing"     pass arguments to pytest
#   make quickstart INSTALL_ARGS=--gpu   pass arguments to scripts/install.sh
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?=
VENV ?= .venv
ARGS ?=
INSTALL_ARGS ?=

install := scripts/install.sh --venv "$(VENV)" $(if $(PYTHON),--python "$(PYTHON)") $(INSTALL_ARGS)
py := "$(VENV)/bin/python"

.PHONY: help env env-dev env-test env-foreign quickstart test test-fast coverage lint bench docs dist clean

help: ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

env:
	@$(install)

env-dev:
	@$(install) --dev

env-test:
	@$(install) --dev --try-vllm

env-foreign: env-test
	@$(py) scripts/foreign_venvs.py

quickstart: env ## Teach a tiny model a task by reinforcement learning, on the CPU
	@$(py) apps/quickstart/main.py $(ARGS)

# Tests that carry the marker `alone` run in order, after all others, which share two cores, a file to a core. A
# worker that crashes is replaced, also where there is only one. Each part ends within its limit, which is several times
# what it takes on two busy cores. An exit status of 5 says that ARGS chose no test of that part.
test: alone = $(shell grep -rl --include='test_*.py' 'pytest.mark.alone' tests | sort)
test: env-foreign ## Run every test
	@first=0; rest=0; \
	$(py) scripts/run_tests.py --limit-s 3600 -n 2 -m "not alone" --durations 15 tests $(ARGS) || first=$$?; \
	$(py) scripts/run_tests.py --limit-s 1200 -n 1 --no-loadscope-reorder -m alone --durations 20 $(alone) $(ARGS) || rest=$$?; \
	if [[ $$first == [05] ]]; then exit $${rest/#5/$$first}; else exit $$first; fi

coverage: env-test ## Run every test once more slowly, with a coverage report
	@rc=0; $(py) -m coverage run -m pytest tests $(ARGS) || rc=$$?; $(py) -m coverage report || rc=$${rc/#0/1}; exit $$rc

test-fast: env-dev ## Run the unit tests only, on two cores
	@$(py) scripts/run_tests.py --limit-s 1800 -n 2 -m "not alone" tests/unit $(ARGS)

lint: env-dev ## Check style, types and import layers
	@rc=0; \
	$(py) -m ruff check . || rc=1; \
	$(py) -m ruff format --check . || rc=1; \
	$(py) -m mypy || rc=1; \
	"$(VENV)/bin/lint-imports" || rc=1; \
	exit $$rc

bench: env-dev ## Run every benchmark
	@shopt -s nullglob; rc=0; \
	for file in benchmarks/*.py; do echo "== $$file"; $(py) "$$file" $(ARGS) || { rc=1; echo "== $$file failed" >&2; }; done; \
	exit $$rc

docs: env-dev ## Build the documentation; a warning is an error
	@$(py) -m sphinx -W -n --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

dist: env-dev ## Build the source distribution and the wheel into dist/
	@$(py) scripts/build_dist.py dist

clean: ## Remove what the targets made, except the environment
	@rm -rf build dist htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis docs/_build
	@find apps benchmarks docs src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
