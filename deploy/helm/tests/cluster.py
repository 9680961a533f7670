"""An in-memory API server: as much of Kubernetes as Helm needs to install and upgrade a release.

The only Helm in a package registry is a library without `template`, so charts are really installed here. That also tries what templates
alone cannot: what `lookup` finds at an upgrade, and hooks. Objects are accepted as they come; whether they are right is checked elsewhere.
"""

import base64
import gzip
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

# Every kind the chart uses: group and version, kind, plural.
KINDS = [
    ("v1", "ConfigMap", "configmaps"),
    ("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    ("v1", "Pod", "pods"),
    ("v1", "Secret", "secrets"),
    ("v1", "Service", "services"),
    ("v1", "ServiceAccount", "serviceaccounts"),
    ("apps/v1", "Deployment", "deployments"),
    ("apps/v1", "StatefulSet", "statefulsets"),
    ("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    ("batch/v1", "Job", "jobs"),
    ("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
    ("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
    ("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors"),
    ("networking.k8s.io/v1", "Ingress", "ingresses"),
    ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
]


class Cluster:
    """One empty cluster, for the duration of its `with` block."""

    def __init__(self):
        self.objects = {}
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.version = 1
        handler = type("Handler", (Handler,), {"cluster": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def kubeconfig(self):
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        return "\n".join([
            "apiVersion: v1",
            "kind: Config",
            f"clusters: [{{name: test, cluster: {{server: '{address}'}}}}]",
            "users: [{name: test, user: {}}]",
            "contexts: [{name: test, context: {cluster: test, user: test}}]",
            "current-context: test",
        ])

    def put(self, path, body):
        """Stores an object in the form that the real server would return."""
        with self.lock:
            self.version += 1
            metadata = body.setdefault("metadata", {})
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
            metadata["resourceVersion"] = str(self.version)
            if body.get("kind") == "Job":
                # Helm waits for the jobs of hooks.
                body["status"] = {"succeeded": 1, "conditions": [
                    {"type": "SuccessCriteriaMet", "status": "True"}, {"type": "Complete", "status": "True"}]}
            self.objects[path] = body
            return body

    def release(self, name, revision):
        """Helm's record of a release: its manifest, hooks and notes."""
        for path, found in self.objects.items():
            if path.endswith(f"/secrets/sh.helm.release.v1.{name}.v{revision}"):
                packed = base64.b64decode(base64.b64decode(found["data"]["release"]))
                return json.loads(gzip.decompress(packed))
        raise KeyError(f"there is no revision {revision} of {name}")


class Handler(BaseHTTPRequestHandler):
    cluster = None
    protocol_version = "HTTP/1.1"
    # Sends each response at once, not 40 ms later.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return protobuf_secret(data[4:]) if data.startswith(b"k8s\0") else json.loads(data or b"{}")

    def missing(self, path):
        self.answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404,
                          "message": f"{path} not found"})

    def do_GET(self):
        split = urlsplit(self.path)
        path, query = split.path, parse_qs(split.query)
        if path == "/openapi/v2":
            # An empty OpenAPI document: Helm skips kinds that it does not contain.
            self.send_response(200)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if discovered := discovery(path):
            return self.answer(200, discovered)
        if path in self.cluster.objects:
            return self.answer(200, self.cluster.objects[path])
        plural = path.rsplit("/", 1)[-1]
        kind = next((row for row in KINDS if row[2] == plural), None)
        if kind is None:
            return self.missing(path)
        wanted = [part.split("=", 1) for part in query.get("labelSelector", [""])[0].split(",") if "=" in part]
        inside = path if "/namespaces/" in path else None
        items = [
            found for where, found in sorted(self.cluster.objects.items())
            if (where.startswith(inside + "/") if inside else f"/{plural}/" in where)
            and all(found["metadata"].get("labels", {}).get(name) == value for name, value in wanted)
        ]
        if "watch" in query:
            return self.watch(kind, items if "sendInitialEvents" in query else [])
        self.answer(200, {"kind": f"{kind[1]}List", "apiVersion": kind[0],
                          "metadata": {"resourceVersion": str(self.cluster.version)}, "items": items})

    def watch(self, kind, items):
        """The existing objects, and then no events: nothing here changes by itself."""
        end = {"kind": kind[1], "apiVersion": kind[0], "metadata": {
            "resourceVersion": str(self.cluster.version), "annotations": {"k8s.io/initial-events-end": "true"}}}
        events = [{"type": "ADDED", "object": item} for item in items] + [{"type": "BOOKMARK", "object": end}]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(json.dumps(event).encode() + b"\n")
        self.wfile.flush()
        self.close_connection = True
        self.cluster.stopping.wait(30)

    def do_POST(self):
        body = self.body()
        path = f"{urlsplit(self.path).path}/{body['metadata']['name']}"
        self.answer(201, self.cluster.put(path, body))

    def do_PUT(self):
        self.answer(200, self.cluster.put(urlsplit(self.path).path, self.body()))

    def do_PATCH(self):
        path = urlsplit(self.path).path
        if path not in self.cluster.objects:
            return self.missing(path)
        self.answer(200, self.cluster.put(path, merged(self.cluster.objects[path], self.body())))

    def do_DELETE(self):
        self.body()
        path = urlsplit(self.path).path
        if self.cluster.objects.pop(path, None) is None:
            return self.missing(path)
        self.answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})


def discovery(path):
    """The discovery documents; `None` for other paths."""
    groups = {}
    for version, *_ in KINDS:
        if "/" in version:
            groups.setdefault(version.split("/")[0], []).append(version)
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
            {"name": name, "versions": [{"groupVersion": v, "version": v.split("/")[1]} for v in sorted(set(versions))],
             "preferredVersion": {"groupVersion": versions[0], "version": versions[0].split("/")[1]}}
            for name, versions in groups.items()]}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    rows = [row for row in KINDS if row[0] == version]
    if not rows or path not in (f"/api/{version}", f"/apis/{version}"):
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": [
        {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for _, kind, plural in rows]}


def merged(old, patch):
    """JSON merge patch. Lists are replaced, where the real server would merge some of them."""
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    out = dict(old)
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = merged(old.get(name), value)
    return out


def protobuf_secret(data):
    """Helm stores releases in Secrets, which it sends as protobuf, unlike all other kinds."""
    raw = fields(data)[2][0]
    secret = fields(raw)
    metadata = fields(secret[1][0])
    labels = {pair[1][0].decode(): pair[2][0].decode() for pair in map(fields, metadata.get(11, []))}
    data = {pair[1][0].decode(): base64.b64encode(pair[2][0]).decode() for pair in map(fields, secret.get(2, []))}
    return {"kind": "Secret", "apiVersion": "v1", "type": secret[3][0].decode(), "data": data,
            "metadata": {"name": metadata[1][0].decode(), "labels": labels}}


def fields(data):
    """The length-delimited fields of a message by their numbers; the others are skipped."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        tag = varint()
        if tag & 7 == 2:
            length = varint()
            found.setdefault(tag >> 3, []).append(data[at:at + length])
            at += length
        else:
            varint()
    return found
