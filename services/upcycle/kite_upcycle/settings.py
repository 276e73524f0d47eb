"""What upcycle has to be told."""

from pathlib import Path

from kite.settings import NodeSettings
from kite_upcycle import core


class Settings(NodeSettings):
    """Settings of one upcycle: those of every service of a node, and no others yet."""

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.adapters / core.STORE
