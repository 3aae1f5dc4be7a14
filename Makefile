# Everything runs in $(VENV). It is installed again only when pyproject.toml has changed; the set-up may be killed at any time.

VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= engine,sample,load,docs,deploy-check,dev
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$python && break; done)

# Processes that share the tests; each starts engines of its own, of about 3 GB.
WORKERS ?= 2

# What `make load` loads: a server that is running already.
HOST ?= http://127.0.0.1:8080
USERS ?= 8
RUN_TIME ?= 60s

INSTALLED := $(VENV)/.installed

# SGLang brings 11 GB; single files of 500 MB outlast uv's default of 30 s on a slow line.
export UV_HTTP_TIMEOUT ?= 300

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint audit format load bench bench-kernels bench-engine bench-server bench-arms bench-gpu bench-compare bench-gate bench-load example-grpo check-plugs docs architecture deploy-check lock-image doctor clean

help:
	@echo 'make quickstart  install into $(VENV), patch SGLang, then build, gate and serve the sample policies'
	@echo 'make test        the same set-up, then every test (PYTEST_ARGS=... for a part of them, WORKERS=0 for one process)'
	@echo 'make lint        formatting, ruff and mypy; make format mends the first'
	@echo 'make bench       every benchmark below, and docs/benchmarks.md of their figures (BENCH_ARGS=--quick)'
	@echo 'make bench-kernels  NVFP4 quantization on this CPU beside public packers and a memory copy'
	@echo 'make bench-engine   BF16 and FP4 engines in turns: tokens a second, hints, memory, start (BENCH_ARGS=...)'
	@echo 'make bench-server   the front-end beside SGLang alone, and beside LiteLLM and smg on a null upstream'
	@echo 'make bench-arms     BF16 and FP4 servers under one load, and FP4 with hints and without'
	@echo 'make bench-load     the load test beside the benchmark of SGLang on one server (TOKENIZER=any model directory)'
	@echo 'make bench-gate     what eval-gate run adds to the time of its arms'
	@echo 'make bench-compare  time and memory of eval-gate compare on 200,000 recorded results'
	@echo 'make bench-gpu   bandwidth of the Triton kernels on a card'
	@echo 'make example-grpo  train the sample policy on FP4 rollouts, QAT beside TRACE: 25 minutes (EXAMPLE_ARGS=...)'
	@echo 'make load        load the server at HOST=$(HOST) with locust'
	@echo 'make check-plugs compare what the plugs for trainers rely on with the newest wheels of the trainers'
	@echo 'make docs        build the pages of docs/ into site/'
	@echo 'make architecture  draw docs/architecture.svg from the imports of the code'
	@echo 'make deploy-check  what takes minutes: the steps of the CPU image, CRDs against the models of their projects (needs npm)'
	@echo 'make lock-image  resolve the packages of the CPU image anew'
	@echo 'make audit       known vulnerabilities of every installed package (audit-allow.txt lists what does not apply)'
	@echo 'make doctor      check the installation'
	@echo 'make install     only the set-up'
	@echo 'make clean       remove $(VENV) and caches; runs/ stays'

# Not behind a stamp: applying takes half a second when there is nothing to do, and someone may have reverted.
install: $(INSTALLED)
	$(BIN)/trace-serve patch apply

quickstart: install
	$(BIN)/trace-serve quickstart $(QUICKSTART_ARGS)

test: install
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

# Without --strict, a package that the advisory service does not know would pass.
audit: $(INSTALLED)
	$(BIN)/uv pip freeze --quiet --python $(BIN)/python --exclude-editable >$(VENV)/audit.txt
	$(BIN)/uv tool run pip-audit==2.9.0 --strict --no-deps --disable-pip --progress-spinner off --requirement $(VENV)/audit.txt \
		$$(sed -nE 's/^([A-Z]+-[A-Za-z0-9-]+) .*/--ignore-vuln \1/p' audit-allow.txt)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/bench_all.py $(BENCH_ARGS)

bench-arms: install
	$(BIN)/python benchmarks/bench_arms.py $(BENCH_ARGS)

load: $(INSTALLED)
	$(BIN)/locust -f deploy/locust/locustfile.py --headless --host $(HOST) --users $(USERS) --run-time $(RUN_TIME)

bench-kernels: $(INSTALLED)
	$(BIN)/python benchmarks/bench_kernels.py

bench-engine: install
	$(BIN)/python benchmarks/bench_engine.py $(BENCH_ARGS)

bench-server: install
	$(BIN)/python benchmarks/bench_server.py $(BENCH_ARGS)

bench-gate: $(INSTALLED)
	$(BIN)/python benchmarks/bench_gate.py

bench-load: $(INSTALLED)
	@test -n '$(TOKENIZER)' || { echo 'error: no tokenizer; run make bench-load TOKENIZER=MODEL_DIR' >&2; exit 3; }
	$(BIN)/python benchmarks/bench_load.py --tokenizer $(TOKENIZER) $(BENCH_ARGS)

bench-compare: $(INSTALLED)
	$(BIN)/python benchmarks/bench_compare.py

bench-gpu: $(INSTALLED)
	$(BIN)/python benchmarks/bench_gpu.py

example-grpo: install
	$(BIN)/python examples/grpo/run.py $(EXAMPLE_ARGS)

check-plugs: $(INSTALLED)
	$(BIN)/python tools/check_plugs.py

architecture: $(INSTALLED)
	$(BIN)/python tools/draw_architecture.py

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

deploy-check: $(INSTALLED)
	$(BIN)/python tests/deploy/run_cpu_stage.py
	$(BIN)/python tests/deploy/check_crds.py

IMAGE_EXTRAS := engine load otel gate-math gate-json gate-import
lock-image: $(INSTALLED)
	{ sed -n 1p deploy/docker/constraints.txt; echo dumb-init | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
	    --no-header --no-annotate --no-emit-index-url $(IMAGE_EXTRAS:%=--extra %) pyproject.toml - ; } > deploy/docker/constraints.new
	mv deploy/docker/constraints.new deploy/docker/constraints.txt

doctor: $(INSTALLED)
	$(BIN)/trace-serve doctor

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An install that was killed can leave packages that look complete, so such an environment is made anew; the
# downloads are in uv's cache by then.
$(INSTALLED): pyproject.toml
	@test -n '$(PYTHON)' || { echo 'error: found no Python 3.11 or 3.12; install one, or run make PYTHON=/path/to/python' >&2; exit 3; }
	$(PYTHON) -m venv $$(test ! -e $(VENV)/.installing || echo --clear) $(VENV)
	@rm -f $@ && touch $(VENV)/.installing
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python --editable '.[$(EXTRAS)]'
	@rm $(VENV)/.installing && touch $@
