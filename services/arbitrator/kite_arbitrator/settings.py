"""What the arbitrator has to be told."""

from pathlib import Path

from pydantic import Field

from kite.settings import MetricsSettings, ServiceSettings


class Settings(ServiceSettings, MetricsSettings):
    """Settings of the arbitrator."""

    ledger_url: str = Field(
        description="the ledger's database, as in sqlite:////var/lib/kite/ledger.db or postgresql://kite@db/kite"
    )
    nats_monitor_url: str | None = Field(
        default=None, description="the monitoring port of the bus, as in http://127.0.0.1:8222; of a cluster all"
    )
    durable: bool = Field(
        default=True, description="refuse a bus that acknowledges what is not on disk yet: needs the monitoring port"
    )
    operator_key: Path | None = Field(
        default=None, description="file of the operator's public key; with it everything has to be signed"
    )
