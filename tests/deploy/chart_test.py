"""deploy/helm/holdfast: each of tests/deploy/values renders to what Kubernetes and ckptd take; wrong values do not."""

from __future__ import annotations

import copy
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import rendered
from rendered import CASES, CHART, ENGINES, Refused, daemon_pod, of_kind, only, render
from settings import check_config, environment, on_the_node, run_node_config
from valid import VERSIONS, check

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = rendered.read_yaml(CHART / "values.yaml")


def with_value(path: str, value: Any, under: dict | None = None) -> dict:
    values = copy.deepcopy(rendered.values_of("defaults") if under is None else under)
    inside = values
    *above, last = path.split(".")
    for name in above:
        inside = inside.setdefault(name, {})
    inside[last] = value
    return values


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_what_it_renders(case: str, engine: str) -> None:
    objects = render(case, engine)
    assert of_kind(objects, "DaemonSet") and of_kind(objects, "ConfigMap")
    names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects]  # fmt: skip
    assert len(names) == len(set(names)), names
    for one in objects:
        for version in VERSIONS:
            check(one, version)


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_what_the_schema_allows(case: str) -> None:
    jsonschema.validate(rendered.merged(DEFAULTS, rendered.values_of(case)), SCHEMA)


def leaves(values: dict, schema: dict, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all values that the schema names; what is Kubernetes' or ckptd's own counts as one."""
    for name, below in schema["properties"].items():
        if "properties" in below and name not in ("settings", "seccompProfile"):
            assert below["additionalProperties"] is False, (*where, name)
            yield from leaves(values[name] or {}, below, (*where, name))
        else:
            yield (*where, name)


def test_the_schema_knows_each_value_and_no_other() -> None:
    known = {path for path in leaves(DEFAULTS, SCHEMA) if path != ("global",)}

    def given(values: dict, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, value in values.items():
            path = (*where, name)
            if path in known or not isinstance(value, dict):
                yield path
            else:
                yield from given(value, path)

    issuer = {("cluster", "tls", "certManager", "issuerRef", name) for name in ("name", "kind", "group")}  # fmt: skip
    assert set(given(DEFAULTS)) == known - issuer


def sections() -> list[str]:
    """Of ckptd.yaml, in the order of the schema that ckptd has of it."""
    proto = (rendered.TREE / "proto/holdfast/v1/config.proto").read_text()
    (body,) = re.findall(r"^message DaemonConfig \{\n(.*?)^\}", proto, re.M | re.S)
    return re.findall(r"^  (?:optional |repeated )?[\w.]+ (\w+) = \d+;", body, re.M)


def test_each_section_of_ckptd_yaml_can_be_set_or_is_the_charts() -> None:
    settable = SCHEMA["properties"]["settings"]["properties"]
    for section in sections():
        if section not in settable:
            by_chart = rendered.objects_of(rendered.render_text(rendered.values_of("everything")))
            (written,) = rendered.objects_of(only(by_chart, "ConfigMap")["data"]["ckptd.yaml"])
            assert section in written, f"settings.{section}: nobody can set it"
    assert set(settable) <= set(sections())


def test_each_value_does_something() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for path in leaves(DEFAULTS, SCHEMA):
        assert path == ("global",) or re.search(rf"\.{path[-1]}\b", templates), path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("image.repositry", "x"),
        ("image.repository", "UPPER/case"),
        ("image.digest", "sha256:12"),
        ("socket.hostPath", "run/holdfast"),
        ("socket.hostPath", "/run/holdfast/"),
        ("socket.hostPath", "/" + "x" * 100),
        ("socket.hostPath", "/run/hold fast"),
        ("socket.mode", 438),
        ("socket.mode", "666"),
        ("memory.hostPath", ""),
        ("nvme.hostPaths", ["/mnt/a", "/mnt/a"]),
        ("cluster.membership", "zookeeper"),
        ("cluster.port", 0),
        ("cluster.port", "9465"),
        ("cluster.advertise", "podIP"),
        ("cluster.etcdLeaseTtl", "10 seconds"),
        ("cluster.externalEtcd.endpoints", ["etcd-1"]),
        ("cluster.externalEtcd.prefix", "/holdfast"),
        ("cluster.externalEtcd.password", "in the clear"),
        ("cluster.members", [{"name": "gpu-17"}]),
        ("cluster.tls.certManager.issuerRef.kind", "Authority"),
        ("topology.labels", [{"name": "zone"}]),
        ("topology.labels", [{"name": "zone", "label": "a'b"}]),
        ("fabric.provider", "udp"),
        ("fabric.rdma.count", 0),
        ("security.user", -1),
        ("security.user", "root"),
        ("terminationGracePeriodSeconds", 5),
        ("updateStrategy.maxUnavailable", 0),
        ("etcd.replicas", 2),
        ("etcd.storage.size", "lots"),
        ("clients.namespaces", ["Team A"]),
        ("networkPolicy.nodeCidrs", ["everywhere"]),
        # What the chart itself says in ckptd.yaml.
        ("settings.node_name", "x"),
        ("settings.cluster", {}),
        ("settings.memory.dir", "/dev/shm/other"),
        ("settings.socket.mode", "0600"),
        ("settings.nvme.dirs", ["/mnt"]),
        ("settings.remote.dir", "/mnt"),
        ("settings.health", {"address": "0.0.0.0:1"}),
        ("settings.log.file", "/var/log/ckptd"),
    ],
)
def test_wrong_values_are_refused(path: str, value: Any) -> None:
    values = rendered.merged(DEFAULTS, with_value(path, value))
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(values, SCHEMA)
    where = ".".join(str(one) for one in refused.value.absolute_path)
    about_it = path.startswith(where) or where.startswith(path)
    assert where and about_it, f"refused for another reason: {refused.value}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("said", "values"),
    [
        ("image.repository", {"image": {"repository": ""}}),
        ("cluster.externalEtcd.endpoints", {"cluster": {"membership": "externalEtcd"}}),
        (
            "cluster.externalEtcd.endpoints",
            {"cluster": {"externalEtcd": {"endpoints": ["etcd-1:2379"]}}},
        ),
        ("cluster.members", {"cluster": {"membership": "members"}, "hostNetwork": True}),
        (
            "hostNetwork",
            {"cluster": {"membership": "members", "members": [{"name": "a", "address": "a:1"}]}},
        ),
        ("cluster.advertise", {"cluster": {"advertise": "nodeName"}}),
        ("fabric.rdma.resource", {"fabric": {"provider": "verbs"}}),
        ("security.user", {"fabric": {"rdma": {"resource": "rdma/hca"}}, "security": {"user": 7}}),
        ("extraCapabilities", {"security": {"user": 7, "extraCapabilities": ["SYS_NICE"]}}),
        ("remote", {"remote": {"claimName": "a", "hostPath": "/b"}}),
        ("networkPolicy.nodeCidrs", {"hostNetwork": True}),
        ("podMonitor", {"podMonitor": {"enabled": True}, "metrics": {"enabled": False}}),
        ("networkPolicy.metricsFrom", {"podMonitor": {"enabled": True}}),
        ("admin.tls.users", {"admin": {"tls": {"enabled": True, "secretName": "a"}}}),
        (
            "networkPolicy.adminFrom",
            {"admin": {"tls": {"enabled": True, "users": [{"certificate": "a", "uid": 1}]}}},
        ),
        (
            "admin.tls.secretName",
            {
                "admin": {"tls": {"enabled": True, "users": [{"certificate": "a", "uid": 1}]}},
                "networkPolicy": {"enabled": False},
            },
        ),
        ("cluster.tls", {"cluster": {"plaintext": False}}),
        ("cluster.tls.secretName", {"cluster": {"tls": {"enabled": True}}}),
        ("cluster.tls", {"cluster": {"membership": "none", "tls": {"enabled": True}}}),
        ("certManager", {"cluster": {"tls": {"certManager": {"enabled": True}}}}),
        (
            "issuerRef.name",
            {"cluster": {"tls": {"enabled": True, "certManager": {"enabled": True}}}},
        ),
        (
            "dnsNames",
            {
                "cluster": {
                    "advertise": "ip",
                    "tls": {
                        "enabled": True,
                        "certManager": {"enabled": True, "issuerRef": {"name": "ca"}},
                    },
                }
            },
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    said: str, values: dict, engine: str
) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        rendered.render_text(rendered.merged(rendered.values_of("defaults"), values), engine)


# --- ckptd.yaml ---


def node_settings(values: dict, folder: pathlib.Path) -> tuple[str, dict]:
    """What the init container writes, with these values of the chart; and its pod."""
    objects = rendered.objects_of(rendered.render_text(values))
    pod = daemon_pod(objects)
    init = rendered.container(pod, "node-config")
    variables = environment(init)
    if variables.get("TOPOLOGY_SOURCE") == "api":  # tests/deploy/node_config_test.py has an API
        variables["TOPOLOGY_SOURCE"] = "podLabels"
        variables |= {f"TOPOLOGY_VALUE_{i}": f"value-{i}" for i in range(3)}
    template = only(objects, "ConfigMap")["data"]["ckptd.yaml"]
    variables["NODE_NAME"] = "gpu-17"  # which values/members.yaml has
    done = run_node_config(template, folder, variables)
    assert done.returncode == 0, done
    return (folder / "ckptd.yaml").read_text(), pod


@pytest.mark.parametrize("case", CASES)
def test_ckptd_takes_the_settings(case: str, tmp_path: pathlib.Path, node: pathlib.Path) -> None:
    text, pod = node_settings(rendered.values_of(case), tmp_path)
    done = check_config(on_the_node(text, pod, node), node)
    assert done.returncode == 0, done.stderr + text
    sockets = rendered.mount(rendered.container(pod, "ckptd"), "sockets")["mountPath"]
    assert f"socket {node}{sockets}/ckptd.sock" in done.stdout


def test_ckptd_does_not_take_what_the_schema_cannot_know(
    tmp_path: pathlib.Path, node: pathlib.Path
) -> None:
    text, pod = node_settings(with_value("settings.memory.slots_per_rnk", 3), tmp_path)
    done = check_config(on_the_node(text, pod, node), node)
    assert done.returncode == 2 and "memory.slots_per_rnk" in done.stderr, done


def test_what_settings_say_reaches_ckptd_yaml_as_it_is(tmp_path: pathlib.Path) -> None:
    text, _ = node_settings(rendered.values_of("everything"), tmp_path)
    (written,) = rendered.objects_of(text)
    for section, values in rendered.values_of("everything")["settings"].items():
        for name, value in values.items():
            assert written[section][name] == value, (section, name)
    assert written["socket"]["mode"] == "0660"
    assert written["nvme"]["dirs"] == ["/mnt/nvme0/holdfast", "/mnt/nvme1/holdfast"]
    # A number that Go would write as 1e+06 is no number to ckptd.
    assert "slots_max: 1000000\n" in text and "job_writes_max: 1000000\n" in text


def test_other_settings_are_another_checksum_and_only_they() -> None:
    def checksum(values: dict) -> str:
        one = only(rendered.objects_of(rendered.render_text(values)), "DaemonSet")
        return one["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]

    same = checksum(rendered.values_of("defaults"))
    assert checksum(with_value("resources.requests.cpu", "2")) == same
    assert checksum(with_value("settings.policy.replicas", 1)) != same
    assert checksum(with_value("memory.hostPath", "/dev/shm/other")) != same


def test_ckptctl_in_the_pod_finds_its_daemon_wherever_its_socket_is() -> None:
    for case in CASES:
        objects = render(case)
        env = rendered.literal_env(rendered.container(daemon_pod(objects), "ckptd"))
        (written,) = rendered.objects_of(only(objects, "ConfigMap")["data"]["ckptd.yaml"])
        assert env["HOLDFAST_ADMIN_SOCKET"] == written["admin"]["path"], case


def test_the_notes_name_what_there_is() -> None:
    notes = rendered.render_text(rendered.values_of("defaults"), notes=True)
    assert "DaemonSet holdfast in holdfast" in notes and "in the clear" in notes
    assert "lost with the node's" in notes
    notes = rendered.render_text(rendered.values_of("everything"), notes=True)
    assert "claim holdfast in team-a, team-b" in notes and "in the clear" not in notes
    assert "lost with the node's" not in notes
    assert "HOLDFAST_SOCKET=/run/holdfast-prod/ckptd.sock" in notes


def test_the_values_in_the_docs_are_what_the_chart_takes() -> None:
    page = (rendered.TREE / "docs/kubernetes.md").read_text()
    blocks = re.findall(r"^( *)```yaml\n(.*?)^ *```$", page, re.M | re.S)
    found = []
    for indent, block in blocks:
        text = re.sub(rf"^{indent}", "", block, flags=re.M)
        for values in rendered.objects_of(text):
            if "apiVersion" in values:  # a patch of the overlays
                continue
            found += list(values)
            values = rendered.merged(rendered.values_of("defaults"), values)
            jsonschema.validate(rendered.merged(DEFAULTS, values), SCHEMA)
            for one in rendered.objects_of(rendered.render_text(values)):
                check(one, VERSIONS[-1])
    assert {"settings", "clients", "fabric", "cluster"} <= set(found)
