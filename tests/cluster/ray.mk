# `make test-ray`: replay on a real local cluster of Ray, in an environment of its own. Included by the Makefile.
#   make test-ray PYTEST="-k kills"    some of it
#   make test-ray RAY_WORKERS=0        one test after the other, on one cluster; else there are two clusters beside each other
# Longer trials: ENGRAM_RAY_KILLS=20,5,5,2000000 (shards, nodes, producers, rows), ENGRAM_RAY_COLLECTOR_KILLS=5,2000000,2
# (collectors, frames, nodes), ENGRAM_RAY_AWAY=10,3 (shards, nodes), ENGRAM_RAY_SAVE_KILLS=10, ENGRAM_RAY_LONG=1.
#   make bench-ray                     what it must reach, by the clock and by CPU time (five minutes)
#   make bench-ray CLUSTER="--rounds 3 --only calls"
#   make bench-ray-peers               the environments of TorchRL's Ray buffer and of Reverb, which it then measures too
RAY_VENV ?= .venv-ray
RAY_PYTHON := $(RAY_VENV)/bin/python
# Tests wait for processes that start, and for nodes to be noticed as gone, half of the time.
RAY_WORKERS ?= 2

.PHONY: test-ray bench-ray bench-ray-peers
test-ray: $(RAY_VENV)/.engram
	$(RAY_PYTHON) -m pytest -n $(RAY_WORKERS) --dist loadfile tests/cluster $(PYTEST)

$(RAY_VENV)/.run: constraints.txt tests/cluster/ray.mk
	@echo "making $(RAY_VENV) with torch and Ray in the tested versions: a few minutes, once"
	$(ENVIRONMENT) --fresh $(RAY_VENV) "$(RUN)" "-c constraints.txt pytest pytest-xdist hypothesis ray"
	@touch $@

# The engram that is built into $(VENV), which has the same Python.
$(RAY_VENV)/.engram: $(RAY_VENV)/.run $(VENV)/.engram
	cp -r --remove-destination $(VENV)/lib/python*/site-packages/*engram* $(RAY_VENV)/lib/python*/site-packages/
	@touch $@

bench-ray: $(RAY_VENV)/.engram
	PYTHONPATH=. $(RAY_PYTHON) -m benchmarks.cluster $(CLUSTER)

# Reverb needs the tensorflow that it was built against, and that one an older numpy.
bench-ray-peers: .venv-ray-peers/.run .venv-reverb/.run

.venv-ray-peers/.run: constraints.txt
	$(PYTHON) -m venv .venv-ray-peers
	.venv-ray-peers/bin/python -m pip install --disable-pip-version-check -c constraints.txt torch torchrl==0.14.1 tensordict \
	  numpy ray cloudpickle
	@touch $@

.venv-reverb/.run:
	$(PYTHON) -m venv .venv-reverb
	.venv-reverb/bin/python -m pip install --disable-pip-version-check dm-reverb==0.14.0 tensorflow-cpu==2.15.1 numpy==1.26.4
	@touch $@
