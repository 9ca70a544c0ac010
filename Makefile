# `make demo` and `make test` do all their own set-up in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test readme clean

demo: .venv/ready
	$(BIN)/vmd reproduce two-token --quick --overwrite

test: .venv/ready
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2

readme: .venv/ready
	$(BIN)/vmd report
	$(BIN)/vmd report --readme docs/likelihood.md
	$(BIN)/vmd report --readme docs/performance.md
	$(BIN)/vmd report --readme docs/reproduce.md
	$(BIN)/vmd report --readme docs/sudoku.md
	$(BIN)/vmd report --readme docs/text.md

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "vmd needs Python 3.11 or newer: set PYTHON=..."; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv
