# One command from a fresh clone: `make train`. `make help` lists the rest.
# Needs Python 3.11 or newer, make and git. Everything is installed into $(VENV), nothing elsewhere.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==//p' requirements.lock)
UV := uv==0.13.9
# Packages that no training and few tests import: two fifths of what there would be to compile.
SELDOM := ray|moto|sqlalchemy|pip|mypyc?|fontTools|networkx|onnxruntime|onnxscript|playwright
# Where pip is told to look for packages, as lines of a requirements file: uv does not read pip's settings. Where these
# name two main indexes uv refuses, and pip decides.
INDEXES = PIP_QUIET=0 $(BIN)/python -m pip config list | sed -E "s/\\\\n/ /g; s/\.no-index='(1|[Tt]rue|[Yy]es|[Oo]n|t|y)'/.no-index='='/; /\.no-index='[^=]/d" | \
	sed -nE "s/^(global|install|:env:)\.(index-url|extra-index-url|find-links|no-index|only-binary|no-binary)='(.*)'$$/\2 \3/p" | \
	while read -r option values; do for value in $$values; do echo "--$$option $${value\#=}"; done; done
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: bench bench-gpu gpu help train train-quick train-full train-resume hw-report generate-data cycle latin test unit soak e2e lint
.PHONY: lab report refresh lock install clean stale

help:
	@echo 'make train          train params/quick.yaml on the sample set (about 10 minutes on two cores), or resume it'
	@echo 'make train-quick    the same'
	@echo 'make train-resume   resume the newest unfinished training, of any preset'
	@echo 'make train-full     train params/small.yaml, for a GPU (both: STEPS=, TARGET_LOSS=)'
	@echo 'make lab            JupyterLab, on copies of the notebooks in reports/lab/'
	@echo 'make cycle          self-play (params/cycle/) from random weights, about half an hour, or on from START=run'
	@echo 'make latin          train params/latin_quick.yaml on Latin squares and evaluate it, a few minutes; resumes when stopped'
	@echo 'make generate-data  make a training set with Stockfish: 1,000 games, or GAMES=; resumes when stopped'
	@echo 'make report         write report.html of every run again, or of RUN='
	@echo ''
	@echo 'make hw-report      what this machine is, how fast it is, and what auto chooses on it'
	@echo 'make bench          benchmark this machine: training, inference, loader, search; about six minutes'
	@echo 'make bench-gpu      benchmark a CUDA GPU, compiled and not'
	@echo 'make gpu            check that a CUDA GPU computes correctly; PART=attention selects tests, DEVICE=cpu is a dry run'
	@echo ''
	@echo 'make test           ruff, mypy, unit tests, notebooks through papermill and nbval'
	@echo 'make lint           ruff and mypy only'
	@echo 'make soak           the long versions of the tests'
	@echo 'make e2e            JupyterLab in a real browser; screenshots in reports/e2e/'
	@echo 'make refresh        execute the committed notebooks again, in place'
	@echo 'make lock           resolve requirements.lock again from pyproject.toml'
	@echo 'make install        only set up $(VENV)'
	@echo 'make clean          remove caches (not $(VENV), not reports)'
	@echo ''
	@echo 'Variables: PYTHON=python3.12   VENV=folder   TORCH_INDEX=index of another build of torch'

# The stamp makes the second `make` start at once; a changed lock or pyproject, or another TORCH_INDEX, installs again.
ifdef TORCH_INDEX
ifneq ($(TORCH_INDEX),$(shell cat $(VENV)/.torch-index 2>/dev/null))
$(STAMP): stale
endif
endif

# Bytecode (some files are no Python) and the search are compiled here, not as a user waits for a first move.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: Python 3.11 or newer is needed, not '$(PYTHON)';" \
		"name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) (once, about a minute) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifdef TORCH_INDEX
	$(BIN)/python -m pip uninstall --quiet --yes torch
	$(BIN)/python -m pip install --quiet --index-url $(TORCH_INDEX) torch==$(TORCH)
	@echo '$(TORCH_INDEX)' > $(VENV)/.torch-index
endif
	@$(BIN)/python -m pip install --quiet $(UV) && { $(INDEXES); cat requirements.lock; } | \
		$(BIN)/uv pip install --quiet --no-cache --python $(BIN)/python --index-strategy unsafe-best-match --requirement - || { \
		echo "uv cannot install here, so pip does, which takes longer" >&2; \
		$(BIN)/python -m pip install --quiet --no-compile --requirement requirements.lock; }
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@echo isready | $(BIN)/matrixlib-uci --checkpoint shipped --device cpu > /dev/null & \
		$(BIN)/python -m compileall -qq -j 0 -x 'site-packages/(.*/tests?|$(SELDOM))/' $(VENV)/lib || true; wait
	@touch $@

install: $(STAMP)

quote = '$(subst ','\'',$(1))'
LAUNCH = @$(BIN)/python -m matrixlib.runs.launch
LIMITS = $(if $(STEPS),--steps $(call quote,$(STEPS))) $(if $(TARGET_LOSS),--target-loss $(call quote,$(TARGET_LOSS)))
train: $(STAMP)
	$(LAUNCH) --preset quick $(LIMITS)

train-quick: train

train-resume: $(STAMP)
	$(LAUNCH) --resume

train-full: $(STAMP)
	$(LAUNCH) --preset small $(LIMITS)

hw-report: $(STAMP)
	@$(BIN)/python -m matrixlib.bench --hardware

GAMES ?= 1000
generate-data: $(STAMP)
	@mkdir -p reports/sample
	$(BIN)/papermill notebooks/sample.ipynb reports/sample/sample.ipynb -p games $(call quote,$(GAMES)) -p games_per_chunk 20 \
		--no-progress-bar --stdout-file - --stderr-file -

CYCLE = cycle-$(if $(START),further-$(notdir $(START:/=)),quick)
cycle: $(STAMP)
	@mkdir -p $(call quote,reports/$(CYCLE))
	$(BIN)/papermill notebooks/cycle.ipynb $(call quote,reports/$(CYCLE)/cycle.ipynb) -p preset $(if $(START),further,quick) \
		-p cycle $(call quote,$(CYCLE)) $(if $(START),-y $(call quote,overrides: {start: "$(START)"})) --no-progress-bar --stdout-file - --stderr-file -

latin: $(STAMP)
	@mkdir -p reports/latin
	$(BIN)/papermill notebooks/latin.ipynb reports/latin/latin.ipynb -p preset latin_quick --no-progress-bar \
		--stdout-file - --stderr-file -

# mypy beside the tests, which are four processes for two cores, as many tests wait for something. Each file of tests is
# in one of them, and computes on one thread.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 lint unit

# Hundreds of processes import the package and call numba's functions, which are compiled once for all of them.
unit: export PYTHONDONTWRITEBYTECODE :=
unit: $(STAMP)
	@$(BIN)/python tests/warm.py
	$(BIN)/python -m pytest tests notebooks --nbval -ra -n 4 --dist loadfile --no-loadscope-reorder

soak: $(STAMP)
	$(BIN)/python -m pytest tests -ra -m soak

e2e: $(STAMP)
	$(BIN)/python -m pytest tests/test_browser.py -ra -m e2e

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Copies, of each commit its own: running a notebook writes into it, and the committed ones hold what CI compares.
COPIES = reports/lab/$(shell git describe --always 2>/dev/null || echo copies)
lab: $(STAMP)
	@test -d $(COPIES) || { mkdir -p reports/lab && cp -R notebooks $(COPIES); }
	$(BIN)/jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/$(COPIES)/train.ipynb

bench: $(STAMP)
	@$(BIN)/python -m matrixlib.bench

bench-gpu: $(STAMP)
	@$(BIN)/python -m matrixlib.bench --device cuda

DEVICE ?= cuda
gpu: export MATRIXLIB_CARD := $(DEVICE)
gpu: export CUBLAS_WORKSPACE_CONFIG := :4096:8
gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu -ra -k $(call quote,$(PART))

report: $(STAMP)
	@$(BIN)/python -m matrixlib.runs.report $(if $(RUN),$(call quote,$(RUN)))

# Each in a reports root of its own: eval.ipynb would else pick up a run of yours, or of another notebook.
refresh: $(STAMP)
	for notebook in notebooks/*.ipynb; do \
	  MATRIXLIB_REPORTS="$$(mktemp -d)" MATRIXLIB_LIVE=0 MATRIXLIB_DEVICE=cpu \
	  $(BIN)/jupyter nbconvert --to notebook --execute --inplace $$notebook || exit 1; done

# torch's own metadata brings the CUDA packages that its Linux build needs; pinning them would force gigabytes on
# machines whose build has none.
lock: $(STAMP)
	$(BIN)/python -m pip install --quiet $(UV)
	echo 'torch==$(TORCH)' > $(VENV)/torch.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --upgrade --no-header --no-annotate \
		--no-emit-index-url --constraint $(VENV)/torch.txt pyproject.toml --output-file $(VENV)/lock.txt
	{ echo '# Exact versions for every platform, made by `make lock` from pyproject.toml.'; \
	  grep -vE '^(nvidia-|cuda-|triton)' $(VENV)/lock.txt; } > requirements.lock

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build
	find matrixlib tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
