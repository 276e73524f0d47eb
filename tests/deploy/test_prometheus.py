"""Alerts and dashboards: Prometheus' own tool judges them, and they name what the services tell, nothing else."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kite.bus import FILL_ALARM_PPM
from kite.bus.mark import PPM
from kite.clock import US_PER_S
from kite.metrics import Metric
from kite_arbitrator import metrics as arbitrator
from kite_arbitrator import shipped
from kite_cli.deploy import dashboards
from kite_guard import metrics as guard
from kite_schemas.generate import differing
from kite_upcycle import metrics as upcycle
from kite_yoco import metrics as yoco

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "deploy" / "prometheus"
RULES = (PLACE / "rules.yml").read_text()
CASES = (PLACE / "rules_test.yml").read_text()
PANELS = [panel for panels in dashboards.DASHBOARDS.values() for panel in panels]

ALERTS = re.findall(r"- alert: (\w+)", RULES)
NAME = re.compile(r"\bkite_[a-z0-9_]+\b")
COMMAND = re.compile(r"`kite ([a-z -]+)")


def shown(metric: Metric) -> set[str]:
    """The names under which a metric stands on a page."""
    parts = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
    return {metric.name + part for part in parts}


SHOWN = {name for service in (arbitrator, yoco, upcycle, guard) for one in service.METRICS for name in shown(one)}
DECLARED = {one.name for service in (arbitrator, yoco, upcycle, guard) for one in service.METRICS}


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool") or shutil.which(str(Path(sys.executable).parent / "promtool"))
    if found is None:
        pytest.skip("no promtool: `make .venv/bin/promtool` fetches it where apt-get does")
    return found


def judged(*arguments: str) -> str:
    done = subprocess.run(arguments, cwd=PLACE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_rules(promtool: str):
    assert f"{len(ALERTS)} rules found" in judged(promtool, "check", "rules", "rules.yml")


def test_each_alert_fires_when_it_should_and_not_before(promtool: str):
    assert "SUCCESS" in judged(promtool, "test", "rules", "rules_test.yml")


def test_a_wrong_limit_is_noticed(promtool: str, tmp_path: Path):
    (tmp_path / "rules.yml").write_text(RULES.replace("kite_stream_fill_ratio > 0.7", "kite_stream_fill_ratio > 0.6"))
    (tmp_path / "rules_test.yml").write_text(CASES)
    argv = [promtool, "test", "rules", "rules_test.yml"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "KiteStreamFilling" in done.stdout + done.stderr


def test_each_alert_is_tried_and_says_what_to_do():
    tried = set(re.findall(r'alertname="(\w+)"', CASES))
    assert set(ALERTS) == tried
    assert len(ALERTS) == len(set(ALERTS))
    for text in RULES.split("- alert: ")[1:]:
        for part in ("severity:", "summary:", "description:"):
            assert part in text, text
    assert set(re.findall(r"severity: (\w+)", RULES)) == {"critical", "warning"}


@pytest.mark.parametrize("text", [RULES, CASES], ids=["rules", "cases"])
def test_what_alerts_name_is_told_by_a_service(text: str):
    named = set(NAME.findall(text))
    assert named
    assert named <= SHOWN | DECLARED


def test_commands_that_alerts_name_exist():
    reference = (ROOT / "docs" / "cli.md").read_text()
    named = {" ".join(word for word in found.split() if word.islower()) for found in COMMAND.findall(RULES)}
    assert "doctor" in named
    assert {name for name in named if f"kite {name}`" not in reference} == set()


def test_limits_are_those_of_the_code():
    deadline_us = shipped.policy().arbitration.decision_deadline_us
    assert deadline_us is not None
    assert f"kite_stream_fill_ratio > {FILL_ALARM_PPM / PPM}" in RULES
    assert f"[10m]))) > {deadline_us / US_PER_S}" in RULES
    assert deadline_us / US_PER_S in arbitrator.BOUNDS_S


def test_panels_ask_for_what_is_told_and_are_questions():
    asked = {name for panel in PANELS for expression in panel.asked.values() for name in NAME.findall(expression)}
    assert asked <= SHOWN
    assert all(panel.question.endswith("?") for panel in PANELS)
    assert len({panel.question for panel in PANELS}) == len(PANELS)


def test_each_metric_has_a_panel_or_a_reason_for_none():
    asked = {name for panel in PANELS for expression in panel.asked.values() for name in NAME.findall(expression)}
    unasked = {one.name for service in (arbitrator, yoco, upcycle, guard) for one in service.METRICS
               if not shown(one) & asked}  # fmt: skip
    assert unasked == {"kite_ledger_position"}  # a number that only grows says nothing as a line


def test_expressions_of_panels_are_promql(promtool: str, tmp_path: Path):
    expressions = [expression for panel in PANELS for expression in panel.asked.values()]
    rules = [{"record": f"kite:panel:{number}", "expr": expr} for number, expr in enumerate(expressions)]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in judged(promtool, "check", "rules", str(tmp_path / "panels.yml"))


def test_dashboards_are_as_generated():
    assert differing(ROOT, dashboards.files()) == []


def test_panels_lie_beside_each_other():
    for path, text in dashboards.files().items():
        if path.suffix == ".json":
            places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in json.loads(text)["panels"]]
            assert len(set(places)) == len(places)
            assert len(places) <= 8
