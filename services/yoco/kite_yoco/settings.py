"""What yoco has to be told."""

from pathlib import Path

from kite.settings import NodeSettings

LOGS = "logs"


class Settings(NodeSettings):
    """Settings of one yoco: those of every service of a node, and no others yet."""

    @property
    def logs(self) -> Path:
        """The folder of the engines' output, one file an instance."""
        return self.state_dir / LOGS
