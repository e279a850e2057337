# The native core under sanitizers, with reorderings planted that the tests must see, and its protocol under the C++
# memory model.
.PHONY: test-native-sanitized torture torture-planted model

SANITIZED := build/sanitized

# Leaks are not looked for: Python and torch keep memory until the end.
test-native-sanitized: $(VENV)/.engram $(VENV)/.dev
	@echo "[1/2] building the native core with AddressSanitizer and UBSan into $(SANITIZED): about a minute, once"
	$(VENV)/bin/python -m cmake --version >/dev/null 2>&1 && CMAKE="$(VENV)/bin/python -m cmake" || CMAKE=cmake; \
	  $$CMAKE -S . -B $(SANITIZED) -DPython_EXECUTABLE=$(abspath $(VENV)/bin/python) -DENGRAM_SANITIZE=ON >/dev/null && \
	  $$CMAKE --build $(SANITIZED) --parallel 2
	@rm -rf $(SANITIZED)/package && mkdir -p $(SANITIZED)/package
	@cp -r src/engram $(SANITIZED)/package/ && rm -f $(SANITIZED)/package/engram/_native*.so
	@cp $(SANITIZED)/_native*.so $(SANITIZED)/package/engram/
	@cp tests/native/before_editable.py $(SANITIZED)/package/sitecustomize.py
	@echo "[2/2] the native tests under both"
	PYTHONPATH=$(SANITIZED)/package ENGRAM_SANITIZED=1 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	  $(VENV)/bin/python -m pytest -q -p no:cacheprovider --capture=sys tests/native -m "not long" $(PYTEST)

TORTURE := $(VENV)/bin/python -m pytest -q -o faulthandler_timeout=0 -m long tests/processes

# Twenty minutes of writers, readers, kills, saves and forks; then the figures, of a machine that has nothing else to do.
torture: $(VENV)/.engram $(VENV)/.dev
	$(TORTURE) -k "not planted" $(PYTEST)
	@echo "4 writers alone; 2 samplers alone; both at once"
	$(VENV)/bin/python tests/processes/torture.py --steady --seconds 10 --writers-only
	$(VENV)/bin/python tests/processes/torture.py --steady --seconds 10 --samplers-only --kinds random --check-every 1000
	$(VENV)/bin/python tests/processes/torture.py --steady --seconds 10 --kinds random --check-every 1000

# Builds each forbidden reordering, takes each protection out, and sees that a torture notices it; then that the sound
# build stands the same.
torture-planted: $(VENV)/.engram $(VENV)/.dev
	$(TORTURE) -k "planted" $(PYTEST)

MODEL := build/model
# Relacy brings the `delete` that is not told the size.
MODEL_FLAGS := -std=c++20 -O2 -Wall -Wextra -fno-sized-deallocation

$(MODEL)/%: tests/model/%.cpp tests/model/memory.hpp $(wildcard src/native/*_protocol.hpp)
	@mkdir -p $(MODEL)
	@$(CXX) $(MODEL_FLAGS) -o $@ $<

# What readers of a lane may believe, in random executions and in every one of small lanes; then each fence taken away, and
# each step moved, which must make them believe something wrong (docs/memory-model.md). Some minutes on two cores: those of
# observations, removed rows, queues and rows of any length are a tenth as many unless EXECUTIONS says how many.
model:
	@echo '#include <relacy/base.hpp>' | $(CXX) -x c++ -fsyntax-only - 2>/dev/null || \
	  { echo "make model needs the headers of Relacy: apt-get install relacy-dev (Debian, Ubuntu)"; exit 1; }
	@echo "building tests/model into $(MODEL): half a minute, once"
	@$(MAKE) --no-print-directory -j2 $(MODEL)/words $(MODEL)/append $(MODEL)/edit $(MODEL)/turns $(MODEL)/stints $(MODEL)/streams $(MODEL)/once $(MODEL)/removed $(MODEL)/queue $(MODEL)/ragged
	@$(MODEL)/words
	@{ $(MODEL)/edit $(EXECUTIONS) && $(MODEL)/turns $(EXECUTIONS) && $(MODEL)/streams $(EXECUTIONS) && $(MODEL)/removed $(or $(EXECUTIONS),100000) && $(MODEL)/queue $(or $(EXECUTIONS),100000) && $(MODEL)/once $(or $(EXECUTIONS),100000) && $(MODEL)/ragged $(or $(EXECUTIONS),100000); } >$(MODEL)/rest.txt & rest=$$!; \
	  { $(MODEL)/append $(EXECUTIONS) && $(MODEL)/stints $(EXECUTIONS); }; failed=$$?; wait $$rest || failed=1; cat $(MODEL)/rest.txt; exit $$failed
