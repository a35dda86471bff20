# make demo: set up, run the main job on the simulator, print the table, write the figures (runs/demo/figures)
# make test: set up, run all tests
# make check: formatting, lint, types, import rules, tests without the slow ones

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := examples/qwen7b_128_h100.toml

.PHONY: demo test check bench clean

demo: $(VENV)/.demo
	rm -rf runs/demo
	$(BIN)/pipelinerl compare $(RUN) --set optimizer_steps=192 --set 'compare.scenarios=[{ name = "central" }]' --out runs/demo
	@echo "Figures: runs/demo/figures"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" --cov --cov-report=term:skip-covered
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow  # whole runs: counting branches would slow them down

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

bench: $(VENV)/.dev
	$(BIN)/python -m pytest benchmarks -o addopts= --benchmark-only --benchmark-columns=min,median,rounds

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("PipelineRL needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[sim,plot]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[sim,plot,dev]'
	touch $@ $(VENV)/.demo
