# Each target makes what it needs by itself: a fresh machine needs Python 3.10 or newer and a C++20 compiler.
VENV ?= .venv
PYTHON ?= python3
INSTALL := $(VENV)/bin/python -m pip install --disable-pip-version-check
ENVIRONMENT := $(PYTHON) packaging/environment.py
CLOCK := $(PYTHON) packaging/clock.py
NATIVE_SOURCES := $(shell find src/native -name '*.cpp' -o -name '*.hpp' -o -name '*.h')
PYTEST ?=
WORKERS ?= 2

# With it each process compiles engram and all tests again: five seconds, and half a second of each that it starts.
unexport PYTHONDONTWRITEBYTECODE
# A compiler's cache, where there is one.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
endif

.DEFAULT_GOAL := help
.PHONY: help environment demo test test-deep test-tiers mutants test-long test-search check static format stubs
.PHONY: wheels wheel-test wheel-check test-aarch64 walls docs ci release-check clean oldest newest oldest-versions
.PHONY: newest-versions

help:
	@echo "make demo       train an agent on CartPole from a mapped buffer that is killed in the middle (half a minute; the first time, see README)"
	@echo "make test       the tests"
	@echo "make check      ruff, mypy, pyright, layering, stubs"
	@echo "make ci         all that runs on every submission, but for parts that nothing has changed (sixteen minutes)"
	@echo "make release-check  the same with every part"
	@echo "make bench      ours against other replay libraries (about half an hour)"
	@echo "make interop    code written for TorchRL, with only its imports changed (an environment of its own)"
	@echo "make instructions  instructions of our commonest calls, against benchmarks/instructions.json (a minute; valgrind)"
	@echo "make test-search  the property tests, ten times over with new examples"
	@echo "make test-deep  kills, damage, races, processes and many trials (ten minutes), which CI runs after \`make test\`"
	@echo "make test-ray   replay over a cluster of several node processes, some of which are killed (an environment of its own)"
	@echo "make bench-ray  replay over a cluster against what it must reach (five minutes; an environment of its own)"
	@echo "make mutants    every planted error and every protection taken out, which the tests must find (three minutes)"
	@echo "make mutation-score  600 random mutants, each against the quick tests that reach it (an hour; see tests/mutation/score.py)"
	@echo "make test-long  the long tests;  make test-native-sanitized  the native core under sanitizers"
	@echo "make oldest     short scenes with the lower bounds of pyproject.toml;  make newest: with constraints-newest.txt (a minute)"
	@echo "make other-pythons  the scenes and the tests with Python 3.10, 3.12 and 3.13, and with torch 2.6 and 2.9 (an hour and a half;"
	@echo "                5 to 8 GB of disk while it runs; ONLY=3.12 or ONLY=2.6.0: this Python or torch)"
	@echo "make newest-versions  writes constraints-newest.txt by what is newest today;  make oldest-versions: by pyproject.toml"
	@echo "make wheels     dist/: an sdist, and from it wheels for the Pythons here (three minutes);  make wheel-test tries them"
	@echo "make test-aarch64  the native core's tests under qemu (minutes; qemu-user, g++-aarch64-linux-gnu)"
	@echo "make walls      how much the classes use of each other's inside"
	@echo "make docs       the documentation site, in site/"
	@echo "make model      the lanes under the C++ memory model, each fence shown necessary (a minute; relacy-dev)"

# What runs and builds engram and its examples, and what tests and checks need besides: layers of packaging/environment.py.
RUN := -c constraints.txt torch tensordict numpy xxhash gymnasium cloudpickle matplotlib rich \
  nanobind scikit-build-core ninja cmake
DEV := -c constraints.txt pytest pytest-xdist hypothesis ruff mypy pyright[nodejs] h5py pyarrow typer imageio[ffmpeg]

# Stamps: .run and .dev are these layers, .engram is our own code.
$(VENV)/.run: constraints.txt
	@$(CLOCK) "making $(VENV) with torch and what else runs engram (two to five minutes, once)" \
	  $(ENVIRONMENT) --fresh $(VENV) "$(RUN)"
	@touch $@

$(VENV)/.engram: $(VENV)/.run pyproject.toml CMakeLists.txt $(NATIVE_SOURCES)
	@$(CLOCK) "building engram's native core (C++, one to three minutes)" \
	  $(INSTALL) --quiet --no-build-isolation --no-deps -e .
	@touch $@

# A wheel that `make wheels` built of these very sources: the demo needs no compiler then.
WHEEL := $(firstword $(wildcard dist/engram-*.whl))
ifneq ($(WHEEL),)
ifeq ($(shell find src packaging pyproject.toml CMakeLists.txt -newer $(WHEEL) -type f ! -name '*.pyc' | head -n 1),)
FRESH_WHEEL := $(WHEEL)
endif
endif

$(VENV)/.wheel: $(VENV)/.run $(FRESH_WHEEL)
	@$(CLOCK) "installing engram from dist/" \
	  $(INSTALL) --quiet --no-deps --no-index --force-reinstall --find-links dist engram
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(CLOCK) "installing the tools of tests and checks into $(VENV) (one to two minutes, once)" \
	  $(ENVIRONMENT) $(VENV) "$(RUN)" "$(DEV)"
	@touch $@

environment: $(VENV)/.engram $(VENV)/.dev

# The lower bounds of pyproject.toml, and the newest releases, over what runs engram and with its torch; scenes with each.
# The files are written anew by `make oldest-versions newest-versions`.
VERSIONS := oldest newest
$(VERSIONS:%=.venv-%/.run): .venv-%/.run: constraints.txt constraints-%.txt
	@$(CLOCK) "making .venv-$* with the $* versions (half a minute to two, once)" \
	  $(ENVIRONMENT) --fresh .venv-$* "$(RUN)" "-r constraints-$*.txt"
	@touch $@

# The engram that is built into $(VENV), which has the same Python.
$(VERSIONS:%=.venv-%/.engram): .venv-%/.engram: .venv-%/.run $(VENV)/.engram
	cp -r --remove-destination $(VENV)/lib/python*/site-packages/*engram* .venv-$*/lib/python*/site-packages/
	@touch $@

$(VERSIONS): %: .venv-%/.engram
	.venv-$*/bin/python tests/versions/scenes.py constraints-$*.txt

$(VERSIONS:%=%-versions): %-versions:
	$(PYTHON) packaging/versions.py $*

# ONLY="3.12 2.6.0": the runs with this Python and those with this torch; PARTS="scenes quick": no others. `exec`: a signal that
# ends make must reach the program, which then removes its environment.
.PHONY: other-pythons
other-pythons:
	WORKERS=$(WORKERS) exec $(PYTHON) packaging/other_pythons.py $(ONLY) $(if $(PARTS),--parts $(PARTS))

# With a checkout that is built in place, that; else with the wheel, where one fits; else it is built.
demo: $(if $(and $(FRESH_WHEEL),$(if $(wildcard $(VENV)/.engram),,yes)),$(VENV)/.wheel,$(VENV)/.engram)
	@$(VENV)/bin/python examples/dqn_cartpole.py

test: $(VENV)/.engram $(VENV)/.dev
	$(IN_MEMORY) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not long and not deep" $(PYTEST)

# The folders of tests lie in memory where it has room: a sync to a disk takes longer than most tests. CI has them on a disk.
IN_MEMORY := $(shell [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 4000000 ] 2>/dev/null && \
  echo PYTEST_DEBUG_TEMPROOT=/dev/shm)

test-deep: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "deep and not long" $(PYTEST)

# Both in one run, which collects once.
test-tiers: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not long" --tiers --seconds build/ci/modules.json --durations=20 $(PYTEST)

test-long: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m pytest --hang-timeout=0 -m long $(PYTEST)

mutants: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m pytest -q -n $(WORKERS) -m mutant --mutants $(PYTEST)
	$(MAKE) --no-print-directory model

# MUTANTS=600 SEED=0 ONLY=engram/store or a package, REPEAT="numbers", MINUTES=120, DEEP=1 with the deep tests, UPDATE=1
# writes tests/mutation/score.jsonl. Goes on where it was interrupted.
.PHONY: mutation-score mutation-compare call-trace
MUTANTS ?= 600
SEED ?= 0
mutation-score: $(VENV)/.engram $(VENV)/.dev
	PATH=$(abspath $(VENV))/bin:$$PATH PYTHONPATH=tests $(VENV)/bin/python -m mutation.score run --count $(MUTANTS) \
	  --seed $(SEED) --workers $(WORKERS) $(if $(ONLY),--only $(ONLY)) $(if $(REPEAT),--numbers $(REPEAT)) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(if $(DEEP),--deep) $(if $(UPDATE),--update)

# What the newest run found against tests/mutation/score.jsonl: kills that are lost, mutants that are gone, by package.
mutation-compare: $(VENV)/.engram
	PYTHONPATH=tests $(VENV)/bin/python -m mutation.score compare $(FILE)

# Writes the number of Python calls of the commonest calls, which tests/test_call_trace.py compares.
call-trace: $(VENV)/.engram
	PYTHONPATH=tests $(VENV)/bin/python -m contracts.call_trace

test-search: $(VENV)/.engram $(VENV)/.dev
	for round in $$(seq $(or $(ROUNDS),10)); do \
	  HYPOTHESIS_PROFILE=search $(VENV)/bin/python -m pytest -q -m "hypothesis and not long and not deep" $(PYTEST) || exit 1; done

walls: $(VENV)/.engram
	$(VENV)/bin/python tests/walls.py

# What they say of all sources is deep.
OF_SOURCES := tests/test_default_device.py tests/test_user_paths.py tests/data/checkpointers/test_no_code_runs.py

check: static
	$(VENV)/bin/python -m pytest -q tests/test_layering.py tests/native/test_stubs.py $(OF_SOURCES)

static: $(VENV)/.engram $(VENV)/.dev
	$(VENV)/bin/python -m ruff check src tests benchmarks examples packaging
	$(VENV)/bin/python -m ruff format --check src tests benchmarks examples packaging
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python packaging/wheels.py abi

format: $(VENV)/.dev
	$(VENV)/bin/python -m ruff check --fix src tests benchmarks examples packaging
	$(VENV)/bin/python -m ruff format src tests benchmarks examples packaging

stubs: $(VENV)/.engram
	$(VENV)/bin/python -m nanobind.stubgen -m engram._native -o src/engram/_native.pyi

wheels:
	$(PYTHON) packaging/wheels.py build

# Each wheel of dist/ in a fresh environment without a compiler: the first example, or without torch the native tests.
wheel-test:
	$(PYTHON) packaging/wheels.py test

# The same for one Python.
wheel-check:
	$(PYTHON) packaging/wheels.py build own
	$(PYTHON) packaging/wheels.py test own

# The native core's tests under an emulator (minutes; Debian's qemu-user and g++-aarch64-linux-gnu).
test-aarch64: $(VENV)/.engram
	$(VENV)/bin/python packaging/aarch64.py $(PYTEST)

DOCS_VENV ?= .venv-docs
DOCS_PYTHON := $(DOCS_VENV)/bin/python
$(DOCS_VENV)/.run: packaging/requirements-docs.txt
	@echo "making $(DOCS_VENV) with what builds the site: half a minute, once"
	$(ENVIRONMENT) --fresh $(DOCS_VENV) "-r packaging/requirements-docs.txt"
	@touch $@

# Fails where a link leads nowhere, or a page is in no menu.
docs: $(DOCS_VENV)/.run
	NO_MKDOCS_2_WARNING=1 $(DOCS_PYTHON) -m mkdocs build --quiet
	@echo "site/index.html; \`$(DOCS_PYTHON) -m http.server -d site\` shows it with its search"

# Parts beside each other, a table of their times at the end; packaging/ci.py says what a part can see.
ci:
	$(PYTHON) packaging/ci.py

release-check:
	$(PYTHON) packaging/ci.py --all

clean:
	rm -rf build dist site $(DOCS_VENV) $(VENV) .venv-layers .venv-bench .venv-ray .venv-ray-peers .venv-reverb \
	  $(VERSIONS:%=.venv-%)

include benchmarks/bench.mk
include tests/cluster/ray.mk
-include native.mk
