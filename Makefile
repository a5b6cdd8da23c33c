# make plan    capacity report of the example scenario, in runs/qwen3.5-35b-h200/
# make test    everything that CI runs: checks, then all tests that need no GPU
# make check   lint, format, types and the import rules
# make validation   docs/validation.md: predictions beside published figures
# make kernels   docs/kernels.md: the CUDA kernels beside their floors, targets and public kernels
# make consequence   prints what this kernel profile brings to a service, against the earlier one and storeall
# make clean   remove what the targets above made

PYTHON_OK = import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# The first interpreter that starts (a shim on PATH may not), is in range and can make environments.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c '$(PYTHON_OK)' >/dev/null 2>&1 && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXAMPLE := qwen3.5-35b-h200
PYTEST_ARGS ?= -n 2 --dist loadfile

.PHONY: plan test check validation kernels consequence clean
.DEFAULT_GOAL := plan
.DELETE_ON_ERROR:

plan: $(STAMP)
	$(BIN)/treewy plan examples/$(EXAMPLE).yaml --out runs/$(EXAMPLE)

test: check
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

validation: $(STAMP)
	$(BIN)/python -m reports.validation docs/validation.md

kernels: $(STAMP)
	$(BIN)/python -m reports.kernels docs/kernels.md
	$(BIN)/python -m reports.consequence examples/$(EXAMPLE).yaml docs/kernels.md

consequence: $(STAMP)
	@$(BIN)/python -m reports.consequence examples/$(EXAMPLE).yaml

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11, 3.12 or 3.13 with venv found; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -c '$(PYTHON_OK)' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
