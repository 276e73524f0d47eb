"""The dashboards of Grafana, and what tells Grafana of them: each panel asks one question of docs/metrics.md.

`python -m kite_cli.deploy.dashboards` writes below the current folder; with `--check` it only tells what differs.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kite_schemas.generate import Files, run

PLACE = Path("deploy/grafana")
MOUNTED = "/etc/grafana/dashboards"
"""Where a container of Grafana finds the dashboards."""

SOURCE = {"type": "prometheus", "uid": "prometheus"}
SCHEMA = 39  # of Grafana 10.4: later ones read it
COLUMNS, WIDTH, HEIGHT = 2, 12, 8  # Grafana's grid is 24 wide


@dataclass(frozen=True, slots=True)
class Panel:
    """One question: what Prometheus is asked, by the legend of each answer, and the unit as Grafana names it.

    `limit` is drawn as a line: beyond it somebody should look.
    """

    question: str
    asked: Mapping[str, str]
    unit: str = "short"
    limit: float | None = None


DASHBOARDS: Mapping[str, Sequence[Panel]] = {
    "fleet": (
        Panel("Does somebody decide?", {"leaders": "sum(kite_arbitrator_leading)"}),
        Panel("Which services answer?", {"{{job}} {{instance}}": 'up{job=~"kite-.*"}'}),
        Panel(
            "How are the instances?",
            {"{{node}} {{base}} {{state}}": "sum by (node, base, state) (kite_instances)"},
        ),
        Panel("Which pools are under pressure?", {"{{base}} on {{node}}": "kite_pool_pressure"}),
        Panel(
            "What is under way?",
            {"orders": "kite_orders_open", "injections": "kite_injections_open", "frozen": "kite_admissions_frozen"},
        ),
        Panel(
            "Do traces have holes?",
            {
                "{{job}} {{outcome}}": "sum by (job, outcome) "
                '(rate(kite_trace_spans_total{outcome=~"failed|dropped"}[5m]))'
            },
            "cps",
            limit=0,
        ),
    ),
    "arbitrator": (
        Panel(
            "How long does a decision take?",
            {
                "half": "histogram_quantile(0.5, sum by (le) (rate(kite_decision_latency_seconds_bucket[5m])))",
                "99 of 100": "histogram_quantile(0.99, sum by (le) (rate(kite_decision_latency_seconds_bucket[5m])))",
            },
            "s",
            limit=0.017,
        ),
        Panel(
            "How many decisions a second?", {"decisions": "sum(rate(kite_decision_latency_seconds_count[5m]))"}, "cps"
        ),
        Panel("How far is the ledger behind the bus?", {"messages": "kite_ledger_lag_messages"}, limit=500),
        Panel(
            "Does the ledger move?",
            {"since its last row": "kite_ledger_age_seconds", "outbox waits": "kite_outbox_wait_seconds"},
            "s",
            limit=10,
        ),
        Panel("How full are the streams?", {"{{stream}}": "kite_stream_fill_ratio"}, "percentunit", limit=0.7),
        Panel("Is anything lost on the bus?", {"open gap": "kite_bus_gap"}, limit=0),
        Panel(
            "How old is what the nodes tell?",
            {"{{node}}": "kite_telemetry_age_seconds", "{{node}}, transport": "kite_telemetry_lag_seconds"},
            "s",
        ),
        Panel(
            "How much of it is lost, and who is stale?",
            {"{{node}} lost": "kite_telemetry_loss_ratio", "{{node}} stale": "kite_telemetry_stale"},
            "percentunit",
            limit=0,
        ),
    ),
    "upcycle": (
        Panel(
            "How long do its orders take (99 of 100)?",
            {
                "{{order}}": "histogram_quantile(0.99, sum by (order, le) "
                "(rate(kite_upcycle_order_seconds_bucket[15m])))"
            },
            "s",
        ),
        Panel(
            "How do they end?",
            {"{{order}}: {{outcome}}": "sum by (order, outcome) (increase(kite_upcycle_order_seconds_count[15m]))"},
        ),
        Panel("How much do old versions take?", {"{{node}}": "kite_upcycle_adapter_retention_bytes_total"}, "bytes"),
        Panel(
            "Do orders come again?",
            {"{{job}} {{instance}}": "increase(kite_order_redeliveries_total[10m])"},
            limit=5,
        ),
        Panel(
            "How do the guard's comparisons end?",
            {"{{order}}: {{outcome}}": "sum by (order, outcome) (increase(kite_guard_order_seconds_count[15m]))"},
        ),
    ),
    "yoco": (
        Panel(
            "How long until an instance is ready (99 of 100)?",
            {"{{path}}": "histogram_quantile(0.99, sum by (path, le) (rate(kite_yoco_ready_seconds_bucket[15m])))"},
            "s",
            limit=0.417,
        ),
        Panel(
            "Which path do hand-overs take?",
            {
                "{{base}} {{path}}": "sum by (base, path) (increase(kite_yoco_passages_total[1h])) "
                "/ on (base) group_left sum by (base) (increase(kite_yoco_passages_total[1h]))"
            },
            "percentunit",
        ),
        Panel(
            "How many are in time?",
            {
                "{{base}} {{path}}": 'sum by (base, path) (increase(kite_yoco_deadlines_total{met="yes"}[1h])) '
                "/ sum by (base, path) (increase(kite_yoco_deadlines_total[1h]))"
            },
            "percentunit",
        ),
        Panel("How many became ready?", {"{{base}} {{path}}": "increase(kite_yoco_passages_total[15m])"}),
        Panel(
            "How do starts, wakes and prewarms end?",
            {"{{order}}: {{code}}": "sum by (order, code) (increase(kite_yoco_orders_total[15m]))"},
        ),
    ),
}
"""The dashboards by name; each names metrics that docs/metrics.md has, which a test holds it to."""


def dashboard(name: str, panels: Sequence[Panel]) -> str:
    """Return one dashboard as Grafana's JSON."""
    document = {
        "uid": f"kite-{name}",
        "title": f"KITE: {name}",
        "tags": ["kite"],
        "schemaVersion": SCHEMA,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["kite"], "title": "KITE", "asDropdown": False}],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, object]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.question,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, **_limit(panel.limit)}, "overrides": []},
        "targets": list(_targets(panel.asked)),
    }


def _targets(asked: Mapping[str, str]) -> Iterator[dict[str, object]]:
    for letter, (legend, expression) in zip("ABCDEFGH", asked.items(), strict=False):
        yield {"refId": letter, "datasource": SOURCE, "expr": expression, "legendFormat": legend}


def _limit(limit: float | None) -> dict[str, object]:
    """Return a dashed line at the limit."""
    if limit is None:
        return {}
    steps = [{"color": "green", "value": None}, {"color": "red", "value": limit}]
    return {
        "custom": {"thresholdsStyle": {"mode": "dashed"}},
        "thresholds": {"mode": "absolute", "steps": steps},
    }


SOURCES = """\
# Generated: where Grafana's numbers come from. PROMETHEUS_URL is set for the container of Grafana.
apiVersion: 1
datasources:
  - name: Prometheus
    uid: prometheus
    type: prometheus
    access: proxy
    url: ${PROMETHEUS_URL}
    isDefault: true
"""

PROVIDER = f"""\
# Generated: where Grafana finds the dashboards.
apiVersion: 1
providers:
  - name: kite
    folder: KITE
    type: file
    allowUiUpdates: false
    options:
      path: {MOUNTED}
"""


def files() -> Files:
    """Return every generated file with its content."""
    drawn = {PLACE / "dashboards" / f"{name}.json": dashboard(name, panels) for name, panels in DASHBOARDS.items()}
    provisioned = PLACE / "provisioning"
    return {
        **drawn,
        provisioned / "datasources" / "prometheus.yml": SOURCES,
        provisioned / "dashboards" / "kite.yml": PROVIDER,
    }


if __name__ == "__main__":
    sys.exit(run(files(), sys.argv[1:]))
