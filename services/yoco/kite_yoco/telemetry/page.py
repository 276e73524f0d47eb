"""A page of an engine's metrics as totals: what it can tell when no stat logger speaks. Pure."""

import math
import re
from collections.abc import Mapping

from kite.clock import US_PER_S
from kite.telemetry import Totals
from kite_schemas.model import PPM

LINE = re.compile(r"^(vllm:[a-z0-9_]+)(?:\{[^\n]*\})? ([0-9.eE+-]+)$", re.MULTILINE)

COUNTS: Mapping[str, str] = {
    "finished": "vllm:e2e_request_latency_seconds_count",
    "cache_queries": "vllm:prefix_cache_queries_total",
    "cache_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
SHARES: Mapping[str, str] = {"kv_usage_ppm": "vllm:kv_cache_usage_perc"}
SECONDS: Mapping[str, str] = {"latency_sum_us": "vllm:e2e_request_latency_seconds_sum"}


def read_page(page: str) -> Totals:
    """Return what a page tells, summed over label sets. It has no arrivals and no squares: those stay absent."""
    values = sums(page)
    counts = {field: natural(values[name]) for field, name in COUNTS.items() if name in values}
    spans = {field: natural(values[name] * US_PER_S) for field, name in SECONDS.items() if name in values}
    shares = {field: min(PPM, natural(values[name] * PPM)) for field, name in SHARES.items() if name in values}
    return Totals(**counts, **spans, **shares)


def sums(page: str) -> Mapping[str, float]:
    """Return every metric of vLLM that is finite, summed over its label sets."""
    found: dict[str, float] = {}
    for name, text in LINE.findall(page):
        found[name] = found.get(name, 0.0) + float(text)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def natural(value: float) -> int:
    """Return the nearest whole number, never below 0."""
    return max(0, round(value))
