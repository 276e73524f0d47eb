"""Write what is derived from the code: the reference of commands, the tables of settings, metrics, engines' answers.

`python -m kite_cli.reference` writes below the current folder; with `--check` it only tells what differs.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer
from pydantic_settings import BaseSettings
from typer.cli import get_docs_for_click

from kite.engine.errors import BY_STATUS, DEATH_HINTS, DEATHS, HINTS, REFUSALS, UNAVAILABLE, Death, Refusal
from kite.metrics import Metric
from kite.settings import MetricsSettings, NodeSettings
from kite.tracing.settings import TracingSettings
from kite_arbitrator import metrics as arbitrator_metrics
from kite_arbitrator import shipped
from kite_arbitrator.settings import Settings as ArbitratorSettings
from kite_cli.aliases import UNSET
from kite_cli.app import build
from kite_cli.settings import PlaceSettings
from kite_guard import metrics as guard_metrics
from kite_schemas.generate import Files, run
from kite_schemas.model import Model
from kite_schemas.policy import Policy, flatten
from kite_upcycle import metrics as upcycle_metrics
from kite_upcycle.settings import Settings as UpcycleSettings
from kite_yoco import metrics as yoco_metrics
from kite_yoco.settings import Settings as YocoSettings

COMMANDS = Path("docs/cli.md")
SETTINGS = Path("docs/settings.md")
METRICS = Path("docs/metrics.md")
ANSWERS = Path("docs/engine-answers.md")

READERS: dict[str, type[BaseSettings]] = {
    "the arbitrator": ArbitratorSettings,
    "upcycle, yoco and the guard": NodeSettings,
    "upcycle": UpcycleSettings,
    "yoco": YocoSettings,
    "the `kite` command": PlaceSettings,
    "every service": MetricsSettings,
    "every process": TracingSettings,
}


def commands() -> str:
    """Return the reference of every command as Markdown."""
    command = typer.main.get_command(build())
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="kite"), name="kite", title="Commands")
    return text.rstrip() + "\n"


def settings() -> str:
    """Return the tables of the policy and of the environment as Markdown."""
    lines = [
        "# Settings",
        "",
        "Generated. What decisions follow is the policy: `kite config get` shows it, `kite config set` changes it, and",
        "each change is an event of the ledger. A limit that is unset switches its rule off: `kite status` says which.",
        "The environment only tells a process where things are.",
        "",
        "## Policy",
        "",
        "| key | shipped | meaning |",
        "|---|---|---|",
        *_policy(),
        "",
        "## Environment",
        "",
        "| variable | read by | meaning |",
        "|---|---|---|",
        *_environment(),
    ]
    return "\n".join(lines) + "\n"


def _policy() -> Iterator[str]:
    for key, value in flatten(shipped.policy()).items():
        section, _, leaf = key.partition(".")
        field = _section(section).model_fields[leaf] if leaf else Policy.model_fields[section]
        yield f"| `{key}` | {UNSET if value is None else value} | {field.description or ''} |"


def _section(name: str) -> type[Model]:
    kind = Policy.model_fields[name].annotation
    assert isinstance(kind, type)  # noqa: S101 # a setting with a dot in its key belongs to a model
    assert issubclass(kind, Model)  # noqa: S101 # as above
    return kind


def _environment() -> Iterator[str]:
    readers: dict[tuple[str, str], list[str]] = {}
    for reader, kind in READERS.items():
        prefix = kind.model_config.get("env_prefix", "")
        told = {name for base in READERS.values() if base in kind.__bases__ for name in base.model_fields}
        for name, field in kind.model_fields.items():
            if name in told:
                continue
            readers.setdefault((f"{prefix}{name}".upper(), field.description or ""), []).append(reader)
    for (variable, meaning), names in sorted(readers.items()):
        yield f"| `{variable}` | {', '.join(names)} | {meaning} |"


def metrics() -> str:
    """Return the tables of metrics as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Generated. A service that `KITE_METRICS_PORT` names a port serves a page for Prometheus there, on the",
        "loopback address unless `KITE_METRICS_HOST` says another; each process needs a port of its own: `kite up",
        "--metrics-port N` gives the arbitrator N, yoco N + 1, upcycle N + 2 and the guard N + 3. Unset, nothing is",
        "served; a port that is taken is an error at the start. Values of labels are names of the policy, or among",
        "those that stand here. `deploy/prometheus/rules.yml` has alerts on these, `deploy/grafana` dashboards.",
        "",
        "## The arbitrator",
        "",
        "Read from the state that the ledger gives, when the page is asked for: another leader tells the same numbers.",
        "What the ledger does not have is the process's own: latencies, spans, and what it sees of bus and outbox. One",
        "that waits to lead tells that, and of its spans.",
        "",
        *_metrics(arbitrator_metrics.METRICS),
        *_counted("yoco", yoco_metrics.METRICS),
        *_counted("upcycle", upcycle_metrics.METRICS),
        *_counted("The guard", guard_metrics.METRICS),
    ]
    return "\n".join(lines) + "\n"


def _counted(service: str, found: Iterable[Metric]) -> Iterator[str]:
    yield from ("", f"## {service}", "", "Counted since the process began.", "", *_metrics(found))


def _metrics(found: Iterable[Metric]) -> Iterator[str]:
    yield from ("| metric | kind | meaning | labels |", "|---|---|---|---|")
    for metric in found:
        labels = "; ".join(f"`{label}`: {values}" for label, values in metric.labels.items())
        yield f"| `{metric.name}` | {metric.kind} | {metric.meaning} | {labels} |"


def answers() -> str:
    """Return the tables of what engines answer as Markdown."""
    lines = [
        "# What an engine's answers mean",
        "",
        "Generated. vLLM answers nearly every bad adapter with status 500 and a sentence, some with an empty one. The",
        "sentences change from version to version (these are those of 0.32); the reasons here do not, and they are",
        "what `load_failed`, `retire_failed` and `kite timeline` say. The first row that matches counts.",
        "",
        "## Answers",
        "",
        "| answer | reason | what helps |",
        "|---|---|---|",
        *(f"| {_pattern(pattern)} | `{reason}` | {HINTS.get(reason, '')} |" for pattern, reason in REFUSALS),
        *(f"| status {int(status)} | `{Refusal.DEAD}` | |" for status in UNAVAILABLE),
        *(f"| status {int(status)} | `{reason}` | {HINTS.get(reason, '')} |" for status, reason in BY_STATUS.items()),
        f"| any other, without a word | `{Refusal.SILENT}` | {HINTS[Refusal.SILENT]} |",
        f"| any other | `{Refusal.OTHER}` | |",
        "",
        "## Ends",
        "",
        "Why a process ended, read from the last sentence of its log that names an error and is known; else by its",
        "exit code.",
        "",
        "| sentence | reason | what helps |",
        "|---|---|---|",
        *(f"| {_pattern(pattern)} | `{reason}` | {DEATH_HINTS[reason]} |" for pattern, reason in DEATHS),
        f"| ended by a signal | `{Death.SIGNALLED}` | {DEATH_HINTS[Death.SIGNALLED]} |",
        f"| its keeper ended | `{Death.KEEPER_LOST}` | {DEATH_HINTS[Death.KEEPER_LOST]} |",
        f"| any other | `{Death.OTHER}` | {DEATH_HINTS[Death.OTHER]} |",
    ]
    return "\n".join(lines) + "\n"


def _pattern(pattern: str) -> str:
    """Return a regular expression as a cell of a table."""
    return "`" + pattern.replace("|", "\\|") + "`"


def files() -> Files:
    """Return every generated file with its content."""
    return {COMMANDS: commands(), SETTINGS: settings(), METRICS: metrics(), ANSWERS: answers()}


if __name__ == "__main__":
    sys.exit(run(files(), sys.argv[1:]))
