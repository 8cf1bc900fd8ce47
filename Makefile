# setup: .venv with everything · test: checks and tests · demo: a worked example · bench: what things cost here
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup test check demo bench clean

setup: .venv/ready

# torch first and pinned: the rest then takes it as it is.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ngramloss needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[all]'
	touch $@

test: check
	$(BIN)/pytest

check: setup
	$(BIN)/ruff check
	$(BIN)/mypy

demo: setup
	$(BIN)/ngramloss explain --reference "the cat sat on the mat" --candidate "the cat lay on the mat" \
	  --objective "ce + matches(2) + rewards(2)"
	$(BIN)/python examples/own_loop.py

bench: setup
	$(BIN)/ngramloss bench ngrams
	$(BIN)/ngramloss bench head

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
