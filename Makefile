# The project's whole workflow. Every target makes what it needs; `make demo` and `make test` are the two to start with.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPTS ?=
SMOLLM2 := build/smollm2-135m
export OMP_NUM_THREADS ?= $(shell nproc)

.PHONY: demo test test-all test-conditions chaos lint types bench bench-serving gpu-check venv clean

demo: venv $(SMOLLM2)/config.json  ## serve real prompts three ways and compare
	$(BIN)/python -m examples.demo $(if $(PROMPTS),--prompts $(PROMPTS))

test: venv lint types  ## everything that runs in under 20 minutes on two cores
	$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile

test-all: venv lint types  ## also what takes longer: the large chi-square samples, the full kernel comparison
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-conditions: venv  ## what others' users reported of schedulers like this one, a test each
	$(BIN)/python -m pytest tests/conditions -n 2 --dist loadfile

chaos: venv  ## ten thousand requests of every kind at a server whose scheduler fails, in bursts
	$(BIN)/python -m tests.chaos

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.allocate
	$(BIN)/python -m benchmarks.overhead

bench-serving: venv $(SMOLLM2)/config.json  ## every kind of server at 1 to 32 users: about half an hour, with nothing beside it
	$(BIN)/python -m benchmarks.serving $(if $(PROMPTS),--prompts $(PROMPTS),--left-out 1)

gpu-check:  ## the allocation kernel on this machine's GPU, with a PYTHON whose torch can use it (.venv's cannot)
	$(PYTHON) -m benchmarks.gpu_check

venv: $(VENV)/ready

# Reused while the requirements and the package's entry points are unchanged.
$(VENV)/ready: requirements/cpu.txt setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements/sglang.txt -e .
	touch $@

$(SMOLLM2)/config.json: examples/smollm2/convert.py | venv
	$(BIN)/python -m examples.smollm2.convert --out $(SMOLLM2)

clean:
	rm -rf build $(VENV)
