"""The report on a node: its containers by their bundles, signed grants and processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.ledger.grant_text import sign_grant
from nri_gpu.system.storage import KEY_BYTES
from nri_gpu.verify.container_report import ContainerReport, Expected, Report, Verdict, verify
from nri_gpu.verify.in_kernel import Kernel
from nri_gpu.verify.oci_bundles import Bundle
from nri_gpu.verify.oci_spec import Spec, SpecDevice, SpecLinux, SpecProcess, SpecResources, SpecRule, Variables
from tests.support import builders as make

KEY = bytes(KEY_BYTES)
NODES = ((195, 7), (195, 255))  # GPU 0 has minor 7


class Host:
    """Containers whose cgroup v1 list is as their spec's nodes; PIDs from 100 on."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.bundles: list[Bundle] = []
        (base / "self").mkdir()
        mounts = f"30 1 0:26 / {base}/devices rw - cgroup cgroup rw,devices\n"
        (base / "self" / "mountinfo").write_text(mounts)

    def add(self, id_: str, *gpus: int, mode: Mode = Mode.EXCLUSIVE, **fields: Any) -> None:  # noqa: ANN401
        """A container with a signed grant of these; its pod has its name unless another is given."""
        of = make.container(of=fields.pop("pod", id_), id=id_)
        annotations = {f"io.kubernetes.cri.{key}": value for key, value in fields.pop("cri", {}).items()}
        annotations |= {"io.kubernetes.cri.sandbox-uid": of.pod.uid, "io.kubernetes.cri.sandbox-name": id_}
        if gpus:
            annotations[GRANT_KEY] = sign_grant(make.grant(*gpus, mode=mode, to=of), KEY)
        nodes = NODES if gpus else ()
        spec = Spec(
            annotations=annotations,
            process=SpecProcess(Variables(NVIDIA_VISIBLE_DEVICES=",".join(map(make.uuid, gpus)))),
            linux=SpecLinux(tuple(SpecDevice("/dev/x", "c", *each) for each in nodes), fields.pop("resources", None)),
        )
        pid = fields.setdefault("pid", 100 + len(self.bundles))
        self._run(pid, id_, nodes)
        self.bundles.append(Bundle(**{"id": id_, "namespace": "k8s.io", "spec": spec, **fields}))

    def _run(self, pid: int, id_: str, opened: Sequence[tuple[int, int]]) -> None:
        (self.base / str(pid)).mkdir()
        (self.base / str(pid) / "mountinfo").write_text("30 1 0:26 / / rw - tmpfs  rw\n")
        (self.base / str(pid) / "cgroup").write_text(f"5:devices:/{id_}\n")
        (self.base / "devices" / id_).mkdir(parents=True)
        self.list_devices(id_, "".join(f"c {major}:{minor} rw\n" for major, minor in opened))

    def list_devices(self, id_: str, text: str) -> None:
        (self.base / "devices" / id_ / "devices.list").write_text(text or "c 1:3 rwm\n")

    def verify(self, *holders: Mapping[str, str] | None, kernel: Kernel | None = None) -> Report:
        """holders: the daemon's answers, one after the other."""
        said = iter(holders or ({},))
        evidence = Expected(
            kernel=kernel or Kernel(self.base),
            key=KEY,
            inventory=make.inventory(simulated=True),
            stage_dir=Path("/stage"),
            numbers_from="daemon",
            holders=lambda: next(said),
        )
        return verify(lambda: self.bundles, evidence)

    def only(self) -> ContainerReport:
        [found] = self.verify().containers
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_each_container_has_a_verdict(host: Host) -> None:
    host.add("train", 0)
    host.add("web")
    host.add("agent", resources=SpecResources((SpecRule(allow=True, access="rwm"),)))
    host.list_devices("agent", "a *:* rwm\n")
    host.add("evil")
    host.list_devices("evil", "c 195:* rw\n")
    found = {each.id: each for each in host.verify().containers}
    assert {id_: each.verdict for id_, each in found.items()} == {
        "agent": Verdict.PRIVILEGED,
        "evil": Verdict.DIFFERS,
        "train": Verdict.OK,
        "web": Verdict.NO_GPU,
    }
    train = found["train"]
    assert (train.granted, train.mode, train.gpu_uuids) == (True, "exclusive", (make.uuid(0),))
    assert [(each.path, each.major, each.minor) for each in train.opens] == [
        ("/dev/nvidia7", 195, 7),
        ("/dev/nvidiactl", 195, 255),
    ]
    assert len(found["evil"].differences) == 1
    assert len(found["agent"].opens) > make.GPUS


def test_a_grant_of_another_container_is_not_valid(host: Host) -> None:
    host.add("train", 0, id="copy")
    (host.base / "100" / "cgroup").write_text("5:devices:/train/copy\n")
    (host.base / "devices" / "train" / "copy").mkdir()
    host.list_devices("train/copy", "c 195:7 rw\n")
    said = host.only()
    assert said.differences[0].startswith("its signed grant is not valid: its mac does not match")
    assert "can open /dev/nvidia7" in said.differences[1]
    assert not said.granted


def test_a_sandbox_is_there_if_something_is_wrong(host: Host) -> None:
    host.add("pause", cri={"container-type": "sandbox"})
    assert host.verify().containers == ()
    host.list_devices("pause", "c 195:* rw\n")
    assert host.only().container == "(sandbox)"


@pytest.mark.parametrize(
    ("modes", "wrong"),
    [
        ((Mode.EXCLUSIVE, Mode.EXCLUSIVE), True),
        ((Mode.SHARED, Mode.EXCLUSIVE), True),
        ((Mode.SHARED, Mode.SHARED), False),
    ],
)
def test_one_gpu_granted_twice(host: Host, modes: tuple[Mode, Mode], wrong: bool) -> None:
    for id_, mode in zip(("a", "b"), modes, strict=True):
        host.add(id_, 0, mode=mode)
    found = host.verify().containers
    assert {each.verdict for each in found} == {Verdict.DIFFERS if wrong else Verdict.OK}
    if wrong:
        assert f"in {modes[0]} mode that /b ({modes[1]}) was granted, too" in found[0].differences[0]


def test_two_containers_of_a_pod_may_share(host: Host) -> None:
    for id_ in ("a", "b"):
        host.add(id_, 0, pod="one")
    assert {each.verdict for each in host.verify().containers} == {Verdict.OK}


def test_what_cannot_be_seen_is_said(host: Host) -> None:
    host.add("vm", fault="it may run in a virtual machine")
    said = host.only()
    assert (said.verdict, said.unseen) == (Verdict.UNSEEN, "it may run in a virtual machine")


def test_one_that_ended_meanwhile_is_left_out(host: Host) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    host.add("short", pid=gone.pid)
    (host.base / str(gone.pid) / "cgroup").unlink()
    assert host.verify().containers == ()


def test_a_process_of_another_container_is_not_its(host: Host) -> None:
    """Its PID was given to another process, which is this one here."""
    host.add("reused", pid=os.getpid())
    (host.base / str(os.getpid()) / "cgroup").write_text("5:devices:/other\n")
    said = host.only()
    assert said.verdict is Verdict.UNSEEN
    assert "is in no cgroup of this container" in said.unseen


def test_holders_by_the_daemons_word(host: Host) -> None:
    host.add("train", 0)
    assert host.verify({"train": "ml/train"}).unseen == ()
    lost = {"train": "ml/train", "lost": "ml/lost"}
    [said] = host.verify(lost, lost).unseen
    assert said.startswith("container lost of ml/lost, which has GPUs")
    assert host.verify(lost, {"train": "ml/train"}).unseen == ()  # it ended meanwhile
    assert "is another version" in host.verify(None).unseen[0]


def test_what_was_denied_is_told_apart(host: Host) -> None:
    def refuse(_: Path) -> list[int]:
        raise PermissionError(1, "Operation not permitted")

    (host.base / "self" / "mountinfo").write_text(f"31 1 0:27 / {host.base} rw - cgroup2 cgroup2 rw\n")
    host.add("train", 0, pid=os.getpid())
    (host.base / str(os.getpid()) / "cgroup").write_text("0::/train\n")
    found = host.verify(kernel=Kernel(host.base, programs=refuse))
    assert found.denied
    assert "cannot be read: Operation not permitted" in found.containers[0].unseen
