"""What the command line reads from the environment: where the fleet is when no folder is named."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class PlaceSettings(BaseSettings):
    """Variables that name a fleet; the folder wins over the two addresses."""

    model_config = SettingsConfigDict(env_prefix="KITE_", extra="ignore", frozen=True, env_ignore_empty=True)

    dir: Path | None = Field(default=None, description="folder of a fleet that `kite up` runs")
    nats_url: str = Field(
        default="", description="where the bus listens, as in nats://127.0.0.1:4222; of a cluster all, with commas"
    )
    ledger_url: str = Field(default="", description="the ledger's database, as in sqlite:////var/lib/kite/ledger.db")
    nats_monitor_url: str = Field(
        default="", description="the monitoring port of the bus, for `kite doctor` (else that of the folder's fleet)"
    )
    adapter_root: Path | None = Field(default=None, description="folder of adapters, as the fleet's services see it")
    nats_nkey_file: Path | None = Field(
        default=None, description="file of the nkey seed that this command logs in to the bus with; its owner's alone"
    )
    nats_ca_file: Path | None = Field(
        default=None, description="PEM file of the authority that vouches for the bus; with it TLS is demanded"
    )
    signing_key: Path | None = Field(
        default=None, description="file of the private key that signs requests (else the operator's in the folder)"
    )
