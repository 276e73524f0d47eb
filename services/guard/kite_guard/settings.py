"""What the guard has to be told."""

from kite.settings import NodeSettings


class Settings(NodeSettings):
    """Settings of one guard: those of every service of a node, and no others yet."""
