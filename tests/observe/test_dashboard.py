"""The Grafana dashboard, the documentation and the catalogue of metrics name the same figures."""

import json
import re
from pathlib import Path
from typing import Any

from raysonar.observe.metrics import CATALOGUE

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "cluster/grafana/raysonar.json").read_text())
SERIES = {name: metric for metric in CATALOGUE for name in metric.series}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def series_in(expression: str) -> list[str]:
    return re.findall(r"\$\{source\}(raysonar_\w+)\{model_name=~\"\$model\"\}", expression)


def test_each_query_reads_series_that_exist_in_the_way_of_their_kind():
    assert len(PANELS) > 15
    for panel in PANELS:
        for expression in expressions(panel):
            names = series_in(expression)
            assert names, panel["title"]
            assert len(names) == expression.count("raysonar_"), f"{panel['title']}: {expression}"
            for name in names:
                assert name in SERIES, f"{panel['title']} reads {name}"
                grows = SERIES[name].kind != "gauge"
                assert grows == (f"rate(${{source}}{name}{{" in expression), f"{panel['title']}: {expression}"


def test_each_query_groups_by_labels_that_its_metrics_have():
    for panel in PANELS:
        for expression in expressions(panel):
            labels = {SERIES[name].label for name in series_in(expression)} | {"replica", "le"}
            grouped = [label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")]
            assert set(grouped) <= labels, f"{panel['title']}: {expression}"


def test_every_metric_is_on_the_dashboard():
    shown = {SERIES[name] for panel in PANELS for each in expressions(panel) for name in series_in(each)}
    assert [metric.name for metric in CATALOGUE if metric not in shown] == []


def test_parentheses_of_queries_close_and_panels_do_not_overlap():
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        for expression in expressions(panel):
            assert [expression.count(each) for each in "([{"] == [expression.count(each) for each in ")]}"]
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells
        assert at["x"] + at["w"] <= 24
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_documentation_lists_every_metric_with_its_kind_and_meaning():
    text = (ROOT / "docs/observability.md").read_text()
    rows = re.findall(r"^\| `(raysonar_\w+)`(?: by `(\w+)`)? \| (\w+) \| (.*) \|$", text, re.M)
    assert rows == [(metric.name, metric.label or "", metric.kind, metric.meaning) for metric in CATALOGUE]
