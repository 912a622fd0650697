# The README's commands, in any locale. Each makes its environment first, once; see .ci/setup.
# An environment of your own: `make test VENV=/path`. Another interpreter: `make setup PYTHON=/path`.
VENV ?= .venv
ARGS ?=
export VENV
export PYTHONUTF8 := 1
PY = "$(VENV)/bin/python"

.PHONY: help demo test check bench fuzz setup clean
help:
	@echo "make demo   pretrain, export, read out, detect and report on the embedded images"
	@echo "make test   the fast tests (ARGS='-k knn' goes to pytest)"
	@echo "make check  ruff and mypy"
	@echo "make bench  every benchmark (ARGS=--quick for a short look)"
	@echo "make fuzz   damaged files of every kind, 2,000 each (ARGS='xml --count 100' for a part)"
	@echo "make setup  only the environment; make clean removes what the tools left, not the environment"

setup:
	@sh .ci/setup

demo: setup
	$(PY) pretrain/run.py --arch resnet50
	$(PY) pretrain/export.py --overwrite
	$(PY) transfer/knn.py
	$(PY) transfer/retrieve.py
	$(PY) transfer/semisup.py --labeled 0.01
	$(PY) transfer/detect.py --cfg detection_configs/faster_r50.yaml
	@echo "Made: runs/pretrain/resnet50/backbone.pt, and export/ beside it"
	$(PY) transfer/report.py

test: setup
	$(PY) -m pytest $(ARGS)

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Sizes such that all of it takes less than ten minutes on two idle cores.
BENCH = "neighbors.py --data clustered --rounds 2" objectives.py input_pipeline.py \
    pretrain_step.py scaling.py "linear.py --quick"
bench: setup
	@set -e; for each in $(BENCH); do echo "== $$each"; $(PY) benchmarks/$$each $(ARGS); done

fuzz: setup
	$(PY) tests/faults/fuzz.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
