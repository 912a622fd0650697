# The README's commands. Each makes its environment first, once; see .ci/setup.
# An environment of your own: `make test VENV=/path`. Another interpreter: `make setup PYTHON=/path`.
VENV ?= .venv
ARGS ?=
export VENV
PY = "$(VENV)/bin/python"

.PHONY: help demo test check bench setup clean
help:
	@echo "make demo   pretrain and export on the embedded images"
	@echo "make test   the fast tests (ARGS='-k knn' goes to pytest)"
	@echo "make check  ruff and mypy"
	@echo "make bench  every benchmark (ARGS=--quick for a short look)"
	@echo "make setup  only the environment; make clean removes what the tools left, not the environment"

setup:
	@sh .ci/setup

demo: setup
	$(PY) pretrain/run.py --arch resnet50
	$(PY) pretrain/export.py --overwrite
	@echo "Made: runs/pretrain/resnet50/backbone.pt, and for timm, Detectron2 and torchvision export/ beside it"

test: setup
	$(PY) -m pytest $(ARGS)

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup
	@set -e; for file in $$(grep -ls __main__ benchmarks/*.py); do \
	    echo "== $$file"; $(PY) "$$file" $(ARGS); done

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
