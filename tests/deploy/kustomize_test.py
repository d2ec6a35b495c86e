"""deploy/kustomize: Kubernetes takes the overlays, ckptd their settings, and they say what the chart says."""

from __future__ import annotations

import copy
import json
import pathlib

import pytest
import rendered
from rendered import daemon_pod, kustomize, of_kind, only
from settings import check_config, environment, on_the_node, run_node_config
from valid import VERSIONS, check

# What the chart calls the same.
SAME_AS = {"single-etcd": "defaults", "external-etcd-tls": "external_etcd"}


@pytest.mark.parametrize("overlay", SAME_AS)
def test_kubernetes_takes_it(overlay: str) -> None:
    objects = kustomize(overlay)
    for one in objects:
        for version in VERSIONS:
            check(one, version)
    spaces = {one["metadata"].get("namespace") for one in objects}
    assert spaces == {"holdfast", None}


@pytest.mark.parametrize("overlay", SAME_AS)
def test_ckptd_takes_its_settings(overlay: str, tmp_path: pathlib.Path, node: pathlib.Path) -> None:
    objects = kustomize(overlay)
    pod = daemon_pod(objects)
    variables = environment(rendered.container(pod, "node-config"))
    variables |= {"TOPOLOGY_SOURCE": "podLabels", "TOPOLOGY_VALUE_0": "a", "TOPOLOGY_VALUE_1": "b"}
    template = only(objects, "ConfigMap")["data"]["ckptd.yaml"]
    assert run_node_config(template, tmp_path, variables).returncode == 0
    text = (tmp_path / "ckptd.yaml").read_text()
    done = check_config(on_the_node(text, pod, node), node)
    assert done.returncode == 0, done.stderr + text


def daemon_set(objects: list[rendered.Object]) -> rendered.Object:
    """Its spec, without what the two name differently by nature: the checksum, the ConfigMap's hash; lists that are sets sorted."""
    spec = copy.deepcopy(only(objects, "DaemonSet")["spec"])
    spec["template"]["metadata"].pop("annotations", None)
    pod = spec["template"]["spec"]
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert volume["configMap"]["name"].startswith("holdfast")
            volume["configMap"]["name"] = "holdfast"
    pod["volumes"].sort(key=lambda one: one["name"])
    for one in rendered.containers(pod):
        one["volumeMounts"].sort(key=lambda mount: mount["mountPath"])
        for key in ("env", "ports"):
            one.get(key, []).sort(key=lambda each: each["name"])
    return spec


@pytest.mark.parametrize(("overlay", "case"), SAME_AS.items())
def test_the_chart_has_the_same_daemon_set(overlay: str, case: str) -> None:
    assert daemon_set(kustomize(overlay)) == daemon_set(rendered.render(case))


@pytest.mark.parametrize(("overlay", "case"), SAME_AS.items())
def test_the_chart_has_the_same_settings(overlay: str, case: str) -> None:
    values = rendered.values_of(case)
    if overlay == "single-etcd":
        values = rendered.merged(values, {"etcd": {"replicas": 1}})
    of_chart = rendered.objects_of(rendered.render_text(values))

    def settings(objects: list[rendered.Object]) -> list[rendered.Object]:
        return rendered.objects_of(only(objects, "ConfigMap")["data"]["ckptd.yaml"])

    assert settings(kustomize(overlay)) == settings(of_chart)


def test_the_chart_has_the_same_etcd() -> None:
    values = rendered.merged(rendered.values_of("defaults"), {"etcd": {"replicas": 1}})
    of_chart = rendered.objects_of(rendered.render_text(values))
    of_overlay = kustomize("single-etcd")
    for kind in ("StatefulSet", "Service"):
        assert only(of_overlay, kind)["spec"] == only(of_chart, kind)["spec"], kind


@pytest.mark.parametrize(("overlay", "case"), SAME_AS.items())
def test_the_chart_lets_the_same_through(overlay: str, case: str) -> None:
    """The overlays have the way to etcd in a policy of its own; policies add up."""

    def rules(objects: list[rendered.Object], direction: str) -> list[str]:
        wanted = only(objects, "DaemonSet")["spec"]["selector"]
        return sorted(
            json.dumps(rule, sort_keys=True)
            for policy in of_kind(objects, "NetworkPolicy")
            if policy["spec"]["podSelector"] == wanted
            for rule in policy["spec"].get(direction, [])
        )

    # The overlays name a namespace of Prometheus', as they always serve metrics; the chart has to be told.
    metrics = {"networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]}}  # fmt: skip
    of_chart = rendered.render_text(rendered.merged(rendered.values_of(case), metrics))
    for direction in ("ingress", "egress"):
        assert rules(kustomize(overlay), direction) == rules(
            rendered.objects_of(of_chart), direction
        )


def test_the_namespace_allows_what_the_daemon_needs() -> None:
    labels = only(kustomize("single-etcd"), "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"
