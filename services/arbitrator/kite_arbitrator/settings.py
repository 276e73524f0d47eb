"""What the arbitrator has to be told."""

from pydantic import Field

from kite.settings import ServiceSettings


class Settings(ServiceSettings):
    """Settings of the arbitrator."""

    ledger_url: str = Field(description="the ledger's database, as in sqlite:////var/lib/kite/ledger.db")
