"""What the chart and the overlays may do on a node and in the cluster: no more than they need."""

from __future__ import annotations

from typing import Any

import pytest
import rendered
from rendered import CASES, container, containers, daemon_pod, of_kind, only, pods, render

OVERLAYS = ["single-etcd", "external-etcd-tls"]
ALL = [("chart", case) for case in CASES] + [("overlay", name) for name in OVERLAYS]
# Files of several users are given to them, read, and removed: tests/deploy/pod_test.py shows that each is needed.
OF_ROOT = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]


def objects_of(source: tuple[str, str]) -> list[rendered.Object]:
    kind, name = source
    return render(name) if kind == "chart" else rendered.kustomize(name)


@pytest.mark.parametrize("source", ALL, ids="-".join)
def test_no_container_has_more_than_it_needs(source: tuple[str, str]) -> None:
    for whose, pod in pods(objects_of(source)):
        for one in containers(pod):
            context = one["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, (whose, one["name"])
            assert context["readOnlyRootFilesystem"] is True, (whose, one["name"])
            assert context["capabilities"]["drop"] == ["ALL"], (whose, one["name"])
            assert "privileged" not in context, (whose, one["name"])
            assert "add" not in context["capabilities"] or one["name"] in ("ckptd", "owner")
        assert pod["securityContext"]["seccompProfile"]["type"] != "Unconfined", whose
        assert not pod.get("hostIPC"), whose


@pytest.mark.parametrize("source", ALL, ids="-".join)
def test_only_the_daemon_sees_the_nodes_processes(source: tuple[str, str]) -> None:
    for whose, pod in pods(objects_of(source)):
        assert pod.get("hostPID", False) is whose.startswith("DaemonSet"), whose


def test_capabilities_of_the_daemon() -> None:
    def of(case: str) -> list[str]:
        one = container(daemon_pod(render(case)), "ckptd")
        return one["securityContext"]["capabilities"].get("add", [])

    assert of("defaults") == OF_ROOT
    assert of("everything") == [*OF_ROOT, "IPC_LOCK", "SYS_NICE"]
    assert of("not_root") == []


def test_a_daemon_that_is_not_root_says_so() -> None:
    pod = daemon_pod(render("not_root"))
    context = container(pod, "ckptd")["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (10001, True)
    owner = container(pod, "owner")
    assert owner["securityContext"]["capabilities"]["add"] == ["CHOWN"]
    given = {mount["mountPath"] for mount in owner["volumeMounts"]}
    assert given == {"/run/holdfast", "/dev/shm/holdfast", "/var/lib/holdfast", "/mnt/nvme0/holdfast"}  # fmt: skip
    assert given == set(owner["command"][2:]) and owner["command"][1] == "10001:10001"
    # It could not read files of root's.
    assert [volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume] == [0o444]  # fmt: skip


@pytest.mark.parametrize("source", ALL, ids="-".join)
def test_a_token_only_for_who_asks_the_api(source: tuple[str, str]) -> None:
    objects = objects_of(source)
    asks = False
    for whose, pod in pods(objects):
        assert pod["automountServiceAccountToken"] is False, whose
        tokens = {
            volume["name"]
            for volume in pod.get("volumes", [])
            for one in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in one
        }
        for one in containers(pod):
            has = {mount["name"] for mount in one["volumeMounts"]} & tokens
            env = rendered.literal_env(one)
            wants = one["name"] == "node-config" and env.get("TOPOLOGY_SOURCE") == "api"
            assert bool(has) is wants, (whose, one["name"])
            asks |= wants
    assert all(one["automountServiceAccountToken"] is False for one in of_kind(objects, "ServiceAccount"))  # fmt: skip
    roles = of_kind(objects, "ClusterRole") + of_kind(objects, "Role")
    expected = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert [role["rules"] for role in roles] == ([expected] if asks else [])
    bindings = of_kind(objects, "ClusterRoleBinding") + of_kind(objects, "RoleBinding")
    assert len(bindings) == len(roles)
    for binding in bindings:
        (subject,) = binding["subjects"]
        account = only(objects, "ServiceAccount")["metadata"]
        assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
        assert binding["roleRef"]["name"] == roles[0]["metadata"]["name"]


@pytest.mark.parametrize("source", ALL, ids="-".join)
def test_nothing_secret_is_in_the_open(source: tuple[str, str]) -> None:
    objects = objects_of(source)
    assert not of_kind(objects, "Secret")

    def look(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, below in value.items():
                look(below, name)
        elif isinstance(value, list):
            for below in value:
                look(below, key)
        elif any(word in key.lower() for word in ("password", "token", "secret", "key_file")):
            assert key.endswith("_file") and str(value).startswith("/"), (key, value)

    for one in of_kind(objects, "ConfigMap"):
        for text in one["data"].values():
            assert "PRIVATE KEY" not in text
            for settings in rendered.objects_of(text):
                look(settings, "")
    for whose, pod in pods(objects):
        for one in containers(pod):
            for variable in one.get("env", []):
                assert "secretKeyRef" not in variable.get("valueFrom", {}), (whose, variable)
            for mount in one["volumeMounts"]:
                if "certificates" in mount["mountPath"]:
                    assert mount["readOnly"] is True and one["name"] == "ckptd", mount
        for volume in pod.get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] in (0o400, 0o444), volume


def ports_of(rules: list[rendered.Object]) -> set[tuple[str, int, int]]:
    return {
        (port["protocol"], port["port"], port.get("endPort", port["port"]))
        for rule in rules
        for port in rule["ports"]
    }


def test_the_network_is_closed_to_all_but_the_daemons() -> None:
    for objects in (render("defaults"), rendered.kustomize("single-etcd")):
        labels = only(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
        policy = only(objects, "NetworkPolicy", "holdfast")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        inward, *metrics = policy["ingress"]
        assert inward["from"] == [{"podSelector": policy["podSelector"]}]
        # The overlays let Prometheus in, too.
        assert all(one["from"][0].keys() == {"namespaceSelector"} for one in metrics)
        assert ports_of(metrics) <= {("TCP", 9464, 9464)}
        env = rendered.literal_env(container(daemon_pod(objects), "ckptd"))
        fabric = int(env["FI_TCP_PORT_LOW_RANGE"]), int(env["FI_TCP_PORT_HIGH_RANGE"])
        assert ports_of([inward]) == {("TCP", 9465, 9465), ("TCP", *fabric)}
        for rule in policy["egress"]:
            anywhere = "to" not in rule
            assert not anywhere or ports_of([rule]) <= {
                ("TCP", 53, 53),
                ("UDP", 53, 53),
                ("TCP", 443, 443),
                ("TCP", 6443, 6443),
            }
        etcd = only(objects, "NetworkPolicy", "holdfast-etcd")["spec"]
        by_daemons, among_themselves = etcd["ingress"]
        assert by_daemons["from"] == [{"podSelector": policy["podSelector"]}]
        assert ports_of([by_daemons]) == {("TCP", 2379, 2379)}
        assert among_themselves["from"] == [{"podSelector": etcd["podSelector"]}]


def test_the_network_policy_follows_the_values() -> None:
    policy = only(render("everything"), "NetworkPolicy")["spec"]
    peers, metrics, admin = policy["ingress"]
    # verbs goes past the pod's network: no port of libfabric's.
    assert ports_of([peers]) == {("TCP", 19465, 19465)}
    assert ports_of([metrics]) == {("TCP", 19464, 19464)}
    assert metrics["from"][0]["namespaceSelector"]
    assert ports_of([admin]) == {("TCP", 19468, 19468)}
    assert admin["from"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    outward = ports_of(policy["egress"])
    assert {("TCP", 2379, 2379), ("TCP", 12379, 12379), ("TCP", 8443, 8443)} <= outward
    # auto may end up with tcp.
    values = rendered.merged(rendered.values_of("everything"), {"fabric": {"provider": "auto"}})
    objects = rendered.objects_of(rendered.render_text(values))
    peers = only(objects, "NetworkPolicy")["spec"]["ingress"][0]
    assert ports_of([peers]) == {("TCP", 19465, 19465), ("TCP", 9470, 9597)}
    env = rendered.literal_env(container(daemon_pod(objects), "ckptd"))
    assert env["FI_TCP_PORT_LOW_RANGE"] == "9470" and env["FI_TCP_PORT_HIGH_RANGE"] == "9597"
    assert of_kind(render("minimal"), "NetworkPolicy") == []
    # In the node's network no policy holds for the daemons; the etcd is closed to all but the nodes.
    only_one = only(render("cert_manager"), "NetworkPolicy")
    assert only_one["metadata"]["name"] == "holdfast-etcd"
    assert only_one["spec"]["ingress"][0]["from"] == [{"ipBlock": {"cidr": "10.0.0.0/16"}}]


def test_certificates_of_people_are_apart_from_those_of_daemons() -> None:
    pod = daemon_pod(render("everything"))
    for name, path, secret in [
        ("admin-certificates", "/etc/holdfast-certificates/admin", "admin-tls"),
        ("cluster-certificates", "/etc/holdfast-certificates/cluster", "holdfast-tls"),
    ]:
        mount = rendered.mount(container(pod, "ckptd"), name)
        assert (mount["mountPath"], mount["readOnly"]) == (path, True)
        (volume,) = (each for each in pod["volumes"] if each["name"] == name)
        assert volume["secret"]["secretName"] == secret


def test_probes_ask_the_port_that_settings_open() -> None:
    for case in CASES:
        objects = render(case)
        one = container(daemon_pod(objects), "ckptd")
        (settings,) = rendered.objects_of(only(objects, "ConfigMap")["data"]["ckptd.yaml"])
        port = int(settings["health"]["address"].rsplit(":", 1)[1])
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert one[probe]["grpc"]["port"] == port, (case, probe)
        assert one["readinessProbe"]["grpc"]["service"] == "ready"
        assert "service" not in one["livenessProbe"]["grpc"]
        open_ports = {each["containerPort"] for each in one["ports"]}
        assert port in open_ports
        metrics = settings["metrics"]["address"]
        assert metrics == "off" or int(metrics.rsplit(":", 1)[1]) in open_ports


def test_an_update_takes_one_node_after_the_other() -> None:
    for objects in (render("defaults"), rendered.kustomize("single-etcd")):
        strategy = only(objects, "DaemonSet")["spec"]["updateStrategy"]
        assert strategy["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
        pod = daemon_pod(objects)
        assert pod["priorityClassName"] == "system-node-critical"
        # The slots are the node's, not the pod's.
        memory = [volume for volume in pod["volumes"] if volume["name"] == "memory"]
        assert memory[0]["hostPath"]["path"] == "/dev/shm/holdfast"
        assert "limits" not in container(pod, "ckptd")["resources"], "the slots are charged to it"


def test_clients_namespaces_get_the_sockets_and_nothing_else() -> None:
    objects = render("everything")
    for namespace in ("team-a", "team-b"):
        (claim,) = [one for one in of_kind(objects, "PersistentVolumeClaim") if one["metadata"]["namespace"] == namespace]  # fmt: skip
        volume = only(objects, "PersistentVolume", claim["spec"]["volumeName"])["spec"]
        assert volume["hostPath"] == {"path": "/run/holdfast-prod", "type": "Directory"}
        assert volume["accessModes"] == claim["spec"]["accessModes"] == ["ReadOnlyMany"]
        assert volume["claimRef"] == {"namespace": namespace, "name": claim["metadata"]["name"]}
        assert volume["storageClassName"] == claim["spec"]["storageClassName"] == ""
    assert len(of_kind(objects, "PersistentVolume")) == 2
