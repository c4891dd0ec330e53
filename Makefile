# What one can do here. `make` alone lists it.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One file says whether the environment is up to date; it is made again when dependencies change.
READY := $(VENV)/.ready
# The same of what the demo imports, a tenth of it; of what builds a release, and the site.
DEMO := $(VENV)/.demo
RELEASE := $(VENV)/.release
SITE := $(VENV)/.site
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
# No verb is a file.
.PHONY: $(shell grep -ohE '^[a-z-]+:' Makefile | tr -d :)

help: ## this list
	@sed -nE -e 's/^#: (.*)/\n\1/p' -e 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

$(VENV)/.demo $(VENV)/.release $(VENV)/.site: $(VENV)/.%: deploy/locks/%.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "$(PIP) --require-hashes -r $<" && $(PIP) --require-hashes -r $< && echo "... $$SECONDS s"
	@touch $@

$(READY): $(DEMO) pyproject.toml deploy/locks/dev.txt
	$(PIP) --require-hashes -r deploy/locks/dev.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

#: every day

demo: $(DEMO) ## the main job on this machine: three containers, four GPUs, a real containerd (needs root)
	@$(BIN)/python -m tests.demo

demo-faults: $(DEMO) ## what becomes of containers when GPUs fail and drivers change; simulated GPUs (needs root)
	@$(BIN)/python -m tests.demo.faults

format: $(READY) ## fix what a machine can fix
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

# WHAT: names of tools/generate.py, such as policy or share, or goldens and pictures, which only tests compare.
generate: $(READY) ## what is checked in and made of something else: protobuf, schemas, man pages, reference, manifests, plots
	$(BIN)/python -m tools.generate $(WHAT)

check: $(READY) ## format, lint, types, layers, and whether what is generated is up to date
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	$(BIN)/python -m tools.generate --check
	$(BIN)/python deploy/locks/audit.py

# Most tests wait for other programs, so there are more workers than processors; a worker keeps what it has booted.
# WHICH: files or options of pytest's, such as tests/unit.
PYTEST := $(BIN)/pytest -q -n 5 --dist worksteal
# What each worker would compile for itself is compiled once before, and kept.
unexport PYTHONDONTWRITEBYTECODE
pytest: $(READY) ## unit and property tests and real containerds (needs root); WHICH="tests/unit ...": some of them
	-@$(BIN)/pytest --collect-only -qq >/dev/null
	$(PYTEST) -m 'not gpu and not cluster' $(WHICH)

test: $(READY) ## check and pytest (needs root)
	@$(MAKE) --no-print-directory --jobs 2 check pytest

site: $(SITE) ## docs/ -> build/site, every link within it checked
	$(BIN)/python -m tools.site

clean: ## remove what was made here
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

#: tests that take longer, or need more

# The packages that open nothing and read no clock: each of their lines and branches has a test, and faults are found.
# A traced test may be too late for its deadline; whether it passes is `make test`'s matter, and so are more examples of laws.
PURE := domain policy request injection ttrpc ledger decision nri
THEIRS := $(PURE:%=tests/unit/%) $(addprefix tests/unit/,plugin kubelet dra records stray verify health) tests/property
gates: $(READY) ## branch coverage of the pure packages, and whether the tests find seeded faults
	-@HYPOTHESIS_PROFILE=few $(PYTEST) $(PURE:%=--cov=nri_gpu.%) --cov-branch --cov-report= $(THEIRS)
	$(BIN)/coverage report --show-missing --skip-covered --fail-under=99
	$(BIN)/python -m bench.seeded_faults --pure

conformance: $(READY) ## all tests on real containerds, whole on each; on others: CONTAINERDS=DIR[:DIR] (needs root)
	$(PYTEST) --everywhere $(if $(CONTAINERDS),--containerds $(CONTAINERDS)) tests/conformance

chaos: $(READY) ## 1,000 containers on each containerd while the daemon and containerd are killed (needs root)
	NRI_GPU_CHAOS=1000 NRI_GPU_LATE=1000 $(BIN)/pytest -q tests/conformance/test_chaos.py \
		tests/conformance/test_late_calls.py

fuzz: $(READY) ## throw garbage at every untrusted entrance, guided by the code it reaches, a minute each
	$(BIN)/python -m tests.fuzz --seconds 60

ground: $(READY) ## programs of other projects that tests and bench run, from Go modules -> cache; SETS="helm4 ...", LIMIT_S=N
	@$(BIN)/python -m tests.ground $(if $(LIMIT_S),--seconds $(LIMIT_S)) $(SETS)

test-driver: $(READY) ## NVIDIA's driver of Debian's non-free, three versions, found and loaded; 200 MiB are fetched (needs root)
	$(PYTEST) -m driver tests/unit/driver tests/conformance

# TARGETS: what is made there. Tests of packages make clean systems of their own.
SUITES ?= bookworm trixie
TARGETS ?= demo "test WHICH=--ignore=tests/packages"
test-fresh: $(READY) ## the demo and all tests on clean Debian systems that have git, make and Python (needs root, half an hour)
	@for suite in $(SUITES); do $(BIN)/python -m tests.fresh $$suite $(TARGETS) || exit 1; done

test-cluster: $(READY) ## on a real Kubernetes, whose folder of cluster.sh NRI_GPU_CLUSTER names; SHORT=1 for main claims (needs root)
	$(BIN)/pytest -q -m 'cluster$(if $(SHORT), and short)' tests/cluster

ifdef KIT
test-gpu:
	@$(PYTHON) tests/gpu/run_kit.py '$(KIT)'
else
test-gpu: $(READY) ## on a machine with an NVIDIA GPU: containers compute on what they were granted; KIT=FILE needs no network (needs root)
	-$(BIN)/pytest -q -m gpu --junitxml=build/real-gpu.xml tests/gpu
	@$(BIN)/python -m tests.gpu.report build/real-gpu.xml
endif

#: measurements

bench: $(READY) ## what it costs, beside the budget and others' programs (make ground); BENCH="..." gives options
	$(BIN)/python -m bench $(BENCH)

reliability: $(READY) ## fuzzing, a hostile runtime, faults and soak -> docs/reliability.md (needs root, an hour)
	code=0; for part in fuzz hostile faults soak; do $(BIN)/python -m tests.reliability --only $$part || code=1; done; \
		$(BIN)/python -m tools.generate plots; exit $$code

#: a release

deb: $(RELEASE) ## the Debian packages: the program with what it needs of Python; daemon and guard; the observer -> dist/
	@$(BIN)/python -m deploy.debian.build

rpm: $(RELEASE) ## the same as RPMs, for Fedora and Enterprise Linux (needs rpmbuild) -> dist/
	@$(BIN)/python -m deploy.rpm.build

image: $(RELEASE) ## the container image for Kubernetes, an OCI archive (needs mmdebstrap and root) -> dist/
	@$(BIN)/python -m deploy.image

dist: $(RELEASE) ## sdist, the wheel made from it, and the chart's archive -> dist/
	@$(BIN)/python -m deploy.dist

sbom: $(RELEASE) ## the bill of materials of a release, in CycloneDX's JSON -> dist/
	$(BIN)/python -m deploy.sbom

lock: $(READY) ## newest versions of Python's packages -> deploy/locks, with hashes
	$(BIN)/python -m tools.generate locks

linkcheck: $(READY) ## the site's links to other sites (docs/external-links.txt), over the network
	$(BIN)/python -m tools.generate links
	$(BIN)/python -m tools.site --linkcheck

gpu-kit: $(READY) ## all that test-gpu needs on a machine without a network, in one archive -> dist
	@$(BIN)/python -m tests.gpu.kit
