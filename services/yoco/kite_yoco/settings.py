"""What yoco has to be told."""

from pathlib import Path

from kite.settings import NodeSettings

JOURNAL = "orders.sqlite"
LOGS = "logs"


class Settings(NodeSettings):
    """Settings of one yoco: those of every service of a node, and no others yet."""

    @property
    def journal(self) -> Path:
        """The file of orders begun and done."""
        return self.state_dir / JOURNAL

    @property
    def logs(self) -> Path:
        """The folder of the engines' output, one file an instance."""
        return self.state_dir / LOGS

    @property
    def adapters(self) -> Path:
        """The adapter root as engines are told it: an absolute path."""
        return self.adapter_root.absolute()
