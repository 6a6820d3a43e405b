# Two commands, on any machine with make and Python 3.11 or newer:
#   make demo    compiles a small model for this machine's CPU and asks it a question
#   make test    runs every check: lint, types, import rules, tests

# The first Python here that is new enough. Name another one with `make PYTHON=...`.
PYTHON ?= $(firstword $(foreach python,python3 python3.11 python3.12 python3.13,$(shell \
    $(python) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(python))))

# Checks run on the package as users get it: a plain install. A developer's editable install in .venv stays
# as it is, and make then keeps an environment of its own beside it.
VENV ?= $(if $(wildcard .venv/lib/python*/site-packages/__editable__.zllmc-*),.venv-make,.venv)
BIN := $(VENV)/bin

MODELS := $(or $(ZLLMC_MODELS),models)
MODEL := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
QUESTION ?= Name three primary colors.

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# zllmc has threads of its own, and the tests run in two processes: numpy's threads would only get in the way.
TEST_ENV := OPENBLAS_NUM_THREADS=1
# On CI a test whose model could not be fetched fails; elsewhere it is skipped.
TEST_ENV += $(if $(CI),ZLLMC_REQUIRE_MODELS=$(notdir $(MODEL)))

PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-build-isolation
# Without the old build folder, in which modules that have since been removed live on.
INSTALL_PACKAGE = rm -rf build && $(PIP_INSTALL) --no-deps --force-reinstall .

.PHONY: demo test lint types imports
.DELETE_ON_ERROR:

demo: $(VENV)/.runtime $(MODEL)
	$(INSTALL_PACKAGE)
	$(BIN)/zllmc run $(MODEL) --temperature 0 "$(QUESTION)"

test: lint types imports
	@$(MAKE) --no-print-directory $(MODEL) || echo "make: no SmolLM2 model, so its tests cannot run"
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and import-linter run inside the environment: from here they would take zllmc/ for the whole package.
types: installed
	cd $(VENV) && bin/mypy --config-file "$(CURDIR)/pyproject.toml" -p zllmc

imports: installed
	cd $(VENV) && bin/lint-imports --no-logo "$(CURDIR)/pyproject.toml"

.PHONY: installed
installed: $(VENV)/.dev
	$(INSTALL_PACKAGE)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "zllmc needs Python 3.11 or newer; none was found on PATH" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What pyproject.toml depends on, installed again only when it changes.
$(VENV)/.runtime $(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet "setuptools>=77"
	rm -rf build
	$(PIP_INSTALL) ".$(if $(filter %.dev,$@),[dev])"
	touch $@

$(MODEL): | $(VENV)/bin/python
	$(BIN)/python examples/fetch_model.py $(MODELS)
