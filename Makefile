# Everything a newcomer needs is two commands: `make demo` and `make test`.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV   := .venv
PY     := $(VENV)/bin/python
FFCV   := .venv-ffcv
ECOSYSTEM := .venv-ecosystem
ROOT   := $(CURDIR)
SOURCES := $(shell find rust csrc python -type f -not -name '*.pyc' 2>/dev/null) \
           Cargo.toml Cargo.lock setup.py pyproject.toml
CPP    := $(wildcard csrc/*/*.c csrc/*/*.cpp csrc/*/*.h csrc/include/stocache/*.h benches/cpp/*.cpp tests/cpp/*.cpp examples/*/*.cpp)
PYTHON := python benches/python examples tests/python tests/ecosystem setup.py
# Where this is set, as in images of Python, every start of an interpreter compiles torch's thousand modules
# anew, which takes as long as importing them: the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE
# nextest where present; plain cargo test runs the same tests.
CARGO_TEST := $(if $(shell cargo nextest --version 2>/dev/null),cargo nextest run,cargo test)
# Many tests wait most of their time.
export NEXTEST_TEST_THREADS ?= $(shell echo $$((2 * $$(nproc))))
MODELS := RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --profile models
PYTEST_ARGS ?=
BENCH_ARGS ?=
# The versions of torch that a wheel is built for: the last of each minor.
TORCHES := 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
TORCH ?= $(lastword $(TORCHES))
# And those with which it is tested.
WHEEL_TORCHES ?= $(sort $(firstword $(TORCHES)) $(lastword $(TORCHES)))
# So many processes run the Python tests, each with a /dev/shm of its own. Some tests only wait.
PYTEST_JOBS ?= $(shell echo $$(($$(nproc) + 1)))
PYTEST := -m pytest -q -n $(PYTEST_JOBS) --dist worksteal -p no:cacheprovider

.PHONY: help demo demo-cpp test test-long rust-tests redis test-rust test-python test-ecosystem test-wheel \
        test-torch test-torch-all test-tch lint lint-rust lint-python lint-cpp format bench bench-peers bench-ffcv bench-ecosystem bench-core build wheel clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: build ## Train without and with the cache; prints a table, saves a plot
	$(PY) examples/demo.py

# CMake and ninja come from .venv, which need not be in PATH.
demo-cpp: build ## Build the C++ examples; train in C++ without and with the cache
	@echo "building the C++ examples into build/examples; the first time takes about a minute"
	$(VENV)/bin/cmake -S examples -B build/examples -G Ninja \
	  -DCMAKE_MAKE_PROGRAM="$(ROOT)/$(VENV)/bin/ninja" \
	  -DCMAKE_PREFIX_PATH="$$($(PY) -c 'import stocache; print(stocache.cmake_prefix_path)')"
	$(VENV)/bin/cmake --build build/examples
	build/examples/cpp_trainer/cpp_trainer

# The Rust tests are compiled while pip waits for the network; what is wrong with them test-rust says.
test: ## Run every check that a change must pass
	$(MAKE) rust-tests >/dev/null 2>&1 & trap 'kill $$! 2>/dev/null || true' EXIT; \
	$(MAKE) build; wait $$! || true
	$(MAKE) lint test-rust test-python
	@echo; echo "All checks passed."

test-long: lint ## The same with the full counts of kills and reads, and in an empty venv
	export STOCACHE_COUNTS="$$(mktemp)"; trap 'rm -f "$$STOCACHE_COUNTS"' EXIT; \
	STOCACHE_LONG=1 $(MAKE) test-rust; \
	$(MAKE) test-python PYTEST_ARGS="--long --durations=25"; \
	$(MAKE) test-wheel; \
	echo; echo "All checks passed at these counts:"; sort -u "$$STOCACHE_COUNTS"

# Redis itself, for the tests of the cluster; they do without it, and say so.
redis:
	@tools/redis-server build/redis

rust-tests:
	$(CARGO_TEST) --no-run --test '*'
	$(CARGO_TEST) --no-run --features faults --lib --test controls
	$(MODELS) --no-run --lib models

test-rust: redis ## Core tests: units, models, tortures and their controls
	$(CARGO_TEST) --no-fail-fast --test '*'
	$(CARGO_TEST) --no-fail-fast --features faults --lib --test controls
	$(MODELS) --lib models

# From another folder, so that nothing but the installed package can be imported.
test-python: build redis ## Python tests, against the installed package
	cd "$$(mktemp -d)" && "$(ROOT)/$(PY)" $(PYTEST) -c "$(ROOT)/pyproject.toml" \
	  --rootdir "$(ROOT)" "$(ROOT)/tests/python" $(PYTEST_ARGS)

# The same way, with libraries that `make test` does without.
test-ecosystem: build $(ECOSYSTEM)/.installed ## Tests with torchvision, MONAI, pandas and others
	cd "$$(mktemp -d)" && "$(ROOT)/$(ECOSYSTEM)/bin/python" $(PYTEST) -c "$(ROOT)/pyproject.toml" \
	  --rootdir "$(ROOT)" "$(ROOT)/tests/ecosystem" $(PYTEST_ARGS)

test-wheel: wheel redis ## Python tests against the wheel in empty venvs, with the oldest and the newest torch
	for version in $(WHEEL_TORCHES); do tools/test-torch $$version dist/stocache-*.whl; done

test-torch: redis ## Build for another torch and run the Python tests with it: TORCH=2.9.1
	PYTEST_ARGS="$(PYTEST_ARGS)" tools/test-torch $(TORCH)

test-torch-all: redis ## The same with every torch that is supported, one after the other
	for version in $(TORCHES); do PYTEST_ARGS="$(PYTEST_ARGS)" tools/test-torch $$version; done

# tch compiles a wrapper of all of libtorch, for minutes. The torch in .venv is the one that it suits.
test-tch: $(VENV)/.deps ## Tests of the crate's feature tch, for Rust that holds tch::Tensors
	libs=$$($(PY) -c 'import torch; print(torch.__path__[0] + "/lib")'); \
	PATH="$(ROOT)/$(VENV)/bin:$$PATH" LIBTORCH_USE_PYTORCH=1 LD_LIBRARY_PATH="$$libs" \
	  CARGO_TARGET_DIR=target/tch cargo test --features tch --test tensors

lint: build ## Formatting, clippy, ruff, mypy, clang-format
	$(MAKE) -j2 --output-sync=target lint-rust lint-python lint-cpp

lint-rust:
	cargo fmt --all --check
	cargo fmt --manifest-path benches/readers/Cargo.toml --check
	cargo clippy --all-targets --features faults -- -D warnings
	$(PY) setup.py -q clippy

lint-python:
	$(PY) -m ruff check $(PYTHON)
	$(PY) -m ruff format --check $(PYTHON)
	$(PY) -m mypy

lint-cpp:
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

format: $(VENV)/.deps ## Put all sources into the form that lint asks for
	cargo fmt --all
	cargo fmt --manifest-path benches/readers/Cargo.toml
	$(PY) -m ruff check -q --fix $(PYTHON) || true
	$(PY) -m ruff format -q $(PYTHON)
	$(VENV)/bin/clang-format -i $(CPP)

# All tables, also if one misses a target.
bench: build ## Print the speed tables: peers and limits in the same run; BENCH_ARGS="--before FOLDER"
	$(PY) benches/python/all.py $(BENCH_ARGS)

bench-peers: build ## Warm epochs through a DataLoader, with a plot
	$(PY) benches/python/peers.py

bench-ffcv: build $(FFCV)/.installed ## stocache.DataLoader beside FFCV, which gets a venv of its own
	missed=0; \
	$(FFCV)/bin/python benches/python/cached_dataset.py --only loader --with-ffcv || missed=1; \
	$(FFCV)/bin/python benches/python/augmentation.py --only resized --with-ffcv || missed=1; \
	exit $$missed

bench-ecosystem: build $(ECOSYSTEM)/.installed ## Samples of torchvision and MONAI beside plain tensors
	$(ECOSYSTEM)/bin/python benches/python/cached_dataset.py --only subclass

bench-core: ## Criterion benches of the core alone
	cargo bench --bench slots --bench records --bench augment --bench checksums

build: $(VENV)/.installed ## Install stocache into .venv

# One library for each torch. These are not in the wheel, and need not be on the machine that it is built on.
wheel: $(VENV)/.deps ## Build a wheel into dist/, for each torch in TORCHES
	rm -rf build/wheel dist/stocache-*.whl
	folders=$$($(PY) tools/fetch-torch build/torch $(TORCHES)); \
	STOCACHE_TORCH_DIRS="$$folders" $(VENV)/bin/pip wheel -v --no-build-isolation --no-deps -w build/wheel . \
	  2>&1 | tools/progress
	PATH="$(ROOT)/$(VENV)/bin:$$PATH" $(VENV)/bin/auditwheel repair --exclude 'libtorch*.so' \
	  --exclude libc10.so -w dist build/wheel/stocache-*.whl
	ls -l dist

clean: ## Remove everything that was built
	rm -rf $(VENV) $(FFCV) $(ECOSYSTEM) target build dist python/*.egg-info

# Most of what is installed is never imported: what is, Python compiles then.
$(VENV)/.deps: requirements-dev.txt requirements-build.txt requirements-test.txt
	@command -v cargo >/dev/null || { echo "stocache needs Rust 1.90 or newer, for example by rustup"; exit 1; }
	@command -v c++ >/dev/null || { echo "stocache needs a C++ compiler: apt-get install g++"; exit 1; }
	test -x $(PY) || python3 -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "stocache needs Python 3.10 or newer with venv: apt-get install python3-venv"; exit 1; }
	$(VENV)/bin/pip install --progress-bar on --no-compile -r requirements-dev.txt
	touch $@

# The first build takes some minutes on two cores.
$(VENV)/.installed: $(VENV)/.deps $(SOURCES)
	$(VENV)/bin/pip install -v --no-build-isolation --no-deps --force-reinstall . 2>&1 | tools/progress
	touch $@

# These see the packages of .venv behind their own, so that they can have other versions and .venv
# stays as it is.
$(FFCV)/.installed: requirements-ffcv.txt $(VENV)/.deps
	@tools/ffcv-libraries
	$(PY) tools/venv-behind $(FFCV)
	$(FFCV)/bin/pip install --progress-bar on -r requirements-ffcv.txt
	touch $@

$(ECOSYSTEM)/.installed: requirements-ecosystem.txt $(VENV)/.deps
	$(PY) tools/venv-behind $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/pip install --progress-bar on -r requirements-ecosystem.txt
	touch $@
