"""The one place that reads the environment: what every process of a fleet has to be told."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kite.bus import Bus, Login
from kite.errors import Fault, KiteError
from kite.trust import Signer, load_public, load_signer

JOURNAL = "orders.sqlite"
PREFIX = "KITE_"


class SettingsInvalid(KiteError):
    """A process was not told what it has to be told, or something that cannot be."""

    code = "settings_invalid"
    fault = Fault.OPERATOR

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("; ".join(mistakes), hint="docs/settings.md lists what each service is told")
        self.mistakes = mistakes


class ServiceSettings(BaseSettings):
    """Settings that all services share; each variable is the field's name in capitals behind `KITE_`."""

    model_config = SettingsConfigDict(env_prefix="KITE_", extra="ignore", frozen=True)

    nats_url: str = Field(
        description="where the bus listens, as in nats://127.0.0.1:4222; of a cluster all, with commas"
    )
    log_level: str = Field(
        default="info", pattern="(?i)^(debug|info|warning|error)$", description="debug, info, warning or error"
    )
    signing_key: Path | None = Field(
        default=None, description="file of the private key that signs what this process says"
    )
    nats_nkey_file: Path | None = Field(
        default=None, description="file of the nkey seed that this process logs in to the bus with; its owner's alone"
    )
    nats_ca_file: Path | None = Field(
        default=None, description="PEM file of the authority that vouches for the bus; with it TLS is demanded"
    )

    def login(self) -> Login:
        """Return who this process is to the bus. Raises the errors of `Login.load`."""
        return Login.load(self.nats_nkey_file, self.nats_ca_file)

    def signer(self) -> Signer | None:
        """Return the key of this process, None when it signs nothing. Raises the errors of `load_signer`."""
        return load_signer(self.signing_key) if self.signing_key else None


class MetricsSettings(BaseSettings):
    """Where a service shows its metrics."""

    model_config = SettingsConfigDict(env_prefix="KITE_", extra="ignore", frozen=True)

    metrics_port: int | None = Field(
        default=None, ge=1, le=65_535, description="port for metrics; unset: none are served. Each service has its own"
    )
    metrics_host: str = Field(default="127.0.0.1", description="address that metrics are served at")


class NodeSettings(ServiceSettings):
    """Settings of the services of one node."""

    node: str = Field(description="name of this node")
    state_dir: Path = Field(description="folder of this service's own: its journal, and the logs of what it starts")
    adapter_root: Path = Field(description="folder of adapters and of the store, at the same path for every service")

    arbitrator_key: Path | None = Field(
        default=None, description="file of the arbitrator's public key; with it only orders that it signed are taken"
    )

    async def connect(self, service: str) -> Bus:
        """Connect to the bus as a service of this node. Raises the errors of `Bus.connect`, and of the key files."""
        trusted = load_public(self.arbitrator_key) if self.arbitrator_key else None
        name = f"{service}-{self.node}"
        return await Bus.connect(self.nats_url, name, signer=self.signer(), login=self.login(), trusted=trusted)

    @property
    def journal(self) -> Path:
        """The file of orders begun and done."""
        return self.state_dir / JOURNAL

    @property
    def adapters(self) -> Path:
        """The adapter root as engines are told it: an absolute path."""
        return self.adapter_root.absolute()


AnySettings = TypeVar("AnySettings", bound=BaseSettings)


def told(kind: type[AnySettings]) -> AnySettings:
    """Read settings from the environment. Raises SettingsInvalid with every mistake, and no value: it may be secret."""
    try:
        return kind()
    except ValidationError as error:
        mistakes = (("_".join(map(str, one["loc"])).upper(), one) for one in error.errors(include_input=False))
        raise SettingsInvalid([f"{PREFIX}{name}: {_why(one['type'], one['msg'])}" for name, one in mistakes]) from None


def _why(kind: str, message: str) -> str:
    return "not set" if kind == "missing" else message
