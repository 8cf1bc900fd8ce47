# smoke: a signal in a minute · quick: tests for while you work · test: checks and tests · test-all: every lane · setup: .venv with everything
# demo: train, score, look at the page · site: the documentation · bench: what things cost here · lanes of tests: CONTRIBUTING.md
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup smoke quick test test-doctests test-thorough test-docs test-adopt test-fuzz test-site test-gpu test-ray test-package distributions others test-all test-oldest mutants check demo site tour bench clean

setup: .venv/ready

# The demo takes only what it needs: no Triton, no tools for tests. torch first and pinned: the rest then takes it as it is.
.venv/ready: EXTRAS := all
# Tests look at a TRL that asks the model for its loss, too; those since 1.15 do not.
.venv/ready: AFTER := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/older trl==1.14.2
.venv/demo: EXTRAS := hf,score,report
.venv/site: EXTRAS := site
.venv/ready .venv/demo .venv/site: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ngramloss needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[$(EXTRAS)]'
	$(AFTER)
	touch $@

# Lanes. Two processes share the tests; each computes in one thread, or they would wait for each other.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal
QUICK = not (slow or browser or thorough or docs or adopt or fuzz or gpu or ray or package or site)

# A signal within a minute: losses, terms, settings, readers, the order of imports, and a tiny train, generate and score.
SMOKE = loss/test_loss loss/test_schedule loss/test_labels data/test_plan test_registries test_recipe data/test_formats \
  metrics/test_rouge scoring/test_score test_errors test_plugins project/test_layout
smoke: setup
	$(PYTEST) -m "$(QUICK)" $(SMOKE:%=tests/%.py)

quick: setup
	$(PYTEST) -m "$(QUICK)"

test: check
	$(PYTEST) -m "not (thorough or docs or adopt or fuzz or ray or package or site)"

# The examples in docstrings.
test-doctests: setup
	$(BIN)/pytest --doctest-modules -p conftest src --ignore=src/ngramloss/trainers/axolotl.py

# The cases of which `make test` runs a few: every family in drawn searches, fifty kills of a training, every split.
test-thorough: setup
	$(PYTEST) -m "thorough and not (docs or adopt or fuzz or ray or package or site)"

# One process: the commands of a page follow each other.
test-docs: setup
	$(BIN)/pytest -m "docs"

test-adopt: setup
	$(PYTEST) -m "adopt and not docs"

# axolotl and ms-swift for test-adopt, which skips them otherwise. They ask for older packages than are installed, so they
# come without what they ask for, and only with what their trainers import.
others: .venv/others/ready
.venv/others/ready: .venv/ready constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade -c constraints.txt --target .venv/others \
	  axolotl addict colorama llvmlite numba sentencepiece charset-normalizer idna \
	  ms-swift modelscope modelscope-hub cffi certifi cryptography einops json-repair pycparser requests simplejson urllib3
	touch $@

# Ten thousand damaged files.
test-fuzz: setup
	$(PYTEST) -m "fuzz and not (docs or adopt)"

# The site: its links, its pages in a browser, and the notebook, which it shows.
test-site: .venv/ready .venv/site
	$(PYTEST) -m "site and not (docs or adopt or fuzz or ray or package)"

# On a machine with a GPU: in order, in random order, and eight processes at once. Its log belongs into docs/dev/gpu.md.
test-gpu: setup
	$(BIN)/pytest tests/gpu
	SHUFFLE=1 $(BIN)/pytest tests/gpu
	SHUFFLE=2 $(BIN)/pytest tests/gpu -n 8

# Ray Data. Setup does not install Ray, a large package; .ci/run leaves this lane out.
test-ray: .venv/ray
	$(BIN)/pytest -m "ray and not (docs or adopt or fuzz)"

.venv/ray: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[ray]'
	touch $@

# The distributions in an empty environment, into which pip installs about 1.5 GB; .ci/run leaves this lane out, the workflow
# of a release runs it.
test-package: distributions
	$(BIN)/pytest -m "package and not (docs or adopt or fuzz or ray)"

# What a release uploads, in dist/: the sdist, and the wheel that is built from it.
distributions: .venv/build
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .

.venv/build: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt build
	touch $@

test-all: test test-doctests test-thorough test-docs test-adopt test-fuzz test-site

# The quick lane on the oldest versions that pyproject.toml allows.
test-oldest: BIN := .venv-oldest/bin
test-oldest: .venv-oldest/ready
	$(PYTEST) -m "$(QUICK)"

.venv-oldest/ready: pyproject.toml constraints-oldest.txt
	test -x .venv-oldest/bin/pip || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt torch
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt --editable '.[hf,metrics,report,kernels,fast,test]' trl
	touch $@

# Small mistakes that the tests must notice; make mutants K=cache: those whose name contains "cache".
mutants: setup
	$(BIN)/python tests/run_mutants.py -n 2 -k "$(K)"

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy

# The paper's experiment at a small scale, from the base model to the page. Stopped, the same command continues it.
demo: .venv/demo
	$(BIN)/ngramloss reproduce cases --data newswire --objectives ce "ce + matches(2,3,4)" "ce + rewards(2,3,4)" \
	  --runs runs/demo -o report

# The documentation as a site: build/site/index.html, which opens without a server and asks no other host for anything.
site: .venv/site
	$(BIN)/python website/build.py

# Runs the notebook and keeps what it prints; the site shows that.
tour: setup .venv/site
	$(BIN)/python website/notebook.py examples/tour.ipynb

bench: setup
	$(BIN)/ngramloss bench ngrams
	$(BIN)/ngramloss bench head

clean:
	rm -rf .venv .venv-oldest build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
