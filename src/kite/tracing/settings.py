"""The standard OpenTelemetry variables that KITE reads itself; the SDK reads the rest of them."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class TracingSettings(BaseSettings):
    """Variables by OpenTelemetry's own names."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", extra="ignore", frozen=True)

    exporter_otlp_endpoint: str = Field(default="", description="base address of a collector; empty: no tracing")
    sdk_disabled: str = Field(default="", description="`true`: no tracing even when a collector is named")
