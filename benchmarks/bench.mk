# `make bench`: ours against its peers, in an environment of their own. Included by the Makefile.
#   make bench                          everything, about half an hour
#   make bench BENCH=--publish          and write the figures into README.md, the pages of benchmarks/ and the chart
#   make bench BENCH=--quick            a look, a few minutes
#   make bench BENCH="--only programs"  one case; see `python -m benchmarks.bench --help`
#   make instructions                  counts the instructions of our commonest calls and compares them with the file
#   make instructions UPDATE=1         writes the file; see `python -m benchmarks.instructions --help`
BENCH_VENV ?= .venv-bench
BENCH_PYTHON := $(BENCH_VENV)/bin/python
BENCH_PEERS := benchmarks/requirements-peers.txt
BENCH_FLOOR := benchmarks/native/floor.so
CXX ?= g++
BENCH ?=

.PHONY: bench
bench: $(BENCH_VENV)/.engram $(BENCH_FLOOR)
	PYTHONPATH=. $(BENCH_PYTHON) -m benchmarks.bench $(BENCH)

$(BENCH_VENV)/.peers: $(BENCH_PEERS) constraints.txt
	@echo "making $(BENCH_VENV) with the peers: a few minutes, once"
	$(ENVIRONMENT) --fresh $(BENCH_VENV) "$(RUN)" "-r $(BENCH_PEERS)"
	@touch $@

# The engram that is built into $(VENV), which has the same Python.
$(BENCH_VENV)/.engram: $(BENCH_VENV)/.peers $(VENV)/.engram
	cp -r --remove-destination $(VENV)/lib/python*/site-packages/*engram* $(BENCH_VENV)/lib/python*/site-packages/
	@touch $@

$(BENCH_FLOOR): benchmarks/native/floor.cpp $(wildcard benchmarks/native/*.hpp)
	$(CXX) -std=c++20 -O3 -Wall -Wextra -shared -fPIC $< -o $@

# Code that was written for TorchRL, with only its imports changed, and trainers of other libraries with our buffers; the
# tables at the end say what passes, and why not. Each submission runs what is not `theirs`.
.PHONY: interop
interop: $(BENCH_VENV)/.engram
	$(BENCH_PYTHON) -m pytest -n $(or $(WORKERS),2) --dist worksteal tests/clients $(PYTEST)

# Counts of $(VENV)'s engram, with the tested versions; the peers have no part in them.
.PHONY: instructions
instructions: $(VENV)/.engram
	@$(VENV)/bin/python -m benchmarks.instructions $(if $(UPDATE),--update) $(INSTRUCTIONS)
