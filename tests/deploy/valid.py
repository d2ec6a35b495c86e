"""Whether Kubernetes would take an object, as its own schemas say: of an old and of the newest version, unknown fields refused."""

from __future__ import annotations

import json

import jsonschema
import kubernetes_validate
from rendered import HERE, Object

# The chart's kubeVersion, and the newest that the package knows.
VERSIONS = ["1.27", kubernetes_validate.latest_version()]
# Kinds that Kubernetes does not know by itself.
_OF_OTHERS = {
    "PodMonitor": "podmonitor",
    "PrometheusRule": "prometheusrule",
    "Certificate": "certificate",
}


def check(one: Object, version: str) -> None:
    if one["kind"] in _OF_OTHERS:
        schema = json.loads((HERE / "schemas" / f"{_OF_OTHERS[one['kind']]}.json").read_text())
        jsonschema.validate(one, schema)
    else:
        kubernetes_validate.validate(one, version, strict=True)
    _check_references(one)


def _check_references(one: Object) -> None:
    """What the schemas cannot say: each mount has its volume, ports and volumes have names of their own, selectors select."""
    template = one["spec"].get("template") if isinstance(one.get("spec"), dict) else None
    if template is None:
        return
    pod = template["spec"]
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    volumes += [claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])]
    assert len(volumes) == len(set(volumes)), volumes
    used = set()
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        mounts = container.get("volumeMounts", [])
        used |= {mount["name"] for mount in mounts}
        paths = [mount["mountPath"] for mount in mounts]
        assert len(paths) == len(set(paths)), paths
        ports = [port["containerPort"] for port in container.get("ports", [])]
        assert len(ports) == len(set(ports)), ports
    assert used == set(volumes), f"mounted and there differ: {used ^ set(volumes)}"
    wanted = one["spec"].get("selector", {}).get("matchLabels", {})
    labels = template.get("metadata", {}).get("labels", {})
    assert wanted.items() <= labels.items(), (wanted, labels)
