"""What the guard has to be told."""

from pathlib import Path

from pydantic import Field

from kite.settings import NodeSettings

JOURNAL = "orders.sqlite"


class Settings(NodeSettings):
    """Settings of one guard."""

    probes: Path | None = Field(default=None, description="file of the probes to compare with; absent: the shipped set")

    @property
    def journal(self) -> Path:
        """The file of orders begun and done."""
        return self.state_dir / JOURNAL
