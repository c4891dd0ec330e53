"""`nri-gpu check`: all faults at once with their places, advice that does not change the exit code, and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nri_gpu.cli import check_command
from nri_gpu.daemon.answers import KubeletStatus
from nri_gpu.doctor.examined import Examined
from nri_gpu.domain.errors import Exit
from nri_gpu.driver.stage_owner import StageOwner
from nri_gpu.records.policy_file import IN_FORCE, LAST_GOOD
from tests.support.daemon import FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.views import status_json, view
from tests.unit.cli.conftest import Done, NriGpuCall, daemon
from tests.unit.policy.samples import OLD

CONFIG = Path(__file__).parents[3] / "config"
BAD = '[plugin]\nindex = 5\n\n[driver]\nrot = "/"\n'
POOL = '[[pool]]\nname = "big"\nmodel = "*B200*"\nnamespaces = ["a"]\n'
Checked = Callable[..., Done]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.toml"


@pytest.fixture
def checked(path: Path, nri_gpu: NriGpuCall) -> Checked:
    """Checks a policy of this text."""

    def run(text: str, *options: object) -> Done:
        path.write_text(text)
        return nri_gpu("check", path, *options)

    return run


@pytest.mark.parametrize("shipped", [CONFIG / "policy.toml", *sorted((CONFIG / "examples").glob("*.toml"))], ids=str)
def test_every_shipped_policy_is_good(nri_gpu: NriGpuCall, shipped: Path) -> None:
    done = nri_gpu("check", shipped)
    first, *advice = done.out.splitlines()
    assert (done.code, first) == (Exit.OK, f"{shipped}: ok")
    assert all(line.startswith("advice: ") for line in advice)
    done = nri_gpu("check", shipped, "-o", "json")
    assert done.code == Exit.OK
    assert len(done.document["advice"]) == len(advice)


@pytest.mark.parametrize(("text", "named"), [(text, named) for text, _, named in OLD.values()], ids=OLD)
def test_what_an_earlier_version_knew_is_advice(checked: Checked, text: str, named: tuple[str, ...]) -> None:
    done = checked(text, "-o", "json")
    said = [each for each in done.document["advice"] if each.endswith("; remove it")]
    assert (done.code, [each.partition(" is ignored: ")[0] for each in said]) == (Exit.OK, [*named])


@pytest.mark.parametrize(
    ("text", "options", "fault"),
    [
        ("", ["--require-plugin=nri-gpu"], ""),
        ('[plugin]\nname = "caf"\n', [], ""),
        ('[plugin]\nname = "caf"\n', ["--require-plugin=caf"], ""),
        ('[plugin]\nname = "caf"\n', ["--require-plugin=nri-gpu", "--plugin-name=nri-gpu"], ""),
        (
            '[plugin]\nname = "caf"\n',
            ["--require-plugin=nri-gpu"],
            ':2: plugin.name: must be "nri-gpu", the name that ',
        ),
        ("", ["--require-plugin=nri-gpu", "--plugin-name=caf"], ': plugin.name: must be "nri-gpu", the name that '),
        (
            '[guard]\nname = "nri-gpu"\n',
            ["--require-plugin=nri-gpu"],
            ':2: guard.name: is "nri-gpu", and pods require ',
        ),
        ("", [f"--{each}=90-nri-gpu-guard" for each in ("plugin-name", "require-plugin")], ": guard.name: is "),
    ],
)
def test_the_name_that_pods_require(checked: Checked, path: Path, text: str, options: list[str], fault: str) -> None:
    done = checked(text, *options)
    assert done.code == (Exit.CONFIGURATION if fault else Exit.OK)
    assert (f"\n{path}{fault}" in done.out) == bool(fault)


@pytest.mark.parametrize(("content", "words"), [(None, "no such file"), ("a b", "not TOML"), ("[a", "not TOML")])
def test_what_cannot_be_read_is_one_fault(nri_gpu: NriGpuCall, path: Path, content: str | None, words: str) -> None:
    if content is not None:
        path.write_text(content)
    done = nri_gpu("check", path)
    assert done.code == Exit.CONFIGURATION
    assert done.out.startswith(f"{path}: 1 fault\n{path}:")
    assert words in done.out


def test_tables_without_a_key_are_a_finding(checked: Checked, path: Path) -> None:
    done = checked("[stray]\n\n[[rule]]\nallow = true\nlimits = {}\n[dra]\n")
    assert (done.code, done.out.splitlines()[0]) == (Exit.FINDING, f"{path}: 3 faults")
    assert f"{path}:1: stray: has no key, so each has its default: give it one, or remove its heading" in done.out
    done = checked("[stray]\n", "-o", "json")
    assert (done.code, [each["key"] for each in done.document["faults"]]) == (Exit.FINDING, ["stray"])


def test_a_policy_that_was_in_force_and_is_gone(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    """A fault until the operator says otherwise, of a draft without a word, too."""
    lib, draft = tmp_path / "lib", tmp_path / "draft.toml"
    lib.mkdir()
    (lib / IN_FORCE).touch()
    (tmp_path / LAST_GOOD).write_text("# mine\n")
    draft.touch()
    for words, said in (((), "default-policy.toml: is missing"), ((draft,), "draft.toml: is empty")):
        done = nri_gpu("check", *words)
        assert (done.code, f"{said}, and a policy was in force" in done.out) == (Exit.CONFIGURATION, True)
        assert "run `nri-gpu check --forget` and reload nri-gpu to go back to the defaults" in done.out
    done = nri_gpu("check", "--forget", "--state-dir", tmp_path)
    assert (done.code, done.out.splitlines()[0]) == (Exit.OK, "the built-in defaults: ok")
    assert not {IN_FORCE, LAST_GOOD} & {path.name for path in tmp_path.rglob("*")}
    assert nri_gpu("check", "--forget", draft, "--state-dir", tmp_path).code == Exit.OK


def test_what_cannot_be_forgotten(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    (tmp_path / "lib" / IN_FORCE).mkdir(parents=True)
    done = nri_gpu("check", "--forget", "--state-dir", tmp_path)
    assert (done.code, f"{IN_FORCE} cannot be removed: it is a folder" in done.err) == (Exit.UNAVAILABLE, True)


def test_the_default_file(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    done = nri_gpu("check")
    assert done.code == Exit.OK
    assert done.out.startswith("the built-in defaults: ok\n")
    (tmp_path / "default-policy.toml").write_text(BAD)
    assert nri_gpu("check").code == Exit.CONFIGURATION


def test_a_file_others_may_write_gets_advice(checked: Checked, path: Path) -> None:
    path.touch()
    path.chmod(0o666)
    done = checked("")
    assert done.code == Exit.OK
    assert f"advice: {path} may be written by users other than its owner" in done.out


def test_two_resources_of_one_prefix_with_mig_devices_are_a_fault(checked: Checked) -> None:
    """Only where the GPUs show it: until then the policy is good."""
    topology = CONFIG / "topologies" / "mig-a100.toml"
    pools = "".join(f'[[pool]]\nname = "{name}"\ndevice = ["{at}"]\n' for name, at in (("a", 0), ("b", 1)))
    resources = 'resources = {"nvidia.com/a" = "a", "PREFIX/b" = "b"}'
    policy = f'{pools}[kubelet]\nmig_strategy = "mixed"\n{resources}\n'
    done = checked(policy.replace("PREFIX", "nvidia.com"), "--gpus", topology)
    assert done.code == Exit.CONFIGURATION
    assert "kubelet.resources: the kubelet is not offered " in done.out
    assert "of nvidia.com/b: a MIG profile's resource has no pool in its name" in done.out
    done = checked(policy.replace("PREFIX", "nvidia.com"), "--gpus", FOUR_GPUS, "--gpus", topology)
    assert (done.code, done.out.splitlines()[0].endswith(": 1 fault")) == (Exit.CONFIGURATION, True)
    assert f"kubelet.resources: {topology}: the kubelet is not offered " in done.out
    for text, gpus in (
        (policy.replace("PREFIX", "b.io"), topology),
        (policy.replace("PREFIX", "nvidia.com"), FOUR_GPUS),
    ):
        assert checked(text, "--gpus", gpus).code == Exit.OK


def test_pools_are_compared_with_a_topology_or_the_node(checked: Checked, tmp_path: Path) -> None:
    without = 'advice: pool[0] "big" has no GPU of this node: its selectors fit none'
    done = checked(POOL, "--gpus", FOUR_GPUS)
    assert (done.code, without in done.out) == (Exit.OK, True)
    assert "has no GPU of this node" not in checked(POOL.replace("*B200*", "*"), "--gpus", FOUR_GPUS).out
    done = checked(POOL, "--gpus", tmp_path / "none.toml")
    assert (done.code, "none.toml" in done.err) == (Exit.CONFIGURATION, True)
    done = checked(f'{POOL}[driver]\nroot = "{tmp_path}"\n')
    assert (done.code, "the pools cannot be compared with this node's GPUs: " in done.out) == (Exit.OK, True)


def test_one_policy_is_held_against_several_kinds_of_nodes(checked: Checked, tmp_path: Path) -> None:
    """What is true of some names their files; what is true of each is said once, and so is a fault."""
    twin, eight = tmp_path / "twin.toml", CONFIG / "topologies" / "pcie-8.toml"
    twin.write_text(FOUR_GPUS.read_text().replace("A100", "B200"))  # other GPUs of the same UUIDs
    policy = f'{POOL}[[pool]]\nname = "none"\nmodel = "*X1*"\nnamespaces = ["a"]\n[limits]\ngpus_per_node = 4\n'
    files = [word for file in (FOUR_GPUS, twin, eight) for word in ("--gpus", file)]
    done = checked(policy, *files)
    told = [line for line in done.out.splitlines() if "has no GPU" in line or "can never bind" in line]
    assert done.code == Exit.OK
    assert told == [
        f'advice: {FOUR_GPUS}, {eight}: pool[0] "big" has no GPU of this node: its selectors fit none',
        'advice: pool[1] "none" has no GPU of this node: its selectors fit none',
        f"advice: {FOUR_GPUS}, {twin}: limits.gpus_per_node = 4 can never bind: this node has 4 GPUs (a MIG device "
        "counts as one)",
    ]
    document = checked(policy, *files, "-o", "json").document
    assert [(each["file"], len(each["advice"])) for each in document["topologies"]] == [
        (str(FOUR_GPUS), 3),
        (str(twin), 2),
        (str(eight), 2),
    ]
    [alone] = checked(policy, *files[:2], "-o", "json").document["topologies"]
    assert alone == document["topologies"][0]
    assert checked(policy, "-o", "json").document["topologies"] == []


def test_what_an_earlier_version_played_in_a_topology_is_advice(checked: Checked, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f"{FOUR_GPUS.read_text()}[[change]]\nat_s = 3\ngpu = 0\nlost = true\n")
    line = len(FOUR_GPUS.read_text().splitlines()) + 1
    done = checked("", "--gpus", file, "-o", "json")
    advice = [each for each in done.document["advice"] if each.startswith(f"[[change]], line {line} of {file}")]
    assert (done.code, len(advice)) == (Exit.OK, 1)


def test_a_driver_without_libcuda(checked: Checked, tmp_path: Path) -> None:
    root = make_driver_root(tmp_path / "driver")
    policy = f'[driver]\nroot = "{root}"\n'
    assert "no usable" not in checked(policy).out
    next(root.rglob("libcuda.so.*.*")).unlink()
    assert "has no usable libcuda.so: requests for compute are refused" in checked(policy).out


def test_mps_without_a_mount_for_its_clients(checked: Checked, tmp_path: Path) -> None:
    sentence = "every container that asks with mode=mps is refused: no file system of its own is mounted"
    enabled = "[mps]\nenabled = true\n"
    assert sentence in checked(enabled, "--state-dir", tmp_path).out
    assert sentence not in checked(enabled, "--state-dir", tmp_path / "never served").out
    assert sentence not in checked("", "--state-dir", tmp_path).out


def test_a_node_that_was_served_and_has_no_guard(
    checked: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "Examined", partial(Examined, root=tmp_path / "no process"))
    sentence = "advice: no guard runs on this node: a container that asks for GPUs"
    assert sentence in checked("", "--state-dir", tmp_path).out
    assert sentence not in checked("", "--state-dir", tmp_path / "never served").out


def test_a_stage_folder_of_another_daemon(checked: Checked, tmp_path: Path) -> None:
    owner = StageOwner(tmp_path / "drivers", tmp_path / "first")
    owner.take()
    owner.close()
    text = f'[driver]\nstage_dir = "{tmp_path}/drivers"\n'
    why = f"driver.stage_dir {tmp_path}/drivers belongs to the nri-gpu with state folder {tmp_path}/first, so one with"
    for options, warned in (
        ((), True),
        (("--state-dir", "second"), True),
        (("--state-dir", tmp_path / "first"), False),
    ):
        assert (why in checked(text, *options).out) is warned


def test_the_running_daemons_options_override_the_file(checked: Checked, folder: Path) -> None:
    text = '[kubelet]\npool = "cluster"\n\n[[pool]]\nname = "cluster"\nmodel = ["*"]\n'
    assert "kubelet.enabled is not set" in checked(text, "--state-dir", folder).out
    options = {"kubelet.enabled": True, "driver.root": "/driver-root", "topology": str(FOUR_GPUS)}
    status = view(options=options, kubelet=KubeletStatus(True, (), "NRI 0.6"))
    with daemon(folder, json.dumps(status_json(status)).encode()):
        done = checked(text, "--state-dir", folder)
    assert done.code == Exit.OK
    lines = done.out.splitlines()
    assert lines[1].startswith('with the running daemon\'s options: driver.root = "/driver-root", kubelet')
    assert "kubelet: only the guard stops containers that start without their GPUs: NRI 0.6" in lines
    assert "pool[0]" not in done.out
    (folder / "twice").mkdir()
    with daemon(folder / "twice", json.dumps(status_json(status)).encode()):
        done = checked("[dra]\nenabled = true\n", "--state-dir", folder / "twice")
    assert (done.code, "command line: --kubelet: " in done.out) == (Exit.CONFIGURATION, True)


def test_options_of_run_are_checked_with_the_file(checked: Checked, folder: Path) -> None:
    text = "[dra]\nenabled = true\n"
    twice = "command line: --kubelet: dra.enabled and kubelet.enabled would both offer the same GPUs"
    done = checked(text, "--kubelet", "--state-dir", folder)
    assert (done.code, done.out.splitlines()[0]) == (Exit.CONFIGURATION, "command line: 1 fault")
    assert twice in done.out
    document = checked(text, "--kubelet", "--state-dir", folder, "-o", "json").document
    assert [(each["file"], each["key"], each["line"]) for each in document["faults"]] == [
        ("command line", "--kubelet", None)
    ]
    assert document["options"] == {"kubelet.enabled": True}
    done = checked(f"{text}[kubelet]\nenabled = true\n", "--no-kubelet", "--state-dir", folder)
    assert done.code == Exit.OK
    assert done.out.splitlines()[1] == "with these options: kubelet.enabled = false"
    wrong = checked("", "--socket", "a", "--metrics", "0.0.0.0:1", "--state-dir", folder)
    assert (wrong.code, "command line: --socket: must be" in wrong.out) == (Exit.CONFIGURATION, True)


def test_options_given_go_over_those_of_the_running_daemon(checked: Checked, folder: Path) -> None:
    status = view(options={"kubelet.enabled": True, "driver.root": "/driver-root"})
    with daemon(folder, json.dumps(status_json(status)).encode()):
        done = checked("[dra]\nenabled = true\n", "--no-kubelet", "--state-dir", folder)
    assert done.code == Exit.OK
    assert done.out.splitlines()[1:3] == [
        "with these options: kubelet.enabled = false",
        'with the running daemon\'s options: driver.root = "/driver-root"',
    ]


@pytest.mark.parametrize(
    ("runtime", "advice"),
    [
        (
            {"ready": False},
            ["nri-gpu is not connected to the runtime, so containers start without GPUs: connecting"],
        ),
        ({"ready": True, "list_fault": "too large"}, ["too large"]),
    ],
)
def test_what_keeps_the_running_daemon_from_serving(
    checked: Checked, folder: Path, runtime: dict[str, object], advice: list[str]
) -> None:
    status = {**status_json(view()), "runtime": {"since_s": 0.0, **runtime}}
    with daemon(folder, json.dumps(status).encode()):
        document = checked("", "--state-dir", folder, "-o", "json").document
    assert document["advice"][-1:] == advice


def test_feature_gates_that_the_api_server_lacks(checked: Checked, folder: Path) -> None:
    dra = {"enabled": True, "driver": "gpu.nri.io", "asked_s": 1.0, "report": {"missing": ["DRAPartitionableDevices"]}}
    with daemon(folder, json.dumps({**status_json(view()), "dra": dra}).encode()):
        document = checked("", "--state-dir", folder, "-o", "json").document
    assert document["advice"][-1].startswith(
        "the API server lacks the feature gate DRAPartitionableDevices: MIG devices"
    )
