#!/usr/bin/env python3
"""Checks the Helm chart, docker-compose.yml, alerts and dashboards. `./dev charts` runs it.

Helm installs and upgrades a release with each file in values/ on a fake API server (cluster.py). The objects are compared
with golden/ (`--update` rewrites it), and checked against Kubernetes' schemas and the design (semantics.py). Each file in
refused/ must be refused, with the text in its first line.
"""

import argparse
import asyncio
import contextlib
import difflib
import functools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helm_sdkpy
import jsonschema
import referencing
import yaml
from kubernetes_validate import latest_version, utils as kubernetes

import observability
import semantics
from cluster import Cluster

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CHART = HERE.parent / "construct"
# The oldest version that the chart accepts, and the newest with a schema.
KUBERNETES = ["1.30", latest_version()]
# Other projects define these kinds; their schemas are not available here.
UNDESCRIBED = {"PrometheusRule", "ScaledObject", "ServiceMonitor"}
NAMESPACE = "construct"
RELEASE = "demo"

failures = []


def fail(what, message):
    failures.append(f"{what}: {message}")


def release(values, before=None):
    """Helm's first revision for these values, and an upgrade of it. `before` may add objects to the cluster."""
    with Cluster() as cluster:
        if before:
            before(cluster)
        configuration = helm_sdkpy.Configuration(namespace=NAMESPACE, kubeconfig=cluster.kubeconfig)
        for action in (helm_sdkpy.Install, helm_sdkpy.Upgrade):
            asyncio.run(action(configuration).run(RELEASE, str(CHART), values=values, wait=False, timeout=60))
        return [cluster.release(RELEASE, revision) for revision in (1, 2)]


def text(found):
    """A release as one text: manifest, hooks, notes."""
    hooks = sorted(found.get("hooks") or [], key=lambda hook: hook["name"])
    return found.get("manifest", "") + "".join(f"---\n# Hook: {hook['path']}\n{hook['manifest']}\n" for hook in hooks)


def documents(found):
    return [document for document in yaml.safe_load_all(text(found)) if document]


def golden(found):
    """The text without parts that differ every time."""
    out = re.sub(r"(checksum/secrets: )[0-9a-f]{64}", r"\1…", text(found))
    out = re.sub(r"((?:master|secrets|token)\.key|(?:password|url)(?:-[a-z]+)?): [A-Za-z0-9+/=]{40,}$", r"\1: …", out, flags=re.MULTILINE)
    # Copies of other files; `check_copies` compares them.
    out = re.sub(r"^(  permissions\.conf: \|)\n(?:    .*\n)+", r"\1 …\n", out, flags=re.MULTILINE)
    out = re.sub(r"^(  construct-\S+\.json: \|)\n(?:    .*\n)+", r"\1 …\n", out, flags=re.MULTILINE)
    out = re.sub(r"(?<=\nkind: PrometheusRule\n)((?:.*\n)*?spec:)\n(?: .*\n)+", r"\1 …\n", out)
    # Templates leave empty lines behind.
    out = "\n".join(line.rstrip() for line in out.splitlines() if line.strip())
    return f"{out}\n---\n# Notes\n{found['info']['notes'].strip()}\n"


@functools.lru_cache(maxsize=None)
def described(kind, api_version, version):
    """Kubernetes' schema of this kind. kubernetes-validate itself would read all schemas for each object."""
    full = [known for known in kubernetes.all_versions() if kubernetes.major_minor(known) == kubernetes.major_minor(version)][-1]
    folder = f"kubernetes-json-schema/v{full}-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = kubernetes.schema_contents(f"{folder}/{kind.lower()}-{group}.json", version)
    return jsonschema.Draft202012Validator(schema, registry=definitions(folder, version))


@functools.lru_cache(maxsize=None)
def definitions(folder, version):
    found = referencing.Resource.from_contents(kubernetes.schema_contents(f"{folder}/_definitions.json", version))
    return (found @ referencing.Registry()).crawl()


def check_set(path, update):
    name = path.stem
    values = yaml.safe_load(path.read_text()) or {}
    first, second = release(values)
    if text(first) != text(second):
        diff = difflib.unified_diff(text(first).splitlines(), text(second).splitlines(), "installed", "upgraded", lineterm="", n=1)
        fail(name, "an upgrade without changes changes the installed objects:\n" + "\n".join(list(diff)[:40]))
    expected = HERE / "golden" / f"{name}.yaml"
    if update:
        expected.write_text(golden(first))
    elif not expected.exists() or expected.read_text() != golden(first):
        old = expected.read_text().splitlines() if expected.exists() else []
        diff = list(difflib.unified_diff(old, golden(first).splitlines(), f"golden/{name}.yaml", "now", lineterm=""))
        fail(name, "differs from its golden file; if intended: ./dev charts --update\n" + "\n".join(diff[:60]))
    everything = documents(first)
    for document in everything:
        if document["kind"] in UNDESCRIBED:
            continue
        for version in KUBERNETES:
            for error in described(document["kind"], document["apiVersion"], version).iter_errors(document):
                where = "/".join(map(str, error.path))
                fail(name, f"{document['kind']} {document['metadata']['name']} in Kubernetes {version}: {where}: {error.message[:300]}")
    for problem in semantics.problems(everything, values, NAMESPACE):
        fail(name, problem)
    check_copies(name, everything, values.get("monitoring", {}))
    return len(everything)


def check_copies(name, everything, monitoring):
    """Alerts, dashboards and NATS permissions are complete copies of their files, and present only if enabled."""
    rules = [d["spec"] for d in everything if d["kind"] == "PrometheusRule"]
    wanted = yaml.safe_load((ROOT / "deploy/observability/alerts.yaml").read_text())
    if rules != [wanted] * monitoring.get("prometheusRule", {}).get("enabled", False):
        fail(name, "the alerts differ from deploy/observability/alerts.yaml")
    wanted = (ROOT / "deploy/nats/permissions.conf").read_text()
    for document in everything:
        if document["kind"] == "ConfigMap" and document["data"].get("permissions.conf", wanted).strip() != wanted.strip():
            fail(name, "the NATS permissions differ from deploy/nats/permissions.conf")
    shown = {key: text for d in everything if d["kind"] == "ConfigMap" and d["metadata"]["labels"].get("grafana_dashboard")
             for key, text in d["data"].items()}
    wanted = {f"construct-{path.name}": path.read_text() for path in observability.dashboards(ROOT)}
    if shown != (wanted if monitoring.get("dashboards", {}).get("enabled") else {}):
        fail(name, "the dashboards differ from deploy/observability/grafana/dashboards")


def check_observability():
    for problem in observability.problems(ROOT):
        fail("observability", problem)


def check_refused(path):
    expected = path.read_text().splitlines()[0].removeprefix("# refused: ")
    values = yaml.safe_load(path.read_text()) or {}
    try:
        release(values)
    except helm_sdkpy.HelmError as error:
        if expected not in str(error):
            fail(path.stem, f"is refused, but not with `{expected}`: {error}")
    else:
        fail(path.stem, f"is accepted; `{expected}` was expected")


def check_lint():
    """Helm's lint. The default values lack required decisions; `fail` only warns there."""
    with Cluster() as cluster:
        configuration = helm_sdkpy.Configuration(namespace=NAMESPACE, kubeconfig=cluster.kubeconfig)
        # Helm prints it itself, bypassing Python.
        stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        try:
            found = asyncio.run(helm_sdkpy.Lint(configuration).run(str(CHART)))
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(nowhere)
    # 1 is information, such as a missing icon.
    for message in found["Messages"] or []:
        if message["Severity"] > 1:
            fail("lint", json.dumps(message))


def check_secrets_are_followed():
    """The keys of an installation survive upgrades, and pods are replaced when a Secret of the operator's changes."""
    values = yaml.safe_load((HERE / "values" / "external-secrets.yaml").read_text())
    sums = []
    for key in ("b25l", "dHdv"):
        def put(cluster, key=key):
            cluster.put(f"/api/v1/namespaces/{NAMESPACE}/secrets/vault-keys", {
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": {"name": "vault-keys"},
                "data": {"master.key": key, "secrets.key": key, "token.key": key}})
        found, _ = release(values, put)
        sums.append(set(re.findall(r"checksum/secrets: (\S+)", text(found))))
    if len(sums[0]) != 1 or sums[0] == sums[1]:
        fail("secrets", f"a changed key does not replace the pods: {sums}")
    values["slack"] = {"enabled": True, "existingSecret": "vault-slack"}
    sums = []
    for token in ("b25l", "dHdv"):
        def put(cluster, token=token):
            cluster.put(f"/api/v1/namespaces/{NAMESPACE}/secrets/vault-slack", {
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": {"name": "vault-slack"},
                "data": {"CONSTRUCT_SLACK_SIGNING_SECRET": token}})
        found, _ = release(values, put)
        pods = [d["spec"]["template"]["metadata"] for d in documents(found) if d["kind"] == "Deployment"]
        sums.append({(pod["labels"][semantics.COMPONENT], pod["annotations"]["checksum/secrets"]) for pod in pods})
    replaced = {component for component, _ in sums[0] - sums[1]}
    if replaced != {"slack"}:
        fail("secrets", f"a changed secret of Slack's replaces {sorted(replaced)}")
    values = yaml.safe_load((HERE / "values" / "evaluation.yaml").read_text())
    known = "cGtub3duLXBhc3N3b3Jk"

    def put(cluster):
        cluster.put(f"/api/v1/namespaces/{NAMESPACE}/secrets/{RELEASE}-construct-nats", {
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": {"password-gateway": known, "url-gateway": "old"},
            "metadata": {"name": f"{RELEASE}-construct-nats", "labels": {"app.kubernetes.io/managed-by": "Helm"},
                         "annotations": {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}}})
    found, _ = release(values, put)
    secret = next(d for d in documents(found) if d["kind"] == "Secret" and d["metadata"]["name"].endswith("-nats"))
    if secret["data"]["password-gateway"] != known:
        fail("secrets", "NATS's existing password in the cluster is replaced")


def check_settings():
    """Every setting of every service is allowed in values or belongs to the chart, and no other is."""
    schema = json.loads((CHART / "values.schema.json").read_text())["$defs"]
    sources = {
        "gateway": "services/gateway/src/config.rs",
        "reconciler": "services/reconciler/src/lib.rs",
        "interpreter": "services/interpreter/src/lib.rs",
        "providers": "services/providers/src/config.rs",
        "scanner": "services/scanner/src/config.rs",
        "slack": "services/slack/src/config.rs",
    }
    common = fields("crates/runtime/src/config/common.rs", "Common")
    for service, path in sources.items():
        own = fields(path, "Config")
        given = set(schema[f"{service}Config"]["properties"])
        for key in sorted(given - own - common):
            fail("settings", f"the chart's {service}.config has {key}, which the service does not know")
        for key in sorted((own | common) - given - semantics.OWNED - semantics.SECRETS):
            fail("settings", f"{service} has the setting {key}; add it to {service}Config in values.schema.json, or to OWNED or SECRETS in semantics.py")
        for key in sorted(given & (semantics.OWNED | semantics.SECRETS)):
            fail("settings", f"{service}.config has {key}, which values must not set")
    limits = fields("services/interpreter/src/tiers.rs", "Overrides")
    if limits != set(schema["limits"]["properties"]):
        fail("settings", f"limits of pools differ: {sorted(limits ^ set(schema['limits']['properties']))}")
    components = yaml.safe_load((CHART / "files" / "components.yaml").read_text())
    secrets = {key for facts in components.values() for key in facts.get("secrets", [])}
    written = set(re.findall(r"^    pub (slack_\w+): Option<Secret>", (ROOT / sources["slack"]).read_text(), re.MULTILINE))
    if not secrets == written == semantics.SECRETS:
        fail("settings", f"secrets differ: components.yaml has {sorted(secrets)}, the service {sorted(written)}, semantics.py {sorted(semantics.SECRETS)}")
    if set(components) != set(sources):
        fail("settings", f"components.yaml has {sorted(components)}, and the sources have settings of {sorted(sources)}")


def fields(path, struct):
    """The fields of a settings struct, which are its keys."""
    source = (ROOT / path).read_text()
    found = re.search(rf"pub struct {struct} \{{\n(.*?)\n\}}", source, re.DOTALL)
    if not found:
        raise SystemExit(f"{path} has no struct {struct}")
    return set(re.findall(r"^    pub (\w+):", found[1], re.MULTILINE))


def check_compose():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fail("docker-compose.yml", done.stdout + done.stderr)
    for problem in semantics.compose_problems(ROOT):
        fail("docker-compose.yml", problem)


@contextlib.contextmanager
def without_remarks():
    """Suppresses Helm's repeated note, printed bypassing Python, that the chart has links. Other output stays visible."""
    remarks = subprocess.Popen(["grep", "--line-buffered", "--invert-match", "found symbolic link in path"], stdin=subprocess.PIPE, stdout=2)
    stderr = os.dup(2)
    os.dup2(remarks.stdin.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        remarks.stdin.close()
        remarks.wait()


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--update", action="store_true", help="write the golden files anew")
    update = arguments.parse_args().update
    sets = sorted((HERE / "values").glob("*.yaml"))
    refused = sorted((HERE / "refused").glob("*.yaml"))
    check_lint()
    # Helm's client throttles itself most of the time, so they run concurrently.
    with without_remarks(), ThreadPoolExecutor(8) as pool:
        others = [pool.submit(check) for check in (check_secrets_are_followed, check_settings, check_compose, check_observability)]
        counts = list(pool.map(lambda path: check_set(path, update), sets))
        list(pool.map(check_refused, refused))
        for other in others:
            other.result()
    stale = {path.stem for path in (HERE / "golden").glob("*.yaml")} - {path.stem for path in sets}
    for name in sorted(stale):
        fail(name, "there is a golden file without values")
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"charts: {len(sets)} sets of values make {sum(counts)} objects, {len(refused)} are refused; {len(failures)} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
