PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=

VENV := .venv
FLOOR := .venv-floor

# pytest ends with 5 when nothing was selected: fine for the second, serial pass.
TIMING = -m timing $(PYTEST_ARGS) || test $$? -eq 5

.PHONY: help bootstrap bootstrap-floor demo test test-floor lint format docs notebooks clean

help:
	@echo "make demo        set up $(VENV) and run the demonstration"
	@echo "make test        set up $(VENV) and run all tests (PYTEST_ARGS=... passes options on)"
	@echo "make test-floor  the same with the oldest supported Transformers, less the slow tests"
	@echo "make lint        ruff and mypy"
	@echo "make format      let ruff rewrite the files"
	@echo "make docs        render the docstrings to build/docs"
	@echo "make notebooks   run the notebooks and keep what they print"
	@echo "make clean       remove the environments and every cache"
	@echo "PYTHON=python3.12 chooses the interpreter (3.10 to 3.13)"

bootstrap:
	@$(PYTHON) scripts/bootstrap.py

bootstrap-floor:
	@$(PYTHON) scripts/bootstrap.py --floor

demo: bootstrap
	$(VENV)/bin/dspark demo

test test-floor: export HF_HUB_OFFLINE := 1

test: bootstrap
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not timing" --durations 15 $(PYTEST_ARGS)
	$(VENV)/bin/python -m pytest $(TIMING)

test-floor: bootstrap-floor
	$(FLOOR)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not timing and not slow" $(PYTEST_ARGS)

lint: bootstrap
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: bootstrap
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: bootstrap
	$(VENV)/bin/python scripts/build_docs.py build/docs

notebooks: bootstrap
	$(VENV)/bin/python scripts/run_notebooks.py

clean:
	rm -rf $(VENV) $(FLOOR) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
