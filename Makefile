# make setup | run | test | test-slow | figures | bench | notebooks | sync-notebooks | lab | lint | lock | clean
VENV ?= .venv
PYTHON ?=
BIN := $(VENV)/bin
# one list of packages for a kind of machine
LIST-Linux-x86_64 := requirements/cpu.txt
LIST-Linux-aarch64 := requirements/cpu.txt
LIST-Darwin-arm64 := requirements/macos.txt
HERE := $(shell uname -s)-$(shell uname -m)
LIST := $(shell nvidia-smi >/dev/null 2>&1 && echo requirements/gpu.txt || echo $(LIST-$(HERE)))
STAMP := $(VENV)/.installed-$(notdir $(basename $(LIST)))
NOTEBOOKS := $(VENV)/.installed-notebooks
LAB := $(VENV)/.installed-lab
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# setup.sh finds a Python, makes an environment and fills it from a list
SETUP := PYTHON="$(PYTHON)" sh requirements/setup.sh
ARGS ?=

.PHONY: run setup test test-slow figures bench notebooks sync-notebooks lab lint lock clean

run: setup
	$(BIN)/python tba_min.py $(ARGS)

setup: $(STAMP)

$(STAMP): $(LIST)
	@$(SETUP) $(VENV) "$(LIST)"
	@touch $@

# What only the notebooks need. The lists are complete beside cpu.txt; elsewhere pip adds what is missing.
MORE-cpu := --no-deps
MORE-macos := --constraint requirements/cpu.txt
MORE := $(PIP) $(MORE-$(notdir $(basename $(LIST))))

$(NOTEBOOKS): requirements/notebooks.txt | setup
	$(MORE) -r $<
	@touch $@

$(LAB): requirements/lab.txt $(NOTEBOOKS)
	$(MORE) -r $<
	@touch $@

test: setup
	$(BIN)/python -m pytest -q -m "not slow and not gpu" $(ARGS)

test-slow: $(NOTEBOOKS)
	$(BIN)/python -m pytest -q -m "slow and not gpu" $(ARGS)

notebooks: $(NOTEBOOKS)
	$(BIN)/python -m notebooks.build run $(ARGS)
	@echo "HTML in runs/notebooks, figures in docs/notebooks"

sync-notebooks: $(NOTEBOOKS)
	$(BIN)/python -m notebooks.build sync

lab: $(LAB)
	$(BIN)/jupyter lab notebooks

figures: setup  # README's timeline, from runs of its own (a few minutes)
	$(BIN)/python -m bench.timeline $(ARGS)

BENCHES := decoupling weights buffer scale trainer
TRL := .venv-trl

bench: setup $(TRL)/.installed  # the tables of docs/measurements.md (half an hour on a machine that does nothing else)
	for name in $(BENCHES); do $(BIN)/python -m bench.$$name || exit 1; done
	$(BIN)/python -m bench.time_to_accuracy --trl $(TRL)/bin/python
	$(BIN)/python -m bench.time_to_accuracy --part long

$(TRL)/.installed: requirements/trl.txt
	@$(SETUP) $(TRL) $<
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lock: setup  # all lists anew from requirements.in; ARGS=--upgrade takes the newest versions
	$(PIP) uv
	$(BIN)/python requirements/lock.py $(ARGS)

clean:
	rm -rf $(VENV) $(TRL) .cache runs
