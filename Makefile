# Each target makes what it needs by itself: a fresh machine needs Python 3.10 or newer and a C++20 compiler.
VENV ?= .venv
PYTHON ?= python3
INSTALL := $(VENV)/bin/python -m pip install --disable-pip-version-check
NATIVE_SOURCES := $(shell find src/native -name '*.cpp' -o -name '*.hpp' -o -name '*.h')
PYTEST ?=
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test test-deep mutants test-long test-search check format stubs clean

help:
	@echo "make demo       train an agent on CartPole from a mapped buffer that is killed in the middle (about 3 minutes)"
	@echo "make test       the tests"
	@echo "make check      ruff, mypy, pyright, layering, stubs"
	@echo "make bench      ours against other replay libraries (about twenty minutes)"
	@echo "make instructions  instructions of our commonest calls, against benchmarks/instructions.json (a minute; valgrind)"
	@echo "make test-search  the property tests, ten times over with new examples"
	@echo "make test-deep  kills, damage, races, processes and many trials (ten minutes), which CI runs after \`make test\`"
	@echo "make mutants    every planted error and every protection taken out, which the tests must find (three minutes)"
	@echo "make test-long  the long tests;  make test-native-sanitized  the native core under sanitizers"
	@echo "make model      the lanes under the C++ memory model, each fence shown necessary (a minute; relacy-dev)"

# Stamps: .run is what builds and runs engram and its examples, .dev what tests and checks need besides.
$(VENV)/.run: constraints.txt
	@echo "making $(VENV) with torch and what else runs engram, in the tested versions: a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt torch tensordict numpy xxhash gymnasium cloudpickle matplotlib rich \
	  nanobind scikit-build-core ninja cmake
	@touch $@

$(VENV)/.engram: $(VENV)/.run pyproject.toml CMakeLists.txt $(NATIVE_SOURCES)
	@echo "building engram's native core into $(VENV): under a minute"
	$(INSTALL) --quiet --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing the tools of tests and checks into $(VENV): a minute, once"
	$(INSTALL) -c constraints.txt pytest pytest-xdist hypothesis ruff mypy "pyright[nodejs]" h5py pyarrow
	@touch $@

demo: $(VENV)/.engram
	$(VENV)/bin/python examples/dqn_cartpole.py

test: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not long and not deep" $(PYTEST)

test-deep: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "deep and not long" $(PYTEST)

test-long: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m long $(PYTEST)

mutants: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m pytest -q -n $(WORKERS) -m mutant --mutants $(PYTEST)
	$(MAKE) --no-print-directory model

test-search: $(VENV)/.engram $(VENV)/.dev
	for round in $$(seq $(or $(ROUNDS),10)); do \
	  HYPOTHESIS_PROFILE=search $(VENV)/bin/python -m pytest -q -m "hypothesis and not long and not deep" $(PYTEST) || exit 1; done

check: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m ruff check src tests benchmarks examples
	$(VENV)/bin/python -m ruff format --check src tests benchmarks examples
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python -m pytest -q tests/test_layering.py tests/native/test_stubs.py

format: $(VENV)/.dev
	$(VENV)/bin/python -m ruff check --fix src tests benchmarks examples
	$(VENV)/bin/python -m ruff format src tests benchmarks examples

stubs: $(VENV)/.engram
	$(VENV)/bin/python -m nanobind.stubgen -m engram._native -o src/engram/_native.pyi

clean:
	rm -rf build $(VENV) .venv-bench

include benchmarks/bench.mk
-include native.mk
