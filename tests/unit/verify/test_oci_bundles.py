"""The bundles of containerd's state folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from nri_gpu.domain.errors import UnseenError
from nri_gpu.verify.oci_bundles import STARTING_S, TASKS, Bundle, read_bundles

CRI = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.container-name": "main",
    "io.kubernetes.cri.sandbox-id": "5a5a",
    "io.kubernetes.cri.sandbox-name": "train",
    "io.kubernetes.cri.sandbox-namespace": "research",
    "io.kubernetes.cri.sandbox-uid": "7d2e",
}


def write(state: Path, spec: object, *, id_: str = "0a1b", namespace: str = "k8s.io", pid: str | None = "7") -> Path:
    bundle = state / TASKS / namespace / id_
    bundle.mkdir(parents=True)
    (bundle / "config.json").write_text(spec if isinstance(spec, str) else json.dumps(spec))
    if pid is not None:
        (bundle / "init.pid").write_text(pid)
    return bundle


def age(bundle: Path, by_s: float = STARTING_S + 1) -> None:
    """As if its container had been made long ago."""
    past = (bundle / "config.json").stat().st_mtime - by_s
    os.utime(bundle / "config.json", (past, past))


def only(state: Path) -> Bundle:
    [bundle] = read_bundles([state])
    return bundle


def annotated(**more: str) -> Mapping[str, object]:
    return {"annotations": CRI | more}


def test_a_container_of_a_pod(tmp_path: Path) -> None:
    write(tmp_path, annotated())
    found = only(tmp_path)
    assert (found.pod, found.name, found.pod_uid, found.pid) == ("research/train", "main", "7d2e", 7)
    assert not (found.sandbox or found.fault)


def test_a_sandbox_and_a_pod_without_a_uid(tmp_path: Path) -> None:
    write(tmp_path, annotated(**{"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-uid": ""}))
    found = only(tmp_path)
    assert (found.sandbox, found.name, found.pod_uid) == (True, "(sandbox)", "5a5a")


def test_a_container_of_docker(tmp_path: Path) -> None:
    write(tmp_path, {}, id_="0123456789abcdef", namespace="moby")
    found = only(tmp_path)
    assert (found.pod, found.name, found.pod_uid) == ("moby", "0123456789ab", "")


def test_lists_may_be_null(tmp_path: Path) -> None:
    write(tmp_path, {"mounts": None, "linux": {"devices": None, "resources": None}, "process": {"env": None}})
    spec = only(tmp_path).spec
    assert (spec.nodes, spec.rules, spec.env, spec.privileged) == ((), (), {}, False)


def test_nodes_rules_and_variables(tmp_path: Path) -> None:
    devices = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}, {"path": "/dev/sda", "type": "b"}]
    allowed = [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"},
    ]
    env = ["PATH=/bin", "A=1", "A=2=3", "odd"]
    write(tmp_path, {"linux": {"devices": devices, "resources": {"devices": allowed}}, "process": {"env": env}})
    [spec] = [each.spec for each in read_bundles([tmp_path], variables={"A", "odd"})]
    assert [node.path for node in spec.nodes] == ["/dev/nvidia0"]
    assert (spec.opens((195, 0)), spec.opens((195, 1)), spec.privileged) == (True, False, False)
    assert spec.env == {"A": "2=3"}


@pytest.mark.parametrize(
    ("rule", "privileged"),
    [
        ({"allow": True, "access": "rwm"}, True),
        ({"allow": True, "type": "a", "major": -1, "minor": -1, "access": "rwm"}, True),
        ({"allow": True, "type": "c", "access": "rwm"}, False),
        ({"allow": True, "major": 195, "access": "rwm"}, False),
        ({"allow": False, "access": "rwm"}, False),
    ],
)
def test_the_rule_of_a_privileged_container(tmp_path: Path, rule: Mapping[str, object], privileged: bool) -> None:
    write(tmp_path, {"linux": {"resources": {"devices": [rule]}}})
    assert only(tmp_path).spec.privileged is privileged


@pytest.mark.parametrize(
    ("spec", "pid", "why"),
    [
        ("{", "7", "cannot be understood"),
        ("[" * 100_000, "7", "cannot be understood"),
        ('{"linux": []}', "7", "cannot be understood"),
        ("{}", "seven", "cannot be understood"),
        ("{}", None, "may run in a virtual machine"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, spec: str, pid: str | None, why: str) -> None:
    age(write(tmp_path, spec, pid=pid))
    assert why in only(tmp_path).fault


def test_one_that_is_just_being_made_or_removed_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, annotated(), pid=None)
    (tmp_path / TASKS / "k8s.io" / "gone").mkdir()
    assert read_bundles([tmp_path]) == ()


def test_one_that_is_just_being_made_is_read_where_that_is_asked(tmp_path: Path) -> None:
    """One that is gone by now is none, though."""
    write(tmp_path, annotated(), pid=None)
    (tmp_path / TASKS / "k8s.io" / "gone").mkdir()
    [found] = read_bundles([tmp_path], starting=True)
    assert (found.pod, found.pid, found.fault) == ("research/train", 0, "")


@pytest.mark.parametrize(
    ("uid", "static"), [("0123456789abcdef0123456789abcdef", True), ("01234567-89ab-cdef-0123-456789abcdef", False)]
)
def test_a_static_pods_uid_is_the_kubelets_own(tmp_path: Path, uid: str, static: bool) -> None:
    write(tmp_path, annotated(**{"io.kubernetes.cri.sandbox-uid": uid}))
    assert only(tmp_path).static is static


def test_one_that_was_made_before_the_time_of_day_was_set_back_is_not_just_being_made(tmp_path: Path) -> None:
    age(write(tmp_path, annotated(), pid=None), by_s=-86400)
    assert "its runtime wrote no" in only(tmp_path).fault


def test_several_containerds(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, annotated(), id_=name)
    found = read_bundles([tmp_path / each for each in ("one", "none", "two")])
    assert [each.id for each in found] == ["one", "two"]


def test_no_containerd_is_no_clean_bill(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UnseenError, match=r"no containerd keeps containers below .*none, .*--containerd-state"
    ) as caught:
        read_bundles([tmp_path / "none", tmp_path / "file"])
    assert not caught.value.denied


def test_a_folder_that_may_not_be_listed(tmp_path: Path) -> None:
    write(tmp_path, annotated())
    (tmp_path / TASKS).chmod(0)
    me = os.geteuid()
    os.seteuid(me or 65534)
    try:
        with pytest.raises(UnseenError, match=r"cannot be listed: Permission denied; be root") as caught:
            read_bundles([tmp_path])
    finally:
        os.seteuid(me)
    assert caught.value.denied
