# make run   installs prefixsim into .venv and sweeps block sizes: hit rate and TTFT in results/block_size
# make test  installs the test extra and runs ruff, mypy and pytest
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test clean

run: .venv/.installed
	$(BIN)/prefixsim sweep scenarios/sweeps/block_size.yaml

test: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# The stamps make a second call quick; a changed pyproject.toml installs again.
.venv/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@ .venv/.installed

$(BIN)/python:
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find sim workloads tests -name __pycache__ -type d -prune -exec rm -rf {} +
