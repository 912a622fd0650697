# The README's commands, in any locale. Each makes its environment first, once; see .ci/setup.
# An environment of your own: `make test VENV=/path`. Another interpreter: `make setup PYTHON=/path`.
VENV ?= .venv
ARGS ?=
export VENV
export PYTHONUTF8 := 1
PY = "$(VENV)/bin/python"

.PHONY: help demo test check bench kills fuzz setup clean
help:
	@echo "make demo   pretrain, read out, detect, export and report on the embedded images"
	@echo "make test   the fast tests (ARGS='-k knn' goes to pytest)"
	@echo "make check  ruff, mypy, and the documents' tables against docs/results"
	@echo "make bench  every benchmark (ARGS=--quick for a short look)"
	@echo "make kills  1,000 kills over all commands (ARGS='embed --kills 20' for a part)"
	@echo "make fuzz   20,000 damaged files of all kinds (ARGS='xml --count 100' for a part)"
	@echo "make setup  only the environment; make clean removes what the tools left, not the environment"

setup:
	@sh .ci/setup

# ResNet-18 learns enough in minutes to be told from the same network untrained.
DEMO_RUN = "$${INSTDISC_RUNS:-runs}/pretrain/resnet18"
demo: setup
	$(PY) pretrain/run.py --arch resnet18
	$(PY) transfer/knn.py --weights $(DEMO_RUN)
	$(PY) transfer/retrieve.py --weights $(DEMO_RUN)
	$(PY) transfer/semisup.py --weights $(DEMO_RUN) --labeled 0.1
	$(PY) transfer/detect.py --cfg faster_r18 --init scratch
	$(PY) transfer/detect.py --cfg faster_r18 --weights $(DEMO_RUN)
	$(PY) pretrain/export.py --weights $(DEMO_RUN) --overwrite
	$(PY) transfer/report.py

test: setup
	$(PY) -m pytest $(ARGS)

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) docs/tables.py --check

# Sizes such that all of it takes less than ten minutes on two idle cores.
BENCH = "neighbors.py --data clustered --rounds 2" objectives.py input_pipeline.py \
    pretrain_step.py "pretrain_epoch.py --rounds 3" scaling.py "linear.py --quick" checkpoint.py \
    monitor.py listing.py one_rank.py "readouts.py --rounds 2"
bench: setup
	@set -e; for each in $(BENCH); do echo "== $$each"; $(PY) benchmarks/$$each $(ARGS); done

# A whole run puts its counts into the documents.
RECORD = --record docs/results/reliability.json
kills: setup
	$(PY) tests/faults/killer.py $(or $(ARGS),$(RECORD))
	$(PY) docs/tables.py

fuzz: setup
	$(PY) tests/faults/fuzz.py $(or $(ARGS),$(RECORD))
	$(PY) docs/tables.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
