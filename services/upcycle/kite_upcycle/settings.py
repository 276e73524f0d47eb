"""What upcycle has to be told."""

from pathlib import Path

from kite.settings import NodeSettings
from kite_upcycle import core

JOURNAL = "orders.sqlite"


class Settings(NodeSettings):
    """Settings of one upcycle: those of every service of a node, and no others yet."""

    @property
    def journal(self) -> Path:
        """The file of orders begun and done."""
        return self.state_dir / JOURNAL

    @property
    def adapters(self) -> Path:
        """The adapter root as engines are told it: an absolute path."""
        return self.adapter_root.absolute()

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.adapters / core.STORE
