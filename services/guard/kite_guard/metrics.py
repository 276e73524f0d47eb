"""What a guard tells Prometheus: how long comparisons take, and how they end."""

from kite.orders.measure import COMMON, seconds

SECONDS = seconds("guard")
METRICS = (SECONDS, *COMMON)
