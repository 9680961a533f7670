"""Checks alerts, dashboards, metrics and the runbook (deploy/observability, docs/runbook.md) against each other."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]

# Labels that Prometheus adds to scraped series, and its own metrics.
SCRAPED = {"job", "service", "instance", "le"}
PROMETHEUS = {
    "up": set(),
    "scrape_duration_seconds": set(),
    "ALERTS": {"alertname", "alertstate", "severity"},
}
WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
GROUPING = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)"


def problems(root):
    """All problems."""
    metrics = listed(root / "deploy/observability/metrics.txt")
    rules = alerts(root)
    names = [rule["alert"] for rule in rules]
    for name in {name for name in names if names.count(name) > 1}:
        yield f"{name} exists twice"
    used = set()
    for rule in rules:
        yield from alert(rule)
        for problem in expression(rule["expr"], metrics, used):
            yield f"alert {rule['alert']}: {problem}"
    yield from tests(root, set(names))
    yield from runbook(root, set(names))
    shown, uids = set(), []
    for path in dashboards(root):
        found = json.loads(path.read_text())
        uids.append(found["uid"])
        for problem in dashboard(found, metrics, shown):
            yield f"{path.name}: {problem}"
    if len(set(uids)) != len(uids):
        yield f"two dashboards have the same uid: {uids}"
    for name in sorted(set(metrics) - shown - {"target_info"}):
        yield f"no dashboard shows {name}"


def expressions(root):
    """Every expression of a dashboard with its variables replaced, for promtool."""
    for path in dashboards(root):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield re.sub(r"\$\w+", "5m", target["expr"])


def dashboards(root):
    return sorted((root / "deploy/observability/grafana/dashboards").glob("*.json"))


def alerts(root):
    groups = yaml.safe_load((root / "deploy/observability/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def listed_lines(path):
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def listed(path):
    """The labels of each metric in all services; for a histogram those of its three series."""
    found = {}
    for line in listed_lines(path):
        _, name, kind, *labels = line.split()
        found.setdefault(name, (kind, set()))[1].update(label.removesuffix("?") for label in labels)
    return found


def alert(rule):
    name = rule["alert"]
    annotations = rule.get("annotations", {})
    for key in ("summary", "description"):
        if not annotations.get(key):
            yield f"alert {name} has no {key}"
    if annotations.get("runbook") != f"docs/runbook.md#{name.lower()}":
        yield f"alert {name} does not link to its entry in the runbook: {annotations.get('runbook')}"
    if rule.get("labels", {}).get("severity") not in ("critical", "warning"):
        yield f"alert {name} has no severity"


def tests(root, names):
    """Each alert has tests, both firing and silent."""
    tried = {}
    for test in yaml.safe_load((root / "deploy/observability/alerts_test.yaml").read_text())["tests"]:
        for case in test["promql_expr_test"]:
            asked = re.search(r'alertname="(\w+)"', case["expr"])[1]
            tried.setdefault(asked, set()).add(bool(case["exp_samples"]))
    for name in sorted(names | set(tried)):
        if name not in names:
            yield f"alerts_test.yaml tests {name}, which is not an alert"
        elif tried.get(name) != {True, False}:
            yield f"alerts_test.yaml does not test {name} both firing and silent"


def runbook(root, names):
    text = (root / "docs/runbook.md").read_text()
    entries = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    for name in sorted(names - set(entries)):
        yield f"docs/runbook.md has no entry for {name}"
    for name in sorted(set(entries) - names):
        yield f"docs/runbook.md has an entry for {name}, which is not an alert"
    if len(entries) != len(set(entries)):
        yield "docs/runbook.md has an entry twice"


def dashboard(found, metrics, shown):
    places = set()
    for panel in found["panels"]:
        title = panel.get("title")
        if not title:
            yield f"panel {panel.get('id')} has no title"
        if not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
            yield f"`{title}` has no unit"
        if panel.get("datasource", {}).get("uid") != "${datasource}" or found["templating"]["list"][0]["name"] != "datasource":
            yield f"`{title}` does not use the selected Prometheus"
        if not panel.get("targets"):
            yield f"`{title}` shows nothing"
        grid = panel["gridPos"]
        cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        if cells & places or grid["x"] + grid["w"] > 24:
            yield f"`{title}` overlaps another panel or the edge"
        places |= cells
        for target in panel.get("targets", []):
            for problem in expression(target["expr"], metrics, shown):
                yield f"`{title}`: {problem}"
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                if not re.search(rf"\b{label}\b", target["expr"]):
                    yield f"`{title}`: the legend uses {label}, which the expression drops"
    for variable in found["templating"]["list"]:
        if asked := re.fullmatch(r"label_values\((\w+), (\w+)\)", variable.get("definition", "")):
            yield from (f"variable {variable['name']}: {problem}" for problem in selector(asked[1], [asked[2]], metrics, shown))
        elif variable["type"] == "query":
            yield f"variable {variable['name']}: its definition cannot be parsed"


def expression(text, metrics, used):
    """Checks that an expression's metrics and labels exist. Parses the subset of PromQL in use; promtool checks the rest."""
    text = re.sub(r"\[[^\]]*\]", " ", text)
    kept = []
    for labels in re.findall(GROUPING, text):
        kept += [label.strip() for label in labels.split(",") if label.strip()]
    text = re.sub(GROUPING, " ", text)
    known = set(SCRAPED)
    found = False
    for name, _, matchers in re.findall(r'([a-zA-Z_:][\w:]*)\b(?!\s*\()\s*(\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?', without_words(text)):
        found = True
        labels = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers)
        yield from selector(name, labels, metrics, used)
        known |= own_labels(name, metrics) or set()
    if not found:
        yield f"has no metric: {text}"
    for label in sorted(set(kept) - known):
        yield f"groups by {label}, which its metrics lack"


def without_words(text):
    # Durations, such as that of an offset, and numbers are not names.
    text = re.sub(r"\boffset\s+\w+", " ", text)
    return re.sub(rf"\b(?:{'|'.join(WORDS)})\b", " ", text)


def selector(name, labels, metrics, used):
    own = own_labels(name, metrics)
    if own is None:
        yield f"{name} is not in metrics.txt"
        return
    used.add(base(name, metrics) or name)
    for label in labels:
        if label not in own | SCRAPED:
            yield f"{name} has no label {label}"


def base(name, metrics):
    """The metric of a series."""
    if name in metrics and metrics[name][0] != "histogram":
        return name
    histogram = re.sub("_(bucket|count|sum)$", "", name)
    return histogram if histogram != name and metrics.get(histogram, ("",))[0] == "histogram" else None


def own_labels(name, metrics):
    found = base(name, metrics)
    return metrics[found][1] if found else PROMETHEUS.get(name)


if __name__ == "__main__":
    # A rules file for promtool.
    asked = [{"record": "asked", "expr": text, "labels": {"number": str(number)}} for number, text in enumerate(expressions(ROOT))]
    print(json.dumps({"groups": [{"name": "dashboards", "rules": asked}]}))
