"""What an upcycle tells Prometheus: how long verifying, blending, loading and retiring take, and how they end."""

from kite.orders.measure import COMMON, seconds

SECONDS = seconds("upcycle")
METRICS = (SECONDS, *COMMON)
