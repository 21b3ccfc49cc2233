# make setup | run | test | test-slow | figures | bench | notebooks | sync-notebooks | lab | lint | lock | clean
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
REQUIREMENTS := $(shell nvidia-smi >/dev/null 2>&1 && echo requirements/gpu.txt || echo requirements/cpu.txt)
STAMP := $(VENV)/.installed-$(notdir $(basename $(REQUIREMENTS)))
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(REQUIREMENTS))
NOTEBOOKS := $(VENV)/.installed-notebooks
LAB := $(VENV)/.installed-lab
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
ARGS ?=

.PHONY: run setup test test-slow figures bench notebooks sync-notebooks lab lint lock clean

run: setup
	$(BIN)/python tba_min.py $(ARGS)

setup: $(STAMP)

$(STAMP): $(REQUIREMENTS)
	@echo "setting up $(VENV) from $(REQUIREMENTS): about 2 GB, a few minutes, once ..."
	@$(PYTHON) -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit("tba_min: the pinned packages are for Python 3.11, this is " + sys.version.split()[0] + "; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
ifeq ($(REQUIREMENTS),requirements/cpu.txt)
	$(PIP) --no-deps $(TORCH) 2>$(VENV)/torch.log || $(PIP) --no-deps --index-url https://download.pytorch.org/whl/cpu $(TORCH) || { cat $(VENV)/torch.log; exit 1; }
	$(PIP) --no-deps -r $(REQUIREMENTS)
else
	$(PIP) -r $(REQUIREMENTS)
endif
	@touch $@
	@echo "set up."

# what only the notebooks need; on a CPU the lists are complete together
$(NOTEBOOKS): requirements/notebooks.txt | setup
	$(PIP) $(if $(findstring cpu,$(REQUIREMENTS)),--no-deps) -r $<
	@touch $@

$(LAB): requirements/lab.txt $(NOTEBOOKS)
	$(PIP) $(if $(findstring cpu,$(REQUIREMENTS)),--no-deps) -r $<
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

bench: setup $(TRL)/.installed  # the tables of README's "Measured" (half an hour on a machine that does nothing else)
	for name in $(BENCHES); do $(BIN)/python -m bench.$$name || exit 1; done
	$(BIN)/python -m bench.time_to_accuracy --trl $(TRL)/bin/python
	$(BIN)/python -m bench.time_to_accuracy --part long

$(TRL)/.installed: requirements/trl.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lock:
	$(PYTHON) requirements/lock.py

clean:
	rm -rf $(VENV) $(TRL) .cache runs
