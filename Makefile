PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install install-test demo test lint format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,export]'
	touch $@

install: $(VENV)/.installed ## create .venv and install what the project needs

install-test: $(VENV)/.installed-test

demo: $(VENV)/.installed ## train on drawn elephants at a small size and draw samples (minutes on a CPU)
	$(BIN)/python train.py experiment=demo run_dir=runs/demo
	$(BIN)/python sample.py ckpt=runs/demo n=36 out=runs/demo/elephants.png

test: $(VENV)/.installed-test ## run the test-suite
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/.installed-test ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-test ## rewrite to style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was built, not the runs
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache
