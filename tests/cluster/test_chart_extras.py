"""What users add to the chart's pods and objects by values, as a real API server and a real kubelet take it."""

from __future__ import annotations

from typing import Final

import pytest

from tests.support.cluster import DAEMON, DRA, GUARD, NAMESPACE, Cluster, Object, wait_for

pytestmark = pytest.mark.cluster

MOUNTED: Final = {
    "extraVolumes": [{"name": "extra", "configMap": {"name": "nri-gpu-extra"}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/srv/extra", "readOnly": True}],
}
EXTRAS: Final[Object] = {
    "kubelet": {"enabled": False},
    "commonLabels": {"team": "gpu"},
    "imagePullSecrets": ["registry", {"name": "other"}],
    "priorityClassName": "",
    "updateStrategy": {"type": "OnDelete"},
    "extraEnv": [{"name": "WORD", "value": "of the daemon"}],
    "extraArgs": ["--index=11"],
    **MOUNTED,
    "guard": {"extraEnv": [{"name": "WORD", "value": "of the guard"}], **MOUNTED},
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-extra", "namespace": NAMESPACE},
            "data": {"word": "{{ .Values.commonLabels.team }}"},
        },
        f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: by-text, namespace: {NAMESPACE}}}\n",
    ],
}
ASKED: Final = 'echo "$WORD" && cat /srv/extra/word'


@pytest.mark.short
def test_all_of_them_at_once(cluster: Cluster, image: None) -> None:
    # Where the API server is, this driver knows by its `extraEnv` alone; no proxy leads there.
    patch = cluster.reach
    environment = patch["spec"]["template"]["spec"].pop("containers")[0]["env"]
    cluster.install(patch, dra={"enabled": True, "extraEnv": environment, **MOUNTED}, **EXTRAS)

    for name, word in ((DAEMON, "of the daemon"), (GUARD, "of the guard")):
        said = cluster.kubectl("exec", "-n", NAMESPACE, f"daemonset/{name}", "--", "sh", "-c", ASKED)
        assert said.splitlines() == [word, "gpu"]
    wait_for("slices of the node", lambda: bool(cluster.get("resourceslices")), explain=lambda: explained(cluster))

    (of_daemon,) = cluster.get("pods", "", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=daemon")
    assert of_daemon["spec"]["containers"][0]["args"][-1] == "--index=11"
    for each in cluster.get("pods", "", "-n", NAMESPACE):
        assert each["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "other"}]
        assert each["spec"]["priority"] == 0
    labelled = cluster.get("daemonsets", "", "-n", NAMESPACE, "-l", "team=gpu")
    strategies = {each["metadata"]["name"]: each["spec"]["updateStrategy"]["type"] for each in labelled}
    assert strategies == {DAEMON: "OnDelete", GUARD: "RollingUpdate", DRA: "RollingUpdate"}
    assert not cluster.get("pods", "", "-n", NAMESPACE, "-l", "team=gpu")
    assert cluster.get("configmap", "by-text", "-n", NAMESPACE)


def explained(cluster: Cluster) -> str:
    return cluster.kubectl("logs", "-n", NAMESPACE, f"daemonset/{DRA}", "--tail=40", check=False)
