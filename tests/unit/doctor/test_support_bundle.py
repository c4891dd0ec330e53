"""The bundle has what a bug report needs, and none of the secrets that lie around on the node."""

from __future__ import annotations

import io
import json
import tarfile

from nri_gpu.doctor.examine import examine
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.doctor.support_bundle import bundle
from tests.unit.doctor.node import CONFIG, DoctorNode

SECRET = "hunter2"


def unpacked(node: DoctorNode) -> dict[str, str]:
    runtime = container_runtime(node.seen)
    data = bundle(node.seen, runtime, {"doctor.txt": str(len(list(examine(node.seen, runtime).findings)))})
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        assert {each.mode for each in archive.getmembers()} == {0o600}
        files = {each.name: archive.extractfile(each) for each in archive.getmembers()}
        return {name.removeprefix("nri-gpu-doctor/"): file.read().decode() for name, file in files.items() if file}


def test_what_is_in_it(node: DoctorNode) -> None:
    files = unpacked(node)
    assert {"doctor.txt", "versions.json", "policy.json", "status.json", "guard.json", "runtime.json"} <= files.keys()
    assert {"dev.txt", "files.txt", "modules.json", "proc/devices", "proc/driver/nvidia/params"} <= files.keys()
    assert sum("proc/driver/nvidia/gpus/" in name for name in files) == 2
    assert json.loads(files["runtime.json"])["version"] == "2.1.9"
    assert json.loads(files["policy.json"])["namespaces"]["allow"] == ["ml"]
    assert "/dev/nvidia0: char 1510:0, mode 0666, owner 0:0" in files["dev.txt"]
    assert "/run/nri-gpu/key: -rw------- 0:0 0" in files["files.txt"]


def test_no_secret_is(node: DoctorNode) -> None:
    for name in ("key", "ledger.json", "journal", "audit.jsonl", "policy.last"):
        node.write(f"run/nri-gpu/{name}", SECRET).chmod(0o600)
    auth = f'[plugins."io.containerd.grpc.v1.cri".registry.configs.x.auth]\npassword = "{SECRET}"\n'
    node.write("etc/containerd/config.toml", f"# {SECRET}\n{CONFIG}{auth}")
    node.write("proc/700/environ", f"TOKEN={SECRET}\0")
    node.process(700, "containerd", "/usr/bin/containerd", f"--token={SECRET}")
    node.process(900, "kubelet", "/usr/bin/kubelet", f"--token={SECRET}")
    node.write("proc/cmdline", f"root=/dev/sda password={SECRET}")
    node.write("etc/cdi/nvidia.yaml", f"kind: nvidia.com/gpu\nhooks:\n- env: [{SECRET}]\n")
    files = unpacked(node)
    assert not any(SECRET in text for text in files.values())
    assert "/etc/cdi/nvidia.yaml" in files["components.json"]


def test_a_node_without_anything(node: DoctorNode) -> None:
    node.seen = Examined(root=node.root / "var/empty")
    assert "/run/nri-gpu: no such file" in unpacked(node)["files.txt"]
