"""What the guard has to be told."""

from kite.settings import MetricsSettings, NodeSettings


class Settings(NodeSettings, MetricsSettings):
    """Settings of one guard: those of every service of a node, and where its metrics are."""
