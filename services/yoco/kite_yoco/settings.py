"""What yoco has to be told."""

from pathlib import Path

from pydantic import Field

from kite.keeper import KEEP_S
from kite.settings import MetricsSettings, NodeSettings
from kite_yoco.health import HUNG_S

LOGS = "logs"


class Settings(NodeSettings, MetricsSettings):
    """Settings of one yoco: those of every service of a node, and where its metrics are."""

    keep_s: float = Field(
        default=KEEP_S, gt=0, description="seconds that engines are kept when their yoco was killed and none comes back"
    )
    hung_s: float = Field(default=HUNG_S, gt=0, description="seconds without an answer after which an engine is ended")

    @property
    def logs(self) -> Path:
        """The folder of the engines' output, one file an instance."""
        return self.state_dir / LOGS
