"""What upcycle has to be told."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from kite.settings import MetricsSettings, NodeSettings
from kite_upcycle import core


class Settings(NodeSettings, MetricsSettings):
    """Settings of one upcycle."""

    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where blends are recompressed: cpu or cuda")

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.adapters / core.STORE
