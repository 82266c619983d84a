# `make` lists the targets. Choose an interpreter with PYTHON=..., pass options to a program with ARGS="...".

VENV := .venv
PY   := $(VENV)/bin/python

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What the environment is made from: of pyproject.toml all but the tools' settings, which stand last. Another hash is
# another stamp, so `make setup` repeats exactly when one of them changes.
FINGERPRINT = sed '/^\[tool\./,$$d' pyproject.toml; cat setup.py constraints.txt scripts/setup; \
              echo $(wildcard */__init__.py) $(CURDIR); $(if $(PYTHON),$(PYTHON) -V,:)
HASH  := $(shell { $(FINGERPRINT); } 2>&1 | sha256sum | cut -c1-16)
STAMP := $(VENV)/.ready-$(HASH)

# Folders count too: a source that is added or removed changes the time of its folder.
CSRC := $(shell find csrc -path csrc/tests -prune -o \( -type d -o -name '*.cpp' -o -name '*.h' \) -print 2>/dev/null)
CORE := $(VENV)/.core

.DEFAULT_GOAL := help
.PHONY: help setup demo test verbs-tests core-tests check check-install stubs format bench clean distclean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'\t' '{printf "make %-14s %s\n", $$1, $$2}'

setup: $(CORE)  ## install all that is needed into .venv and build the core; does nothing when all is there

# An environment that lost its interpreter (a moved or upgraded Python) is made again.
ifeq ($(wildcard $(PY)),)
.PHONY: $(STAMP)
endif
$(STAMP):
	@PYTHON="$(PYTHON)" scripts/setup $(VENV)
	@rm -f $(VENV)/.ready-* && touch $@

ifeq ($(wildcard onesided/_core.*.so),)
.PHONY: $(CORE)
endif
$(CORE): $(STAMP) $(CSRC)
	@echo "building the core (onesided._core) ..."
	@$(PY) setup.py -q build_ext --inplace && touch $@

demo: setup  ## a trainer publishes a real model's weights to rollout workers (ARGS="--workers 3 --steps 5")
	@$(PY) examples/rl_weight_broadcast.py $(ARGS)

test: core-tests  ## all tests: C++ (plain, ASan+UBSan, TSan), pytest, and what needs a device inside Soft-RoCE (ARGS="-k name")
	@$(VENV)/bin/pytest $(ARGS)
	@scripts/verbs-tests $(VENV) $(ARGS)

verbs-tests: setup  ## only those tests that need an RDMA device, inside Soft-RoCE (the first time it builds a kernel: 10 minutes)
	@scripts/verbs-tests $(VENV) $(ARGS)

core-tests: setup  ## the core's own C++ tests only
	@scripts/core-tests plain asan tsan

check: setup  ## lint, formatting, types, stubs, import arrows
	@scripts/check $(VENV)

check-install: setup  ## build sdist and wheel, install them into empty environments, use and type-check them there
	@scripts/check-install $(VENV)

stubs: setup  ## write onesided/_core.pyi again, from the core that is built
	@scripts/stubs $(VENV) onesided/_core.pyi

format: setup  ## format Python and C++ in place
	@$(VENV)/bin/ruff check --quiet --fix-only . && $(VENV)/bin/ruff format --quiet .
	@find csrc \( -name '*.cpp' -o -name '*.h' \) -print0 | xargs -0r $(VENV)/bin/clang-format -i

bench: setup  ## put, get, signal and atomic over shared memory; rows go to build/bench/*.json
	@mkdir -p build/bench
	@for op in put get signal atomic; do \
	    $(VENV)/bin/onesided bench $$op --transport shm --json build/bench/shm-$$op.json $(ARGS) || exit; done

clean:  ## remove what was built (not the environment)
	@rm -rf build dist ./*.egg-info onesided/_core.*.so $(CORE) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf

distclean: clean  ## remove the environment too
	@rm -rf $(VENV)
