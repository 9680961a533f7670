"""Checks of the design on a rendered chart, beyond Kubernetes' schemas."""

import ipaddress
import json
import re
from pathlib import Path

import yaml

# Settings that the chart sets: addresses, folders, keys, and those derived from other values.
OWNED = {
    "nats_url", "nats_ca_file", "nats_certificate_file", "nats_key_file", "database_url", "data_dir", "health_listen", "shutdown_grace", "instance_id",
    "master_key", "master_key_file", "secrets_key", "secrets_key_file", "token_key", "token_key_file",
    # The operator protocol is for users' own machines, so it has no port.
    "gateway_listen", "gateway_socket", "gateway_operator_listen", "providers_proxy_listen", "interpreter_pools", "interpreter_workspace_roots", "interpreter_cache_dir",
    "slack_listen", "scanner_dir",
    # Files from Secrets that other values name.
    "gateway_tls_certificate", "gateway_tls_key", "gateway_tls_client_ca",
    "slack_gateway_ca", "slack_gateway_certificate", "slack_gateway_certificate_key",
}
# Settings from an operator's Secret, which never appear in values. All of them are Slack's.
SECRETS = {"slack_app_token", "slack_bot_token", "slack_client_secret", "slack_connect_key", "slack_gateway_key", "slack_signing_secret"}
SERVICES = ["gateway", "reconciler", "interpreter", "providers", "scanner", "slack"]
WORKLOADS = {"Deployment", "StatefulSet", "Job"}
COMPONENT = "app.kubernetes.io/component"


def problems(documents, values, namespace):
    """All problems of the rendered objects."""
    chart = Rendered(documents, values, namespace)
    yield from chart.names()
    for workload in chart.workloads:
        yield from chart.pod(workload)
    yield from chart.references()
    if values.get("networkPolicy", {}).get("enabled", True):
        yield from chart.network()


class Rendered:
    def __init__(self, documents, values, namespace):
        self.documents = documents
        self.values = values
        self.namespace = namespace
        self.workloads = [d for d in documents if d["kind"] in WORKLOADS]
        self.given = {strings for strings in texts(values)}

    def of_kind(self, kind):
        return [d for d in self.documents if d["kind"] == kind]

    def names(self):
        seen = set()
        for document in self.documents:
            key = (document["kind"], document["metadata"]["name"])
            if key in seen:
                yield f"{key} exists twice"
            seen.add(key)
            if len(key[1]) > 63:
                yield f"{key} has a name longer than 63 characters"

    def pod(self, workload):
        """Restricted Pod Security and our own rules. A pool with commands differs in exactly three fields."""
        name = f"{workload['kind']} {workload['metadata']['name']}"
        template = workload["spec"]["template"]
        spec, labels = template["spec"], template["metadata"]["labels"]
        component = labels[COMPONENT]
        context = spec.get("securityContext", {})
        confined = spec.get("hostUsers") is False
        if confined and component != "interpreter":
            yield f"{name}: only interpreters have user namespaces"
        if (component == "interpreter") != (spec.get("shareProcessNamespace") is True):
            yield f"{name}: processes that commands leave behind are not reaped, or processes are shared unnecessarily"
        if spec.get("automountServiceAccountToken") is not False or spec.get("serviceAccountName", "default") == "default":
            yield f"{name}: has an account's token, or the default account"
        if spec.get("enableServiceLinks") is not False:
            yield f"{name}: Kubernetes would set CONSTRUCT_… variables"
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser") or context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{name}: the pod is not restricted"
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(field):
                yield f"{name}: has {field}"
        for volume in spec.get("volumes", []):
            if not set(volume) <= {"name", "configMap", "emptyDir", "persistentVolumeClaim", "secret"}:
                yield f"{name}: has a volume of a disallowed kind: {volume}"
            if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
                yield f"{name}: {volume['name']} has no limit"
        for container in spec["containers"] + spec.get("initContainers", []):
            security = dict(container.get("securityContext", {}))
            extra = {field: security.pop(field) for field in ("procMount", "seccompProfile", "appArmorProfile") if field in security}
            if security != {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}:
                yield f"{name}: the container is not restricted: {security}"
            if confined != (extra.get("procMount") == "Unmasked") or (extra and not confined):
                yield f"{name}: bubblewrap's requirements are met only partly: {extra}"
            if "memory" not in container.get("resources", {}).get("limits", {}) or "cpu" not in container["resources"].get("requests", {}):
                yield f"{name}: has no memory limit or no CPU request"
            variables = [variable["name"] for variable in container.get("env", [])]
            for twice in {variable for variable in variables if variables.count(variable) > 1}:
                yield f"{name}: {twice} is set twice"
            yield from self.service(name, component, container, spec)
        if workload["kind"] != "Job":
            chosen = workload["spec"]["selector"]["matchLabels"]
            if any(labels.get(key) != value for key, value in chosen.items()):
                yield f"{name}: does not select its own pods"
            others = [w for w in self.workloads if w is not workload and selects(chosen, w["spec"]["template"]["metadata"]["labels"])]
            if others:
                yield f"{name}: also selects the pods of {others[0]['metadata']['name']}"

    def service(self, name, component, container, spec):
        """Each service has exactly its keys and addresses."""
        variables = {variable["name"]: variable for variable in container.get("env", [])}
        if component not in SERVICES:
            return
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            path = container.get(probe, {}).get("httpGet", {}).get("path")
            if path != ("/readyz" if probe == "readinessProbe" else "/healthz"):
                yield f"{name}: {probe} asks {path}"
        keys = {
            "gateway": {"MASTER", "SECRETS", "TOKEN"},
            "reconciler": {"TOKEN"},
            "interpreter": {"SECRETS"},
            "providers": {"MASTER", "TOKEN"},
            "scanner": {"MASTER"},
            "slack": {"MASTER"},
        }[component]
        found = {variable.split("_")[1] for variable in variables if variable.endswith("_KEY_FILE")}
        mounted = next(v["secret"]["items"] for v in spec["volumes"] if v["name"] == "keys")
        if found != keys or {item["path"].split(".")[0].upper() for item in mounted} != keys:
            yield f"{name}: has the keys {found}; expected {keys}"
        if ("CONSTRUCT_DATABASE_URL" in variables) != (component in ("gateway", "reconciler", "scanner", "slack")):
            yield f"{name}: has the database's address, or lacks it"
        for variable, given in variables.items():
            if re.search("PASSWORD|_URL$", variable) and "value" in given:
                yield f"{name}: {variable} is written into the pod"
        if component == "slack":
            yield from self.slack(name, container, variables)
        if self.values.get("scanner", {}).get("enabled"):
            yield from self.scans(name, component, container, spec)
        elif any(mount["name"] == "scans" for mount in container["volumeMounts"]):
            yield f"{name}: has files of scans without a scanner"
        settings = {**self.settings(container), **{variable: "" for variable in variables}}
        known = OWNED | schema_settings(component) | (SECRETS if component == "slack" else set())
        for variable in settings:
            key = variable.removeprefix("CONSTRUCT_").lower()
            # The last ones are for the client in the gateway's container.
            if variable.startswith("CONSTRUCT_") and key not in known and variable not in ("CONSTRUCT_GATEWAY_URL", "CONSTRUCT_CA"):
                yield f"{name}: {variable} is not a setting of {component}"
        for variable, value in self.settings(container).items():
            if not isinstance(value, str) or re.search(r"\de\+|map\[|<no value>", value):
                yield f"{name}: {variable} is not text: {value}"
        grace = int(self.settings(container)["CONSTRUCT_SHUTDOWN_GRACE"].removesuffix("s"))
        if spec["terminationGracePeriodSeconds"] < grace + 10:
            yield f"{name}: is killed before its grace period ends"

    def slack(self, name, container, variables):
        """Its secrets come only from the operator's Secret, and the required ones are present."""
        http = self.values["slack"].get("http", {}).get("enabled", True)
        gateway = self.values.get("gateway", {}).get("enabled", True)
        needed = {"slack_signing_secret" if http else "slack_app_token"} | ({"slack_gateway_key"} if gateway else set())
        for key in sorted(SECRETS):
            variable = f"CONSTRUCT_{key.upper()}"
            wanted = {"name": self.values["slack"]["existingSecret"], "key": variable, "optional": key not in needed}
            if variables.get(variable, {}).get("valueFrom") != {"secretKeyRef": wanted}:
                yield f"{name}: {variable} is not {wanted}"
        if http != ("CONSTRUCT_SLACK_LISTEN" in variables) or http != ("http" in [port["name"] for port in container["ports"]]):
            yield f"{name}: listens for Slack's requests although disabled, or does not listen"
        if gateway and self.settings(container).get("CONSTRUCT_SLACK_GATEWAY_URL") not in self.gateways():
            yield f"{name}: does not use this release's gateway"

    def gateways(self):
        """The addresses of this release's gateway."""
        services = {s["metadata"]["name"]: s["spec"]["ports"][0]["port"] for s in self.of_kind("Service") if s["metadata"]["labels"].get(COMPONENT) == "gateway"}
        scheme = "https" if self.values.get("gateway", {}).get("tls", {}).get("secretName") else "http"
        return [f"{scheme}://{service}:{port}" for service, port in services.items()]

    def scans(self, name, component, container, spec):
        """The scanner writes the files of scans, interpreters of cpu-2 read them at the same path, the gateway has the path; no other pod has them."""
        settings = self.settings(container)
        mount = next((mount for mount in container["volumeMounts"] if mount["name"] == "scans"), None)
        explores = "cpu-2" in settings.get("CONSTRUCT_INTERPRETER_POOLS", "").split(",")
        if (mount is not None) != (component == "scanner" or explores):
            yield f"{name}: has or lacks files of scans"
        if mount:
            claim = next(v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if v["name"] == "scans")
            if claim != self.values["scanner"]["existingClaim"] or mount["readOnly"] != explores:
                yield f"{name}: has files of scans in {claim}: {mount}"
            known = settings["CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS"].split(",") if explores else [settings["CONSTRUCT_SCANNER_DIR"]]
            if mount["mountPath"] not in known:
                yield f"{name}: expects files of scans in {known}, but they are in {mount['mountPath']}"
            if mount["mountPath"].startswith("/var/lib/construct"):
                yield f"{name}: files of scans are in the mesh's own data, which tasks cannot see"
        written = {self.settings(c)["CONSTRUCT_SCANNER_DIR"] for w in self.workloads for c in w["spec"]["template"]["spec"]["containers"] if c["name"] == "scanner"}
        if component == "gateway" and {settings.get("CONSTRUCT_GATEWAY_SCANS_DIR")} != written:
            yield f"{name}: names {settings.get('CONSTRUCT_GATEWAY_SCANS_DIR')} to interpreters, and the scanner writes to {written}"
        if component == "scanner" and self.values.get("gateway", {}).get("enabled", True):
            asked = settings.get("CONSTRUCT_SCANNER_GATEWAY_URL")
            if asked not in [*self.gateways(), self.values["scanner"].get("config", {}).get("scanner_gateway_url")]:
                yield f"{name}: does not use this release's gateway"

    def settings(self, container):
        wanted = {source["configMapRef"]["name"] for source in container.get("envFrom", [])}
        return {key: value for d in self.of_kind("ConfigMap") if d["metadata"]["name"] in wanted for key, value in d["data"].items()}

    def references(self):
        """Every referenced object is in the chart or named in the values."""
        made = {(d["kind"], d["metadata"]["name"]) for d in self.documents}
        for workload in self.workloads:
            spec = workload["spec"]["template"]["spec"]
            wanted = [("ServiceAccount", spec["serviceAccountName"])]
            for volume in spec.get("volumes", []):
                if claim := volume.get("persistentVolumeClaim"):
                    wanted.append(("PersistentVolumeClaim", claim["claimName"]))
                if secret := volume.get("secret"):
                    wanted.append(("Secret", secret["secretName"]))
                if config := volume.get("configMap"):
                    wanted.append(("ConfigMap", config["name"]))
            for container in spec["containers"]:
                wanted += [("ConfigMap", source["configMapRef"]["name"]) for source in container.get("envFrom", [])]
                wanted += [("Secret", v["valueFrom"]["secretKeyRef"]["name"]) for v in container.get("env", []) if "valueFrom" in v]
            volumes = {volume["name"] for volume in spec.get("volumes", [])}
            volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
            mounts = {mount["name"] for container in spec["containers"] for mount in container.get("volumeMounts", [])}
            if volumes != mounts:
                yield f"{workload['metadata']['name']}: volumes {volumes} and mounts {mounts} differ"
            for kind, name in wanted:
                if (kind, name) not in made and name not in self.given:
                    yield f"{workload['metadata']['name']}: {kind} {name} is neither in the chart nor in the values"
        pods = [w["spec"]["template"] for w in self.workloads]
        for service in self.of_kind("Service"):
            found = [pod for pod in pods if selects(service["spec"]["selector"], pod["metadata"]["labels"])]
            if not found:
                yield f"Service {service['metadata']['name']} selects nothing"
            for port in service["spec"]["ports"]:
                for pod in found:
                    if port["targetPort"] not in ports_of(pod):
                        yield f"Service {service['metadata']['name']}: no port {port['targetPort']} in {pod['metadata']['labels']}"
        for budget in self.of_kind("PodDisruptionBudget"):
            if not any(selects(budget["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"]) for pod in pods):
                yield f"PodDisruptionBudget {budget['metadata']['name']} selects nothing"
        for scaler in self.of_kind("HorizontalPodAutoscaler") + self.of_kind("ScaledObject"):
            target = next((w for w in self.of_kind("Deployment") if w["metadata"]["name"] == scaler["spec"]["scaleTargetRef"]["name"]), None)
            if target is None or "replicas" in target["spec"]:
                yield f"{scaler['metadata']['name']}: scales nothing, or a deployment with its own replicas"
        for ingress in self.of_kind("Ingress"):
            for rule in ingress["spec"]["rules"]:
                for path in rule["http"]["paths"]:
                    backend = path["backend"]["service"]
                    service = next((s for s in self.of_kind("Service") if s["metadata"]["name"] == backend["name"]), None)
                    if service is None or backend["port"]["name"] not in [port["name"] for port in service["spec"]["ports"]]:
                        yield f"Ingress {ingress['metadata']['name']} has no backend"

    def network(self):
        """The permitted connections of the design, derived from the policies."""
        pods = {w["spec"]["template"]["metadata"]["labels"][COMPONENT]: w["spec"]["template"] for w in self.workloads}
        for component, pod in pods.items():
            covering = [p for p in self.of_kind("NetworkPolicy") if selects(p["spec"]["podSelector"].get("matchLabels", {}), pod["metadata"]["labels"])]
            if not covering or not all(set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"} for p in covering):
                yield f"{component}: no policy covers its pods in both directions"
        for component in set(SERVICES + ["migrate", "nats", "postgresql"]) & set(pods):
            vendor = self.leaves(pods[component], "203.0.113.9", 443)
            if vendor != (component in ("providers", "interpreter", "scanner", "slack")):
                yield f"{component}: reaches the internet: {vendor}"
            for inside in ("10.3.2.1", "169.254.169.254", "192.168.1.1", "172.20.0.1", "127.0.0.1", "fd00::1", "fe80::1", "100.64.0.1"):
                if self.leaves(pods[component], inside, 443) and inside not in str(self.values):
                    yield f"{component}: reaches {inside}, which is not a public address"
            if component in ("nats", "postgresql") and any(p["spec"].get("egress") for p in self.policies(pods[component])):
                yield f"{component}: reaches something"
        reaches = {
            ("gateway", "postgresql"), ("reconciler", "postgresql"), ("migrate", "postgresql"), ("interpreter", "providers"),
            ("scanner", "postgresql"), ("scanner", "gateway"), ("slack", "postgresql"), ("slack", "gateway"),
            *((service, "nats") for service in SERVICES),
        }
        for source in pods:
            for target in set(pods) - {source, "migrate"}:
                for port in ports_of(pods[target]):
                    if port in ("health", "monitoring"):
                        continue
                    allowed = self.connects(pods[source], pods[target], port)
                    if allowed != ((source, target) in reaches):
                        yield f"{source} to {target}:{port} is {'allowed' if allowed else 'refused'}"

    def policies(self, pod):
        return [p for p in self.of_kind("NetworkPolicy") if selects(p["spec"]["podSelector"].get("matchLabels", {}), pod["metadata"]["labels"])]

    def leaves(self, pod, address, port):
        """Whether a rule with addresses lets the pod reach this one. Rules without a target are for the operator's servers."""
        found = ipaddress.ip_address(address)
        for policy in self.policies(pod):
            for rule in policy["spec"].get("egress", []):
                if not any(p["port"] == port for p in rule.get("ports", [])):
                    continue
                for peer in rule.get("to", []):
                    block = peer.get("ipBlock")
                    if block and found in ipaddress.ip_network(block["cidr"]) and not any(
                            found in ipaddress.ip_network(hole) for hole in block.get("except", [])
                            if ipaddress.ip_network(hole).version == found.version):
                        return True
        return False

    def connects(self, source, target, port):
        number = ports_of(target)[port]

        def matches(peer, pod):
            selector = peer.get("podSelector")
            return selector is not None and "namespaceSelector" not in peer and selects_expressions(selector, pod["metadata"]["labels"])

        out = any(
            any(p["port"] in (port, number) for p in rule["ports"]) and any(matches(peer, target) for peer in rule.get("to", []))
            for policy in self.policies(source) for rule in policy["spec"].get("egress", []))
        into = any(
            any(p["port"] in (port, number) for p in rule["ports"]) and any(matches(peer, source) for peer in rule.get("from", []))
            for policy in self.policies(target) for rule in policy["spec"].get("ingress", []))
        return out and into


def compose_problems(root):
    """Rules for docker-compose.yml beyond its schema."""
    compose = yaml.safe_load((root / "docker-compose.yml").read_text())
    for name, service in compose["services"].items():
        if service.get("privileged") or "docker.sock" in str(service.get("volumes")):
            yield f"{name}: is privileged"
        if not service.get("healthcheck") and not service.get("profiles"):
            yield f"{name}: has no health check"
        image = service.get("image", "")
        if not re.search(r":.+", image) or image.endswith(":latest"):
            yield f"{name}: has no version: {image}"
        for port in service.get("ports", []):
            if not str(port).startswith("127.0.0.1:"):
                yield f"{name}: is reachable from other machines: {port}"
        # PostgreSQL's image starts as root and switches the user itself.
        if not (service.get("read_only") and service.get("cap_drop") == ["ALL"]) and name != "postgres":
            yield f"{name}: can write to its image, or has capabilities"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0] if isinstance(volume, str) else volume["source"]
            if source.startswith("./") and not (root / source).exists():
                yield f"{name}: {source} does not exist"
        for other in service.get("depends_on", {}):
            if other not in compose["services"]:
                yield f"{name}: depends on {other}, which does not exist"
    asked = yaml.safe_load((root / "deploy/observability/prometheus.yaml").read_text())["scrape_configs"][0]["dns_sd_configs"][0]
    if set(asked["names"]) != set(SERVICES):
        yield f"Prometheus scrapes {asked['names']}, but the services are {SERVICES}"
    collector = yaml.safe_load((root / "deploy/observability/collector.yaml").read_text())
    for name, pipeline in collector["service"]["pipelines"].items():
        for part in ("receivers", "processors", "exporters"):
            for missing in set(pipeline.get(part, [])) - set(collector[part]):
                yield f"the collector's pipeline {name} uses {missing}, which does not exist"
    sources = yaml.safe_load((root / "deploy/observability/grafana/provisioning/datasources/construct.yaml").read_text())
    if not any(source["type"] == "prometheus" and source.get("isDefault") for source in sources["datasources"]):
        yield "dashboards begin with the Prometheus that is the default, and there is none"


def schema_settings(component):
    schema = json.loads((Path(__file__).parents[1] / "construct" / "values.schema.json").read_text())
    return set(schema["$defs"][f"{component}Config"]["properties"])


def selects(wanted, labels):
    return all(labels.get(key) == value for key, value in wanted.items())


def selects_expressions(selector, labels):
    return selects(selector.get("matchLabels", {}), labels) and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", []))


def ports_of(pod):
    return {port["name"]: port["containerPort"] for c in pod["spec"]["containers"] for port in c.get("ports", [])}


def texts(value):
    if isinstance(value, dict):
        for part in value.values():
            yield from texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)
    elif isinstance(value, str):
        yield value
