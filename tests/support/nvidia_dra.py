"""NVIDIA's DRA driver of GPUs, the real program, beside ours on a real Kubernetes: only its GPUs are made up."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nri_gpu.inventory.topology_file import load_topology
from tests import ground
from tests.support.cluster import NVIDIA, Cluster, Object, wait_for
from tests.support.cluster_claims import devices, of_node
from tests.support.driver_root import make_driver_root
from tests.support.nvml import FakeFacts, build_fake_nvml, gpus_of

DRIVER: Final = "gpu.nvidia.com"
SET: Final = "dra-driver"
_DAEMON: Final = "nvidia-dra"
_AMPERE: Final = FakeFacts(architecture=7)  # the driver ends where NVML does not tell
_CONTROL: Final = 255  # minor of /dev/nvidiactl


def asked() -> Object:
    """The `devices` of a claim for one GPU of that driver's."""
    found = devices()
    found["requests"][0]["exactly"]["deviceClassName"] = DRIVER
    return found


class NvidiaDra:
    """That driver on the cluster's node, with the GPUs of a topology file. Raises: NotBuiltError."""

    def __init__(self, cluster: Cluster, topology: Path) -> None:
        program, hook = ground.need(SET) / "gpu-kubelet-plugin", ground.need("nvidia") / "nvidia-cdi-hook"
        self._cluster = cluster
        root = make_driver_root(Path(tempfile.mkdtemp(prefix="nvidia-", dir=cluster.folder)), layout="rhel")
        gpus, _ = gpus_of(load_topology(topology))
        build_fake_nvml(root, [replace(gpu, facts=_AMPERE) for gpu in gpus], lib_dir="usr/lib64")
        (root / "dev").mkdir()
        minors = {f"nvidia{gpu.minor}": gpu.minor or 0 for gpu in gpus} | {"nvidiactl": _CONTROL}
        for name, minor in minors.items():
            os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(NVIDIA, minor))
        options = {
            "kubeconfig": cluster.admin,
            "node-name": cluster.node,
            "image-name": "none",
            "cdi-root": cluster.cdi,
            "nvidia-driver-root": root,
            "container-driver-root": root,
            "nvidia-cdi-hook-path": hook,
        }
        self._command = (str(program), *(f"--{name}={value}" for name, value in options.items()))

    def run(self) -> None:
        """Until its slices are there. Its DeviceClass is as its chart has it, but for the extended resource."""
        cel = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
        self._cluster.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "metadata": {"name": DRIVER},
                "spec": {"selectors": [{"cel": {"expression": cel}}]},
            }
        )
        self._cluster.verb("spawn", _DAEMON, *self._command)
        wait_for("NVIDIA's slices", lambda: bool(self.offered()), explain=lambda: self._cluster.log(_DAEMON)[-3000:])

    def offered(self) -> set[str]:
        """The names of its devices."""
        theirs = (DRIVER, self._cluster.node)
        slices = [each for each in self._cluster.get("resourceslices") if of_node(each) == theirs]
        return {device["name"] for each in slices for device in each["spec"].get("devices", [])}

    def leave(self) -> None:
        """Stop it on this node, whose GPUs it offers no more. Its pods there must be gone."""
        self._cluster.stop(_DAEMON)
        self._cluster.forget(_DAEMON)
        selector = f"--field-selector=spec.driver={DRIVER},spec.nodeName={self._cluster.node}"
        self._cluster.kubectl("delete", "resourceslices", selector)

    def stop(self) -> None:
        """The same, and no node has it any more."""
        self.leave()
        self._cluster.kubectl("delete", "deviceclass", DRIVER, "--ignore-not-found")
