"""ckptd.yaml as a node gets it: the ConfigMap's, with what the pod's init container puts in."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping

import rendered

NODE_CONFIG = rendered.TREE / "deploy/container/node-config"
# What the kubelet would say: of a pod named in its environment by fieldRef.
FIELDS = {
    "spec.nodeName": "gpu-17.example.com",
    "status.podIP": "10.0.3.17",
    "metadata.namespace": "holdfast",
    "metadata.name": "holdfast-etcd-0",
    "metadata.labels['topology.kubernetes.io/zone']": "eu-1a",
    "metadata.labels['kubernetes.io/hostname']": "gpu-17",
}


def environment(container: rendered.Object) -> dict[str, str]:
    """What the container is started with."""
    variables = rendered.literal_env(container)
    for one in container.get("env", []):
        if "valueFrom" in one:
            variables[one["name"]] = FIELDS[one["valueFrom"]["fieldRef"]["fieldPath"]]
    return variables


def run_node_config(
    template: str, folder: pathlib.Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Writes folder/ckptd.yaml, if it can."""
    (folder / "template.yaml").write_text(template)
    return subprocess.run(
        [NODE_CONFIG, folder / "template.yaml", folder / "ckptd.yaml"],
        env={"PATH": os.environ["PATH"], "PAUSE_S": "0", **variables},
        capture_output=True,
        text=True,
        timeout=rendered.DEADLINE_S,
    )


def _certificate(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-subj", "/CN=x", "-keyout", folder / "tls.key", "-out", folder / "tls.crt"],
        check=True,
        capture_output=True,
    )
    shutil.copy(folder / "tls.crt", folder / "ca.crt")
    (folder / "password").write_text("secret\n")


def on_the_node(text: str, pod: rendered.Object, node: pathlib.Path) -> str:
    """ckptd.yaml with the pod's mounts below `node`, and made there; what lies on a tmpfs stays on one."""
    for mount in rendered.container(pod, "ckptd")["volumeMounts"]:
        path = mount["mountPath"]
        if mount["name"] == "memory":
            place = "/dev/shm/holdfast-check"
        else:
            place = f"{node}{path}"
            pathlib.Path(place).mkdir(parents=True, exist_ok=True)
        if "certificates" in path:
            _certificate(pathlib.Path(place))
        text = re.sub(rf"(?<![\w/]){re.escape(path)}(?=[/\s,\]}}\"']|$)", place, text)
    return text


def check_config(text: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    (folder / "ckptd.yaml").write_text(text)
    return subprocess.run(
        [
            pathlib.Path(os.environ["HOLDFAST_TEST_BIN"]) / "ckptd",
            "--check-config",
            f"--config={folder}/ckptd.yaml",
        ],
        capture_output=True,
        text=True,
        timeout=rendered.DEADLINE_S,
    )
