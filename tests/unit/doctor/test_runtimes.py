"""The runtime and its NRI: one broken configuration a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.go_toml import seconds
from nri_gpu.doctor.runtime_settings import CRI_PLUGINS, IMAGES, NRI, Validator, containerd_settings, crio_settings
from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.domain.finding import Level, unseen
from nri_gpu.policy.plugin_settings import PluginSettings
from tests.unit.doctor.node import CONFIG, TOML, DoctorNode, stopped

Break = Callable[[DoctorNode], object]
SUDO = "sudo nri-gpu doctor"
CRI = "plugins.'io.containerd.grpc.v1.cri'.containerd"
NRI_ON = '[plugins."io.containerd.nri.v1.nri"]\ndisable = false\n'
VALIDATOR = '\n[plugins."io.containerd.nri.v1.nri".default_validator]\n'


def config(text: str) -> Break:
    return lambda node: node.write(TOML, text)


def nri(*lines: str) -> Break:
    return config(CONFIG + "\n".join(lines) + "\n")


def old(node: DoctorNode) -> None:
    node.program("1.7.24")
    node.write(TOML, "version = 2\n")


def ancient(node: DoctorNode) -> None:
    node.program("1.6.20")
    node.write(TOML, "version = 2\n")


def stranger(node: DoctorNode) -> None:
    node.program("2.2.1")
    nri(VALIDATOR, 'enable = true\nrequired_plugins = ["05-nri-gpu"]')(node)


def tolerant(node: DoctorNode) -> None:
    node.program("2.2.1")
    nri(VALIDATOR, 'enable = true\ntolerate_missing_plugins_annotation = "tolerate-missing.example.com"')(node)


def dropped(node: DoctorNode) -> None:
    """NVIDIA's drop-in beside a containerd 1.7: it takes the place of the other file's handlers."""
    node.program("1.7.24")
    runc = f"[{CRI}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
    node.write(TOML, f'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n{NRI_ON}{runc}')
    node.write("etc/containerd/conf.d/99-nvidia.toml", f"version = 2\n{runc.replace('runc]', 'nvidia]')}")


def nothing(node: DoctorNode) -> None:
    stopped(node)
    node.remove(TOML)
    node.remove("run/nri/nri.sock")


BROKEN: dict[str, Break] = {
    "NRI switched off": config(CONFIG.replace("false", "true")),
    "off by default": old,
    "disabled as a plugin": config('version = 3\ndisabled_plugins = ["io.containerd.nri.v1.nri"]\n'),
    "Docker's containerd": config('disabled_plugins = ["cri"]\n'),
    "no connections": nri("disable_connections = true"),
    "another socket": nri('socket_path = "/run/other.sock"'),
    "no socket": lambda node: node.remove("run/nri/nri.sock"),
    "a dead socket": lambda node: node.dead_socket("run/nri/nri.sock"),
    "a timeout that is none": nri('plugin_request_timeout = "2 s"'),
    "required, not enabled": nri(VALIDATOR, 'required_plugins = ["nri-gpu"]'),
    "an unknown plugin required": stranger,
    "a validator that is not known yet": nri(VALIDATOR, 'enable = true\nrequired_plugins = ["nri-gpu"]'),
    "a validator without a list that is not known yet": nri(VALIDATOR, "enable = true"),
    "an annotation that voids what a pod requires": tolerant,
    "too old": ancient,
    "not started": stopped,
    "none": nothing,
    "no TOML": config("version = \n"),
    "a word of another type": nri("disable_connections = 1"),
    "a plugin that is no table": config('version = 3\n[plugins]\n"io.containerd.nri.v1.nri" = 1\n'),
    "plugins that are none": config("plugins = 3\n"),
    "a byte that is not UTF-8": lambda node: (node.root / TOML).write_bytes(b"# caf\xe9\n" + CONFIG.encode()),
    "a mark of the order of bytes": lambda node: (node.root / TOML).write_bytes(CONFIG.encode("utf-8-sig")),
    "a key in another case": config(CONFIG.replace("disable = false", "Disable = true")),
    "a timeout without a unit": nri("plugin_request_timeout = 5"),
    "a default runtime without a table": config(f'version = 2\n{NRI_ON}[{CRI}]\ndefault_runtime_name = "nvidia"\n'),
    "a drop-in that hides runc": dropped,
    "an import that is not there": config('version = 3\nimports = ["/etc/containerd/none.toml"]\n'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_found_with_its_fix(node: DoctorNode, name: str) -> None:
    BROKEN[name](node)
    node.hold("runtimes", BROKEN, name, status=None)


def test_what_a_connected_daemon_will_meet_later_is_a_warning(node: DoctorNode) -> None:
    config(CONFIG.replace("false", "true"))(node)
    finding = node.only()
    assert (finding.level, finding.subject) == (Level.WARNING, "NRI")
    assert finding.meaning.startswith("nri-gpu is connected for now, but after the runtime's next start: NRI is off")


@pytest.mark.parametrize(
    ("version", "warns"),
    [("2.0.5", False), ("2.1.9", True), ("2.2.6", True), ("2.2.7", False), ("2.3.3", True), ("2.3.4", False)],
)
def test_a_containerd_that_restores_any_checkpoint(node: DoctorNode, version: str, warns: bool) -> None:
    node.program(version)
    assert "checkpoints" not in node.found(status=None)
    node.write("usr/sbin/criu", "")
    found = node.found(status=None).get("checkpoints")
    assert bool(found) is warns
    assert not found or f"containerd {version} finds /usr/sbin/criu, so it restores" in found.meaning
    config(CONFIG + '[plugins."io.containerd.cri.v1.runtime"]\nenable_experimental_restore_via_create = true\n')(node)
    assert ("checkpoints" in node.found(status=None)) is (warns or version != "2.0.5")


def test_a_path_that_only_root_may_read(node: DoctorNode) -> None:
    node.remove("proc/700/environ")
    assert node.only() == unseen("checkpoints", "only root can see whether containerd 2.1.9 finds criu", SUDO)


def test_k3s_makes_its_file_from_a_template(node: DoctorNode) -> None:
    folder = "var/lib/rancher/k3s/agent/etc/containerd"
    node.process(700, "containerd", "containerd", "-c", f"/{folder}/config.toml")
    node.write(f"{folder}/config.toml", CONFIG.replace("false", "true"))
    finding = node.found(status=None)["NRI"]
    assert finding.fix[0].startswith(f"# in /{folder}/config-v3.toml.tmpl, behind {{{{ template")
    assert finding.fix[-1].startswith("systemctl restart k3s ")


OFF = '[plugins."io.containerd.nri.v1.nri"]\n  disable = true\n  disable_connections = false\n'
NOT_ON = {
    "no file": None,
    "an empty file": "",
    "not mentioned": 'version = 2\n[plugins]\n  [plugins."io.containerd.grpc.v1.cri"]\n    sandbox_image = "a"',
    "as Docker brings it": "disabled_plugins = []\n",
    "as `config default` writes it": f"version = 2\n[other]\n  disable = true\n{OFF}[last]\n  disable = true\n",
    "of version 1": 'disabled_plugins = []\n[plugins."nri"]\n  socket_path = "/run/a"\n  disable = true\n',
}


@pytest.mark.parametrize("text", NOT_ON.values(), ids=NOT_ON)
def test_what_switches_nri_on_in_containerd_1_7_is_pasted_into_a_shell(node: DoctorNode, text: str | None) -> None:
    node.program("1.7.24")
    node.remove(TOML) if text is None else node.write(TOML, text)
    command, restart = node.found(status=None)["NRI"].fix
    assert "\n" not in command
    assert restart.startswith("systemctl restart containerd ")
    subprocess.run(["bash", "-c", command.replace("/etc/", f"{node.root}/etc/")], check=True)
    runtime = container_runtime(replace(node.seen, status=None))
    assert runtime is not None
    assert (runtime.nri_enabled, runtime.faults) == (True, ())
    assert text is None or (node.root / TOML).read_text().count("disable = true") == text.count("[other]") * 2


SPELLED = ("[plugins.'io.containerd.nri.v1.nri']\ndisable = true\n", f"{OFF.partition('disable')[0]}Disable = true\n")


@pytest.mark.parametrize("text", SPELLED)
def test_a_table_that_is_spelled_in_another_way_is_left_to_its_author(node: DoctorNode, text: str) -> None:
    node.program("1.7.24")
    node.write(TOML, f"version = 2\n{text}")
    fix = node.found(status=None)["NRI"].fix
    assert fix[:2] == (f'# in /{TOML}, below [plugins."{NRI}"]:', "disable = false")


def test_a_file_that_only_root_may_read(node: DoctorNode) -> None:
    (node.root / TOML).chmod(0o600)
    found = node.found_by_nobody()
    assert found["runtime configuration"].level is Level.UNSEEN
    assert found["NRI"].level is Level.UNSEEN  # the socket is root's


def test_a_pipe_in_the_place_of_a_file_does_not_block(node: DoctorNode) -> None:
    node.remove(TOML)
    os.mkfifo(node.root / TOML)
    assert "is not a regular file" in node.only().meaning


def test_a_short_timeout_is_a_warning(node: DoctorNode) -> None:
    nri('plugin_request_timeout = "500ms"')(node)
    assert node.only().level is Level.WARNING


def test_without_cri_no_process_is_said_to_have_removed_the_socket(node: DoctorNode) -> None:
    dropped(node)
    node.remove("run/nri/nri.sock")
    found = node.found(status=None)
    assert (found["NRI"].level, found["CRI"].level) == (Level.UNSEEN, Level.ERROR)
    assert "another process removed" not in found["NRI"].meaning
    stopped(node)
    assert "is configured but does not run" in node.found(status=None)["container runtime"].meaning


def test_an_older_name_counts_less(node: DoctorNode) -> None:
    """NVIDIA's drop-in of version 2 beside a file of version 3: its `runtimes` mean nothing to 2.0 to 2.2."""
    dropped(node)
    ours = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n"
    node.write(TOML, f'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n{ours}')
    nvidia = f"[{CRI}]\ndefault_runtime_name = 'nvidia'\n[{CRI}.runtimes.nvidia]\n"
    node.write("etc/containerd/conf.d/99-nvidia.toml", f"version = 2\n{nvidia}")
    node.program("2.1.9")
    found = node.found(status=None)["CRI"]
    assert (
        'beside its newer name, its older one, "io.containerd.grpc.v1.cri", counts less or not at all' in found.meaning
    )
    assert found.fix[0].startswith("# in /etc/containerd/conf.d/99-nvidia.toml, below")
    node.program("2.3.7")
    assert "CRI" not in node.found(status=None)


def test_nor_where_cri_is_disabled(node: DoctorNode) -> None:
    node.remove("run/nri/nri.sock")
    config(f'disabled_plugins = ["io.containerd.cri.v1.runtime"]\n{CONFIG}')(node)
    found = node.found(status=None)
    assert (found["NRI"].level, found["CRI"].level) == (Level.UNSEEN, Level.ERROR)


def test_a_cri_that_did_not_come_up_may_be_why_the_socket_is_missing(node: DoctorNode) -> None:
    """As with `mirrors` beside `config_path`, which is not read here."""
    node.remove("run/nri/nri.sock")
    assert "its CRI plugin did not come up (its log says why)" in node.only(status=None).meaning


@pytest.mark.parametrize(
    ("version", "plugin", "off"),
    [("2.1.9", IMAGES, True), ("1.7.24", IMAGES, False), ("1.7.24", CRI_PLUGINS[0], False)],
)
def test_each_release_needs_other_plugins_for_cri(node: DoctorNode, version: str, plugin: str, *, off: bool) -> None:
    node.program(version)
    config(f'version = 2\ndisabled_plugins = ["{plugin}"]\n{NRI_ON}')(node)
    found = node.found(status=None)
    assert ("CRI" in found) is off
    assert not off or found["CRI"].fix[0] == f'# in /{TOML}, take "{plugin}" out of disabled_plugins'


def test_a_timeout_of_0_is_the_default(node: DoctorNode) -> None:
    nri('plugin_request_timeout = "0s"', "plugin_registration_timeout = 0")(node)
    assert node.found(status=None) == {}


def test_crio_reads_keys_in_any_case(node: DoctorNode) -> None:
    node.process(700, "crio", "/usr/bin/crio")
    node.program("1.33.1")
    node.write("etc/crio/crio.conf", "\ufeff[CRIO.Nri]\nEnable_NRI = false\n")
    assert "NRI is off" in node.found(status=None)["NRI"].meaning


def test_required_plugins_that_are_ours(node: DoctorNode) -> None:
    node.program("2.2.1")
    nri(VALIDATOR, 'enable = true\nrequired_plugins = ["nri-gpu", "90-nri-gpu-guard", "topology-aware"]')(node)
    assert node.found(status=None) == {}


REQUIRED = {
    "off": ("", "the validator is off, so a pod that requires caf by its annotation starts without"),
    "on": ("enable = true", "a pod that requires caf by its annotation has no container created while"),
    "a list, and what tolerates": (
        'enable = true\nrequired_plugins = ["caf"]\ntolerate_missing_plugins_annotation = "a.b"',
        "no container is created without caf, but for pods with a.b, whatever they require themselves",
    ),
}


@pytest.mark.parametrize(("lines", "meaning"), REQUIRED.values(), ids=REQUIRED)
def test_whether_a_pod_can_require_us(node: DoctorNode, lines: str, meaning: str) -> None:
    node.program("2.2.1")
    nri(VALIDATOR, lines)(node)
    policy = replace(node.seen.policy, plugin=PluginSettings(name="caf"))
    (finding,) = (
        each for each in node.examine(status=None, policy=policy).findings if each.subject == "required plugins"
    )
    assert finding.level is Level.OK
    assert finding.meaning.startswith(meaning)


def test_a_runtime_in_another_pid_namespace(node: DoctorNode) -> None:
    stopped(node)
    node.remove(TOML)
    found = node.found(status=None)
    for subject in ("container runtime", "required plugins"):
        assert (found[subject].level, "on the host" in found[subject].fix[0]) == (Level.UNSEEN, True)


def test_of_two_runtimes_the_one_with_our_socket(node: DoctorNode) -> None:
    node.process(600, "containerd", "containerd", "-c", "/etc/private.toml")
    node.write("etc/private.toml", CONFIG + 'socket_path = "/run/private.sock"\n')
    found = container_runtime(node.seen)
    assert found is not None
    assert (found.process and found.process.pid, found.config) == (700, "/etc/containerd/config.toml")


def test_the_file_named_on_the_command_line(node: DoctorNode) -> None:
    node.process(700, "containerd", "/usr/bin/containerd", "--log-level=info", "--config=/etc/mine.toml")
    node.write("etc/mine.toml", "version = 3\n")
    found = container_runtime(node.seen)
    assert found is not None
    assert found.files == ("/etc/mine.toml",)


def other_file(node: DoctorNode) -> None:
    """What it names is no runtime."""
    node.remove("proc/700/exe")
    (node.root / "proc/700/exe").symlink_to("/usr/bin/reboot")
    (node.root / "usr/bin/containerd").rename(node.root / "usr/bin/reboot")


def other_folder(node: DoctorNode) -> None:
    node.remove("proc/700/exe")
    (node.root / "proc/700/exe").symlink_to("/data/containerd")
    (node.root / "data").mkdir()
    (node.root / "usr/bin/containerd").rename(node.root / "data/containerd")


NOT_RUN: dict[str, Break] = {
    "others can write it": lambda node: (node.root / "usr/bin/containerd").chmod(0o777),
    "another program": other_file,
    "a folder of data": other_folder,
}


@pytest.mark.parametrize("broken", NOT_RUN.values(), ids=NOT_RUN)
def test_a_program_that_is_not_trusted_is_not_run(node: DoctorNode, broken: Break) -> None:
    broken(node)
    found = container_runtime(Examined(root=node.root))
    assert found is not None
    assert found.version == ""
    told = container_runtime(node.seen)
    assert told is not None
    assert told.version == "2.1.9"  # by the daemon


def test_a_containers_process_is_no_runtime_of_the_node(node: DoctorNode) -> None:
    node.write("proc/700/status", "Name:\tcontainerd\nNSpid:\t700\t12\n")
    assert "containerd 2.1.9 is configured but does not run" in node.found()["container runtime"].meaning
    node.write("proc/700/status", "Name:\tcontainerd\nNSpid:\t700\n")
    assert node.found() == {}


IMPORTS = {
    "merged from 2.0 on": ((2, 1, 9), True),
    "a table replaced as a whole before": ((1, 7, 24), False),
    "by the file's version": (None, True),
}


@pytest.mark.parametrize(("release", "kept"), IMPORTS.values(), ids=IMPORTS)
def test_imported_files(tmp_path: Path, release: tuple[int, ...] | None, kept: bool) -> None:
    table = '[plugins."io.containerd.nri.v1.nri"]\n'
    version = 2 if release == (1, 7, 24) else 3
    for name, text in {
        "config.toml": f'version = {version}\nimports = ["conf.d/*.toml"]\n{table}plugin_request_timeout = "9s"\n',
        "conf.d/10-a.toml": f"{table}disable = true\n",
        "conf.d/20-b.toml": f"{table}disable = false\n",
    }.items():
        path = tmp_path / "etc/containerd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = containerd_settings(tmp_path, "/etc/containerd/config.toml", release)
    assert found.faults == ()
    assert len(found.files) == 3
    assert (found.nri.disable, found.nri.plugin_request_timeout) == (False, "9s" if kept else "2s")


def test_files_that_import_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('version = 3\nimports = ["/b.toml"]\n')
    (tmp_path / "b.toml").write_text('version = 3\nimports = ["/a.toml"]\n')
    assert containerd_settings(tmp_path, "/a.toml", None).files == ("/a.toml", "/b.toml")


def test_passwords_are_not_kept(tmp_path: Path) -> None:
    secret = '[plugins."io.containerd.grpc.v1.cri".registry.configs.x.auth]\npassword = "hunter2"\n'
    (tmp_path / "a.toml").write_text(f"version = 2\n{secret}")
    assert "hunter2" not in repr(containerd_settings(tmp_path, "/a.toml", None))


def test_crio(tmp_path: Path) -> None:
    folder = tmp_path / "etc/crio/crio.conf.d"
    folder.mkdir(parents=True)
    (folder / "10-a.conf").write_text(
        '[crio.runtime]\ndefault_runtime = "nvidia"\n[crio.nri]\nenable_nri = false\nnri_listen = "/run/a.sock"\n'
    )
    (folder / "20-b.conf").write_text(
        '[crio.nri]\nenable_nri = true\nnri_plugin_request_timeout = "4s"\n'
        '[crio.nri.default_validator]\nnri_validator_required_plugins = ["x"]\n'
        'nri_validator_tolerate_missing_plugins_annotation = "a.b"\n'
    )
    settings = crio_settings(tmp_path, "/etc/crio/crio.conf")
    assert (settings.faults, len(settings.files), settings.handler) == ((), 2, "nvidia")
    found = settings.nri
    assert (found.disable, found.socket_path, found.plugin_request_timeout) == (False, "/run/a.sock", "4s")
    assert found.default_validator == Validator(required_plugins=("x",), tolerate_missing_plugins_annotation="a.b")


@pytest.mark.parametrize(("version", "on"), [("1.29.4", False), ("1.30.1", True)])
def test_crio_has_nri_by_default_from_1_30(node: DoctorNode, version: str, on: bool) -> None:
    node.process(700, "crio", "/usr/bin/crio")
    node.program(version)
    found = node.found(status=None)
    assert ("NRI" not in found) is on
    if not on:
        assert found["NRI"].fix[:2] == ("# in /etc/crio/crio.conf, below [crio.nri]:", "enable_nri = true")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("2s", 2.0), ("1m30s", 90.0), ("500ms", 0.5), ("1.5h", 5400.0), (".5s", 0.5), ("5.s", 5.0), ("-1s", -1.0)),
        *(("0", 0.0), ("5µs", 5e-6), ("2", None), ("", None), (".s", None), ("5 s", None), ("9999999999h", None)),
    ],
)
def test_durations(text: str, value: float | None) -> None:
    assert seconds(text) == (value if value is None else pytest.approx(value))
