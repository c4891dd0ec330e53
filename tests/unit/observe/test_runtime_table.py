"""The table of runtimes."""

from __future__ import annotations

from pathlib import Path

from nri_gpu.observe.runtime_table import RUNTIMES, mounted_folders, watched_folders
from nri_gpu.system.storage import below
from nri_gpu.verify.oci_bundles import STATES, TASKS


def test_a_pod_mounts_each_folder_once_and_none_that_lies_in_another() -> None:
    folders = mounted_folders()
    assert {*folders} == {folder for row in RUNTIMES for folder in row.folders}
    assert {f"{state}/{TASKS}" for state in STATES} <= {*folders}
    assert not [(a, b) for a in folders for b in folders if a != b and Path(a).is_relative_to(b)]
    assert len({*folders}) == len(folders)


def test_folders_in_which_containers_come_and_go_are_watched_once_they_exist(tmp_path: Path) -> None:
    assert watched_folders(root=tmp_path) == []
    tasks, more = tmp_path / "run/containerd" / TASKS, tmp_path / "srv" / TASKS
    stored = tmp_path / "run/containers/storage/overlay-containers"
    for folder in (tasks / "k8s.io", more, stored, tmp_path / "var/lib/docker/containers"):
        folder.mkdir(parents=True)
    assert {*watched_folders(["/srv"], tmp_path)} == {tasks, tasks / "k8s.io", more, stored}


def test_no_path_leads_through_a_link_of_the_host() -> None:
    assert not [each for each in mounted_folders() if below(Path("/host"), each) != Path(f"/host{each}")]
