"""The command line and environment of a server. Pure: what is set, and nothing that is started."""

import sys
from collections.abc import Mapping

from kite.engine.manners import cores
from kite.held.gate import GATE
from kite.held.loader import EXTENSION as HELD_EXTENSION
from kite.held.loader import LOAD_FORMAT
from kite.telemetry.extension import EXTENSION
from kite_schemas.yoco import EngineSpec

HOST = "127.0.0.1"
VLLM_MODULE = "vllm.entrypoints.launchers.api_server.entry"
FAKE_MODULE = "kite.testing.fake"
SPAN_DELAY_MS = 500  # spans leave a batch after this long: 5 s by default, too late for a person who watches
SPAN_TIMEOUT_S = 2  # a collector that is gone may hold an exporter this long
HELD_S = 2_000_000  # for vLLM's front to wait for an engine that is held: 23 days, the most that poll(2) can count
DROPPED = ("VLLM_CPU_KVCACHE_SPACE",)  # whole GiB; it would override the exact number of bytes

Environment = Mapping[str, str]


def command(
    spec: EngineSpec, port: int, *, otlp_endpoint: str = "", traceparent: str = "", gate: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Return (arguments, variables to set) of a server for `spec` on the loopback `port`.

    `otlp_endpoint` is the collector's base address (empty: no tracing); `traceparent` joins the start-up spans to a
    caller's trace. At `gate` it waits before it reads its weights (empty: nowhere).
    """
    added = {**trace_variables(otlp_endpoint, traceparent), **({GATE: gate} if gate else {})}
    if spec.kind == "fake":
        return fake_arguments(spec, port), {"OMP_NUM_THREADS": "1", **added}
    traced = ["--otlp-traces-endpoint", traces_url(otlp_endpoint)] if otlp_endpoint else []
    loading, own = held(spec) if gate else (["--worker-extension-cls", EXTENSION], {})
    return vllm_arguments(spec, port) + loading + traced, {**vllm_variables(spec), **own, **added}


def held(spec: EngineSpec) -> tuple[list[str], dict[str, str]]:
    """Return what a vLLM that waits before its weights is told besides: its loader, and to bind no threads yet.

    Bound threads would start on the cores that serve; once it is let on, it is moved as a whole.
    """
    threads = {"OMP_NUM_THREADS": str(len(cores(spec.cpus))), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables = {"VLLM_ENGINE_READY_TIMEOUT_S": str(HELD_S), **(threads if spec.cpus else {})}
    return ["--worker-extension-cls", HELD_EXTENSION, "--load-format", LOAD_FORMAT], variables


def environment(base: Environment, overlay: Environment) -> dict[str, str]:
    """Return the whole environment of a server: `base` without what would contradict the arguments, then `overlay`."""
    return {**{name: value for name, value in base.items() if name not in DROPPED}, **overlay}


def vllm_arguments(spec: EngineSpec, port: int) -> list[str]:
    """Return vLLM's arguments. Old and new versions evict each other unless both LoRA pools hold them."""
    options = {
        "--host": HOST,
        "--port": port,
        "--model": spec.base_path,
        "--served-model-name": spec.served_name,
        "--dtype": spec.dtype,
        "--max-model-len": spec.max_model_len,
        "--max-loras": spec.max_loras,
        "--max-cpu-loras": spec.max_loras,
        "--max-lora-rank": spec.max_lora_rank,
        "--block-size": spec.block_size,
        "--kv-cache-memory-bytes": spec.kv_cache_bytes,
    }
    pairs = [word for name, value in options.items() for word in (name, str(value))]
    sleeps = [] if spec.cpus else ["--enable-sleep-mode"]  # on a CPU vLLM refuses to start with it
    return [sys.executable, "-m", VLLM_MODULE, *pairs, "--enable-lora", "--disable-uvicorn-access-log", *sleeps]


def vllm_variables(spec: EngineSpec) -> dict[str, str]:
    """Return vLLM's variables: control routes, runtime LoRA, its own cores, loopback, nothing that phones home.

    With LoRA on CPU vLLM compiles one thing only, the rank of a log-probability: that made the first read 8.7 s instead
    of 0.16 s, needs a C++ compiler, and gained nothing measurable afterwards. Hence no compiler on CPU.
    """
    on_cpu = {"VLLM_CPU_OMP_THREADS_BIND": spec.cpus, "TORCHDYNAMO_DISABLE": "1"} if spec.cpus else {}
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_LOOPBACK_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_COLOR": "1",
        "VLLM_LOGGING_COLOR": "0",
        **on_cpu,
    }


def fake_arguments(spec: EngineSpec, port: int) -> list[str]:
    """Return the fake server's arguments."""
    options = {
        "--base": spec.base_path,
        "--served-name": spec.served_name,
        "--port": port,
        "--max-model-len": spec.max_model_len,
        "--max-loras": spec.max_loras,
        "--max-lora-rank": spec.max_lora_rank,
        "--block-size": spec.block_size,
    }
    return [sys.executable, "-m", FAKE_MODULE, *(word for pair in options.items() for word in map(str, pair))]


def trace_variables(otlp_endpoint: str, traceparent: str) -> dict[str, str]:
    """Return the OpenTelemetry variables, empty without a collector. vLLM reads the protocol of traces only."""
    if not otlp_endpoint:
        return {}
    joined = {"TRACEPARENT": traceparent} if traceparent else {}
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": otlp_endpoint,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": traces_url(otlp_endpoint),
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TIMEOUT": str(SPAN_TIMEOUT_S),
        "OTEL_BSP_SCHEDULE_DELAY": str(SPAN_DELAY_MS),
        "OTEL_SERVICE_NAME": "vllm",
        **joined,
    }


def traces_url(otlp_endpoint: str) -> str:
    """Return where spans are posted, below a collector's base address."""
    return f"{otlp_endpoint.rstrip('/')}/v1/traces"
