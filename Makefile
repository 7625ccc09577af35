# gpuflight: `make help` lists what there is.

.DEFAULT_GOAL := help
SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
# The newest Python that gpuflight supports; PYTHON=… chooses another.
ifndef PYTHON
PYTHON := $(shell for name in python3.13 python3.12 python3.11 python3; do \
	command -v $$name >/dev/null 2>&1 \
	&& $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$name && break; done)
endif
DURATION ?= 10
CHAOS ?= 240
SEED ?= 1
# Without compiled modules every program that is started compiles us anew: 1 s of CPU each, of hundreds in the tests.
unexport PYTHONDONTWRITEBYTECODE
# More than two cores' worth: many tests wait for real brokers, databases and rounds.
JOBS ?= 4
MERMAID ?= 12.3.0
MXGRAPH ?= 4.2.2
SOURCES := src tests benchmarks
DOCS := docs/settings.md docs/cli.md

.PHONY: help run corpus test test-packages check docs gallery probes bench chaos clean

help:  ## this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-14s %s\n", $$1, $$2 }'

run: $(VENV)/run.done  ## set up, watch this machine for 10 s, draw it, say where (DURATION=n for longer)
	@folder="gpuflight-run-$$(date +%Y%m%d-%H%M%S)-$$$$"; \
	$(BIN)/gpuflight run --offline $(DURATION) --interval 2 --out "$$folder" && \
	$(BIN)/gpuflight-vis "$$folder/graph.json" -o "$$folder/graph.html" && \
	echo "picture: $$(pwd)/$$folder/graph.html"

corpus: $(VENV)/dev.done  ## record real faults anew, and write how right the rules are over our corpus (root, 2 minutes)
	$(BIN)/python -m tests.tools.corpus

# Asserts are taken apart in the second look; in the first one each worker would spend 15 s of CPU on preparing them all.
test:  ## set up all that the tests need, and run them (T=path for some)
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/dev.done test-packages
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=15 --assert=plain $(T) || { [ $$? -eq 1 ] && \
	echo "what failed runs once more, alone: what only the load of the others decided passes, what is broken fails again" && \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(T); }

check: $(VENV)/dev.done  ## format, lint, types, layers, tests
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy -p gpuflight
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

docs: $(VENV)/dev.done  ## bring the generated parts of the documentation up to date
	$(BIN)/python -m gpuflight.cli.reference $(DOCS)
	$(BIN)/python -c 'from gpuflight.bottlenecks import base, pages; from gpuflight.registry import plugins; pages.write("docs/rules", plugins(base.Rule))'
	UPDATE_DOCS=1 $(BIN)/python -m pytest -q tests/unit/test_architecture.py

gallery: $(VENV)/dev.done  ## draw docs/gallery again: six graphs in every layout and format (needs Chromium and root)
	$(BIN)/python -m tests.gallery docs/gallery

probes: $(VENV)/dev.done  ## compile what changed of the probes, for x86-64 and arm64 (needs clang and llvm)
	$(BIN)/python -m gpuflight.sources.bpf.build

bench: $(VENV)/dev.done  ## every benchmark, one after the other; each prints ratios
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

chaos: $(VENV)/dev.done  ## kill all that runs around a server at random, for 4 minutes (CHAOS=n for longer, SEED=n otherwise)
	GPUFLIGHT_CHAOS_S=$(CHAOS) GPUFLIGHT_CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -q tests/chaos/test_chaos.py

clean:  ## remove what these targets made, run folders excepted
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Debian packages that some tests need: a C compiler for the fake NVIDIA libraries, iproute2 for network namespaces, Chromium
# to open the picture, Graphviz to read it as DOT, Mermaid and mxGraph (from npm) to read charts and draw.io files, clang and libbpf's headers to build the probes again, libbpf and bcc to load them. They are installed where that may be done without asking; elsewhere those tests are skipped, and say so.
test-packages: | $(VENV)/bin/python
	@missing=""; \
	command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || missing="$$missing gcc libc6-dev"; \
	command -v ip >/dev/null 2>&1 || missing="$$missing iproute2"; \
	command -v chromium >/dev/null 2>&1 || missing="$$missing chromium"; \
	command -v dot >/dev/null 2>&1 || missing="$$missing graphviz"; \
	command -v clang >/dev/null 2>&1 || missing="$$missing clang llvm libbpf-dev"; \
	ldconfig -p 2>/dev/null | grep -q libbpf.so.1 || missing="$$missing libbpf1"; \
	/usr/bin/python3 -c 'import bcc' 2>/dev/null || missing="$$missing python3-bpfcc"; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
			(apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing) \
				>/dev/null || echo "could not install$$missing; the tests that need them are skipped"; \
		else \
			echo "not installed:$$missing; the tests that need them are skipped"; \
		fi; \
	fi
	@if command -v npm >/dev/null 2>&1; then \
		for each in mermaid@$(MERMAID):package/dist/mermaid.min.js mxgraph@$(MXGRAPH):package/javascript/mxClient.min.js; do \
			name=$${each%%@*}; file=$${each#*:}; folder=$(VENV)/npm/$$name; \
			[ -e "$$folder/$$file" ] || (mkdir -p "$$folder" && cd "$$folder" && npm pack --silent "$${each%%:*}" && \
				tar xzf $$name-*.tgz "$$file" && rm $$name-*.tgz) >/dev/null 2>&1 \
				|| echo "could not fetch $$name; the test that needs it is skipped"; \
		done; \
	fi

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "gpuflight needs Python 3.11, 3.12 or 3.13, and none is on PATH"; exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
			apt-get update -qq; \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
				"$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >/dev/null; \
		else \
			echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; \
		fi; \
	fi
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.done: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@$(BIN)/python -m compileall -q src
	@touch $@

$(VENV)/dev.done: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" src tests \
		|| true  # some packages bring files for other versions of Python
	@touch $@ $(VENV)/run.done
