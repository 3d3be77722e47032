PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# of test-pair; Triton 3.6's interpreter fails with numpy 2.4
TORCH ?= 2.15.0
TRITON ?= 3.9.0
NUMPY ?= $(if $(filter 3.6.%,$(TRITON)),2.3.5,2.4.6)
PAIR := .venv-torch$(TORCH)-triton$(TRITON)
# empty: two workers and the scripts that they start share what Python has compiled
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install install-test demo test test-all test-slow test-pair lint format clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,export,sweep]'
	touch $@

install: $(VENV)/.installed ## create .venv and install what the project needs

install-test: $(VENV)/.installed-test

demo: $(VENV)/.installed ## train on drawn elephants at a small size and draw samples (minutes on a CPU)
	$(BIN)/python train.py experiment=demo run_dir=runs/demo
	$(BIN)/python sample.py ckpt=runs/demo n=36 out=runs/demo/elephants.png

test: $(VENV)/.installed-test ## run the test-suite, two cases of each test (ten minutes on two cores)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --few 2

test-all: $(VENV)/.installed-test ## run every case of every test, but for the slow ones
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-slow: $(VENV)/.installed-test ## run the tests that take long: sweeps by every launcher, restarts, faults
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow -o faulthandler_timeout=3600

test-pair: ## the same with other versions: make test-pair TORCH=2.11.0 TRITON=3.6.0
	$(PYTHON) -m venv $(PAIR)
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e 's/^triton==.*/triton==$(TRITON)/' \
		-e 's/^numpy==.*/numpy==$(NUMPY)/' constraints.txt > $(PAIR)/constraints.txt
	$(PAIR)/bin/pip install --quiet --disable-pip-version-check -c $(PAIR)/constraints.txt -e '.[test,export,sweep]'
	$(PAIR)/bin/python -m pytest -n $(JOBS) --dist worksteal

lint: $(VENV)/.installed-test ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-test ## rewrite to style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was built, not the runs
	rm -rf $(VENV) .venv-torch* *.egg-info .pytest_cache .ruff_cache
