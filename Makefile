# Everything runs in $(VENV), which the first target that needs it creates. `make help` lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
BENCH_VENV ?= .venv-bench
CLIP_VENV ?= .venv-clip
TRITON_VENV ?= .venv-triton

# Further arguments, for example:
#   make test PYTEST_ARGS="-k kernel -x"
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=
SPHINX_ARGS ?=
# an environment with torch for the accelerator, if it is another one:  make gpu GPU_PYTHON=python
GPU_PYTHON ?= $(BIN)/python
DEMO_METHODS ?= recommended infonce infonce-no-positive sogclr isogclr neuclip
DEMO_ARGS ?= --batch-size 64 --epochs 1 --normalizer-error 0 --prototypes 256 --tau 0.07 --limit 40000 --output runs/demo

# Without build isolation the build uses the pinned setuptools, and nothing outside constraints.txt is fetched.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

# Which tests run when. `full` marks the cases of a product that tests/covering.py does not choose for every day, `every`
# those among them that it does not choose for `make test-rest` either, `launch` what starts programs or compiles, `slow`
# what takes seconds. Plain `pytest` runs all tests in one process.
DAILY := not full and not launch and not slow
REST := (full or launch or slow) and not every
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-clip test-triton test-peers test-full lint docs bench gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.recipes  ## compare the methods on the glyph data set (two minutes on two cores, no download)
	$(BIN)/python -m recipes.train_clip --compare $(DEMO_METHODS) $(DEMO_ARGS)

test: $(VENV)/.dev  ## run the daily tests (minutes on two cores)
	$(PYTEST) -m "$(DAILY)" $(PYTEST_ARGS)

test-rest: $(VENV)/.dev  ## run what `make test` leaves out, of large products a sample
	$(PYTEST) -m "$(REST)" $(PYTEST_ARGS)

test-clip: $(CLIP_VENV)/.open_clip  ## run the tests beside open_clip, in an environment of their own
	$(CLIP_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal tests/open_clip $(PYTEST_ARGS)

test-triton: $(TRITON_VENV)/.triton  ## run the tests of the kernels in Triton, without a GPU, in an environment of their own
	$(TRITON_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal tests/triton $(PYTEST_ARGS)

test-peers: $(BENCH_VENV)/.peers  ## run the pages beside other packages, in the environment of `make bench`
	$(BENCH_VENV)/bin/python -m pytest tests/test_page_blocks.py -k "coming_from or open_clip" $(PYTEST_ARGS)

test-full: $(VENV)/.dev  ## run every test, and every case of every product
	$(PYTEST) $(PYTEST_ARGS)
	$(MAKE) test-clip
	$(MAKE) test-triton

lint: $(VENV)/.dev  ## ruff, mypy (the library and a strict user of it) and codespell
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent tests/typing/user.py
	$(BIN)/codespell

docs: $(VENV)/.docs  ## build the site into build/docs; nothing is fetched, and a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs . build/docs $(SPHINX_ARGS)

bench: $(BENCH_VENV)/.peers  ## compare with the other packages, in an environment of its own; writes benchmarks/results/
	$(BENCH_VENV)/bin/python -m benchmarks.peers $(BENCH_ARGS)

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)  ## measure on this machine's accelerator, 8 minutes; writes benchmarks/results/gpu.md
	$(GPU_PYTHON) -m benchmarks.gpu $(BENCH_ARGS)

clean:  ## remove build outputs and caches; keeps the environment and runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find compopt recipes tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt pins packages for Python 3.11 or newer, not %d.%d; pass PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras; dev contains recipes.
$(VENV)/.recipes: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation -e ".[recipes]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation -e ".[dev]"
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation -e ".[deepspeed]"
	@touch $(VENV)/.recipes $@

$(VENV)/.docs: $(VENV)/.dev
	$(INSTALL) --no-build-isolation -e ".[docs]"
	@touch $@

# transformers imports torchvision wherever it is installed, so open_clip lives apart. This environment lies on top of the
# first one: what it lacks, torch for example, is found there. Without dependencies, which would replace torch.
$(CLIP_VENV)/.open_clip: $(VENV)/.dev tests/open_clip/packages.txt tests/open_clip/layer.py
	$(PYTHON) -m venv --clear --without-pip $(CLIP_VENV)
	$(BIN)/python -m pip --python $(CLIP_VENV)/bin/python install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) \
		-r tests/open_clip/packages.txt
	$(BIN)/python -m tests.open_clip.layer $(CLIP_VENV)
	@touch $@

# Triton is large, and nothing else of the tests needs it. The same, on top of the first environment.
$(TRITON_VENV)/.triton: $(VENV)/.dev tests/triton/packages.txt tests/open_clip/layer.py
	$(PYTHON) -m venv --clear --without-pip $(TRITON_VENV)
	$(BIN)/python -m pip --python $(TRITON_VENV)/bin/python install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) \
		-r tests/triton/packages.txt
	$(BIN)/python -m tests.open_clip.layer $(TRITON_VENV)
	@touch $@

# The other packages come without their dependencies, which would replace torch; benchmarks/peers/imports.txt has the rest.
BENCH_INSTALL = $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
$(BENCH_VENV)/.peers: pyproject.toml constraints.txt benchmarks/peers/packages.txt benchmarks/peers/imports.txt tests/open_clip/layer.py
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_INSTALL) -c constraints.txt setuptools
	$(BENCH_INSTALL) -c constraints.txt --no-build-isolation -e ".[recipes]"
	$(BENCH_INSTALL) --no-deps -r benchmarks/peers/packages.txt
	$(BENCH_INSTALL) -r benchmarks/peers/imports.txt
	$(BENCH_INSTALL) -c constraints.txt pytest pytest-timeout sybil
	$(BENCH_VENV)/bin/python -m tests.open_clip.layer $(BENCH_VENV)
	@touch $@
