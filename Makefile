# Everything starts from a fresh clone: each target makes .venv and installs what it needs, once.
#
#   make demo                    32 CNNs on handwritten digits, torch.func and torchfunc-jax side by side
#   make test                    the tests, without the slow ones
#   make test-all                all of them: 22,500 random programs, the full demo, every workload
#   make test-versions           the core of the tests on the oldest and the newest Python, PyTorch and JAX; writes docs/versions.md
#   make test-nightly            the core of the tests on the nightly builds of PyTorch and JAX, in .venv-nightly
#   make bench                   the benchmarks; their table goes into README.md
#   make models                  models of transformers, torchvision and timm beside PyTorch; writes docs/hugging_face.md and docs/vision.md
#   make docs                    the documentation as a site, in build/site; a broken link is an error
#   make notebooks               run the notebooks and keep their output in them
#   make lint                    ruff, mypy, and which file may import which
#   make release-check           build a release, install it in empty environments, run what a stranger runs first
#   make demo PYTHON=python3.12  another interpreter
#   make demo ARGS="--members 8 --epochs 5 --json"
#
# On Linux, PyPI's torch brings CUDA. For the much smaller CPU build:
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
ARGS ?=
BIN := $(VENV)/bin
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
# Python's bytecode is kept, also where the environment says not to: without it each process of the tests needs seconds more to start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-versions test-nightly bench models docs notebooks lint release-check clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.demo
	$(BIN)/torchfunc-jax ensemble $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-all: $(VENV)/.test
	TORCHFUNC_JAX_PROGRAMS=2000 TORCHFUNC_JAX_AUTOGRAD_PROGRAMS=500 TORCHFUNC_JAX_WRITES=20000 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-versions: $(VENV)/.test
	$(BIN)/python docs/versions.py --jobs $(JOBS) $(ARGS)

# The nightly builds are newer than pyproject.toml allows, so pip warns of them.
test-nightly:
	test -x .venv-nightly/bin/python || $(PYTHON) -m venv .venv-nightly
	.venv-nightly/bin/python -m pip install --quiet -e '.[test]' --extra-index-url https://download.pytorch.org/whl/cpu
	.venv-nightly/bin/python -m pip install --quiet --upgrade --pre torch --index-url https://download.pytorch.org/whl/nightly/cpu
	.venv-nightly/bin/python -m pip install --quiet --upgrade --pre jax jaxlib \
		--extra-index-url https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/
	.venv-nightly/bin/torchfunc-jax doctor --no-check
	.venv-nightly/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not sweep" $(ARGS)

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/run.py --readme $(ARGS)

models: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt "transformers>=5,<6" torchvision "timm>=1,<2"
	$(BIN)/python docs/hugging_face.py
	$(BIN)/python docs/vision.py $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "the site is build/site/index.html"

notebooks: $(VENV)/.test
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file= --strict --disallow-any-unimported --follow-imports=silent tests/lib/typed_usage.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/structure.py

release-check: $(VENV)/.release
	$(BIN)/python tools/release_check.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-versions .venv-nightly .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info runs

# One stamp per extra: .venv/.demo, .venv/.test, .venv/.lint
$(VENV)/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@
