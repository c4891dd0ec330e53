"""Our units: each line says why, systemd has nothing against them, and they agree with the verbs that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from nri_gpu.cdi.spec_file import STANDARD, SUFFIXES
from nri_gpu.cli.cdi_command import DEFAULT_STAGE
from nri_gpu.cli.main import VERBS
from nri_gpu.daemon.app import DRAIN_S
from nri_gpu.doctor.distributions import DISTRIBUTIONS
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.mps import DEFAULT_MPS_DIR
from nri_gpu.domain.names import DEFAULT_OBSERVE, DEFAULT_STATE
from nri_gpu.driver.search import CUDA, SONAMES
from nri_gpu.driver.table import MACHINES
from nri_gpu.enable.features import FEATURES, INSTALLED_AS
from nri_gpu.host.kernel_view import NODE_FOLDERS
from nri_gpu.injection.device_nodes import MODESET, NVIDIACTL, UVM
from nri_gpu.plugin import guard_process
from nri_gpu.plugin.guard_status import DEFAULT_RUN_DIR
from nri_gpu.plugin.supervisor import WAIT_MAX_S
from nri_gpu.plugin.transport import LIMITS
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import DEFAULT_PATH, UNIT_FOLDER
from nri_gpu.system.succession import TAKES_OVER_S
from tests.support import systemd_analyze
from tests.support.unit_file import OURS, Line, Unit

FOLDER, PROJECT = OURS.parent, OURS.parents[1]
GUARD_FILE, CDI_FILE, CDI_PATH_FILE, DRA_FILE, OBSERVE_FILE = (
    FOLDER / f"nri-gpu-{name}"
    for name in ("guard.service", "cdi.service", "cdi.path", "dra.service", "observe.service")
)
KUBELET_FILE, MPS_FILE, STRAY_FILE, SNAPS_FILE = (
    FOLDER / "nri-gpu.service.d" / name for name in ("kubelet.conf", "mps.conf", "stray.conf", "snaps.conf")
)
MPS_MOUNT = FOLDER / "nri-gpu-mps-clients.mount"
PREPARE_FILE = FOLDER / "nri-gpu-prepare.service"
FILES = (
    OURS,
    GUARD_FILE,
    CDI_FILE,
    CDI_PATH_FILE,
    KUBELET_FILE,
    MPS_FILE,
    STRAY_FILE,
    PREPARE_FILE,
    DRA_FILE,
    SNAPS_FILE,
    OBSERVE_FILE,
)
DAEMON, GUARD, CDI, CDI_PATH, KUBELET, MPS, STRAY, PREPARE, DRA, SNAPS, OBSERVE = UNITS = [
    Unit.read(file) for file in FILES
]
# Lines whose reason is the line before them, or plain to see.
EXPLAINED_ABOVE: Final = {"RestartSec", "StateDirectoryMode", "WantedBy", "Description", "Documentation"}
LINES = [line for unit in UNITS for line in unit.lines]
REQUIREMENTS: Final = {"Requires", "BindsTo", "PartOf", "Requisite"}


# --- every unit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.key}={line.value}"[:40])
def test_every_line_says_why(line: Line) -> None:
    assert line.why or line.key in EXPLAINED_ABOVE


@pytest.mark.parametrize(
    "file",
    [*FOLDER.glob("nri-gpu*.*ice"), *FOLDER.glob("*.path"), *FOLDER.glob("*.mount"), *FOLDER.glob("*.d/*.conf")],
    ids=lambda file: file.name,
)
def test_systemd_has_nothing_against_it(file: Path) -> None:
    assert systemd_analyze.faults(file) == []


@pytest.mark.parametrize(
    ("unit", "verb"),
    [(DAEMON, "run"), (GUARD, "guard"), (CDI, "cdi"), (PREPARE, "prepare"), (DRA, "dra"), (OBSERVE, "observe")],
)
def test_it_starts_a_verb(unit: Unit, verb: str) -> None:
    program, started, *_ = unit.value("ExecStart").split()
    assert (program, started) == (DAEMON.value("ExecStart").split()[0], verb)
    assert verb in {each.name for each in VERBS}


@pytest.mark.parametrize(("unit", "stops_s"), [(DAEMON, DRAIN_S + TAKES_OVER_S), (GUARD, guard_process.DRAIN_S)])
def test_it_waits_for_a_runtime_for_ever_and_starts_again(unit: Unit, stops_s: float) -> None:
    assert (unit.value("Type"), unit.value("TimeoutStartSec")) == ("notify", "infinity")
    assert (unit.value("Restart"), unit.value("StartLimitIntervalSec")) == ("always", "0")
    assert float(unit.value("RestartSec").removesuffix("ms")) / 1000 <= WAIT_MAX_S
    assert unit.words("RestartPreventExitStatus") == [str(int(Exit.USAGE))]
    assert int(unit.value("TimeoutStopSec")) > stops_s
    # A requirement would stop it with the runtime, each time that is restarted.
    assert not [key for key in REQUIREMENTS if unit.values(key)]


# --- the daemon's -----------------------------------------------------------------------------------------------------

BREAKS_THE_JOB = {
    "NVML needs the driver's nodes": ("PrivateDevices", "yes"),
    "majors are in /proc/devices": ("ProcSubset", "pid"),
    "the NRI socket is root's": ("DynamicUser", "yes"),
    "hosts with user namespaces switched off could not start it": ("PrivateUsers", "yes"),
    "group root would see every process": ("ProtectProc", "invisible"),
    "containers, whose cgroups say when a GPU is free, have more capabilities": ("ProtectProc", "ptraceable"),
}


@pytest.mark.parametrize(("key", "value"), BREAKS_THE_JOB.values(), ids=BREAKS_THE_JOB)
def test_what_would_break_the_daemon(key: str, value: str) -> None:
    assert DAEMON.value(key) != value
    assert not DAEMON.value("User")


def test_the_daemons_folders() -> None:
    driver, plugin = Policy.default().driver, Policy.default().plugin
    assert Path("/run") / DAEMON.value("RuntimeDirectory") == DEFAULT_STATE
    assert (DAEMON.value("RuntimeDirectoryMode"), DAEMON.value("StateDirectoryMode")) == ("0700", "0755")
    assert DAEMON.value("RuntimeDirectoryPreserve") == "yes"  # the key of signed grants outlives a stop
    assert Path(driver.stage_dir) in {Path("/var/lib") / name for name in DAEMON.words("StateDirectory")}
    # $STATE_DIRECTORY begins with it; `check` and `doctor` know it by this name.
    assert Path("/var/lib") / DAEMON.words("StateDirectory")[0] == UNIT_FOLDER
    hidden = [Path(word.removeprefix("-")) for word in DAEMON.words("InaccessiblePaths")]
    program = Path(DAEMON.value("ExecStart").split()[0])
    for needed in (DEFAULT_STATE, Path(driver.stage_dir), Path(plugin.socket), program):
        assert not set(hidden) & {needed, *needed.parents}


def test_a_kubelet_waits_for_the_daemon_but_not_for_ever() -> None:
    assert "kubelet.service" in DAEMON.words("Before")
    assert "containerd.service" in DAEMON.words("After")
    assert LIMITS.register_s < int(DAEMON.value("JobRunningTimeoutSec")) < 120


# Each runs containerd, for which the daemon and its guard wait.
RUNTIMES: Final = {
    "containerd",
    "crio",
    "snap.k8s.containerd",
    *(unit for each in DISTRIBUTIONS for unit in each.units),
}


@pytest.mark.parametrize("file", [OURS, GUARD_FILE, *FOLDER.glob("*.d/*.conf")], ids=lambda file: file.name)
def test_no_unit_that_runs_the_runtime_waits_for_us(file: Path) -> None:
    """It would be held back for JobRunningTimeoutSec= at each boot."""
    assert {f"{unit}.service" for unit in RUNTIMES}.isdisjoint(Unit.read(file).words("Before"))


def test_the_drop_in_for_snaps_orders_their_containerds_and_kubelets() -> None:
    microk8s = next(each for each in DISTRIBUTIONS if each.title == "MicroK8s")
    assert {f"{unit}.service" for unit in microk8s.units} < set(SNAPS.words("After"))
    assert f"{microk8s.kubelet}.service" in SNAPS.words("Before")
    page = (PROJECT / "docs" / "install.md").read_text()
    for unit in (OURS, GUARD_FILE):
        assert f"{SNAPS_FILE.relative_to(PROJECT)} /etc/systemd/system/{unit.name}.d/{SNAPS_FILE.name}" in page


def test_every_kind_of_nvidia_node_of_ours_is_allowed() -> None:
    assert DAEMON.value("DevicePolicy") == "closed"
    assert {value.split()[0] for value in DAEMON.values("DeviceAllow")} == {"char-195", "char-nvidia-caps"}


def test_the_install_pages_have_the_units_and_every_folder() -> None:
    """Whoever follows the pages to remove nri-gpu leaves no trace; the daemon's unit brings the guard's."""
    page = "".join((PROJECT / "docs" / name).read_text() for name in ("install.md", "upgrade.md"))
    for key, prefix in (("ExecStart", ""), ("RuntimeDirectory", "/run/"), ("StateDirectory", "/var/lib/")):
        assert prefix + DAEMON.words(key)[0] in page
    assert DAEMON.words("Also") == [GUARD_FILE.name]
    assert page.count(f"install -m 0644 systemd/{OURS.name} systemd/{GUARD_FILE.name} /etc/systemd/system/") == 2
    assert "systemctl enable --now nri-gpu nri-gpu-guard" in page


# --- the guard's ------------------------------------------------------------------------------------------------------

# What the daemon has and the guard has not, because it has no driver, no children that outlive it, no state of its own.
DAEMONS_ALONE: Final = {"DeviceAllow", "StateDirectory", "StateDirectoryMode", "RuntimeDirectoryPreserve", "KillMode"}


def test_the_guards_unit_is_no_looser_than_the_daemons() -> None:
    assert Path("/run") / GUARD.value("RuntimeDirectory") == DEFAULT_RUN_DIR
    ours = {line.key for line in GUARD.lines}
    assert {line.key for line in DAEMON.lines if line.section == "Service"} - ours == {*DAEMONS_ALONE, "ExecReload"}
    for key in ("SystemCallFilter", "CapabilityBoundingSet", "ProtectSystem", "UMask", "RestrictAddressFamilies"):
        assert GUARD.values(key) == DAEMON.values(key)
    assert GUARD.on("PrivateDevices")
    assert not GUARD.values("Wants")


# --- the DRA driver's ------------------------------------------------------------------------------------------------


def test_the_dra_drivers_unit_is_the_guards_with_a_network_and_three_folders() -> None:
    wanted = {line.key: GUARD.values(line.key) for line in GUARD.lines if line.section == "Service"}
    of_its_own = {"ExecStart", "RuntimeDirectory", "RuntimeDirectoryMode", "InaccessiblePaths", "OOMScoreAdjust"}
    of_its_own |= {"OOMPolicy", "PrivateNetwork", "IPAddressDeny", "RestrictAddressFamilies"}
    assert {key: DRA.values(key) for key in wanted.keys() - of_its_own} == {
        key: values for key, values in wanted.items() if key not in of_its_own
    }
    assert DRA.words("RestrictAddressFamilies") == ["AF_UNIX", "AF_INET", "AF_INET6"]
    policy = Policy.default()
    writable = {policy.dra.dir, policy.kubelet.registry_dir, policy.kubelet.cdi_dir.removeprefix("/var")}
    assert set(DRA.words("ReadWritePaths")) == {f"-{path}" for path in writable}  # tests/packages/test_systemd.py
    made = {word for line in DRA.values("ExecStartPre") for word in line.split() if word.startswith("/")}
    assert made == writable
    hidden = {Path(word.removeprefix("-")) for word in DRA.words("InaccessiblePaths")}
    needed = {DEFAULT_STATE, *map(Path, (*writable, "/etc/kubernetes/kubelet.conf", "/var/lib/kubelet/pki"))}
    assert hidden.isdisjoint(needed.union(*(path.parents for path in needed)))


def test_the_dra_drivers_unit_outlives_the_daemons() -> None:
    """The kubelet withdraws the slices of a driver that is gone for half a minute."""
    assert "nri-gpu.service" in DRA.words("After")
    assert not [key for key in REQUIREMENTS if DRA.values(key)]
    assert DRA.value("StartLimitIntervalSec") == "0"


def test_only_the_daemon_sees_other_processes() -> None:
    assert {each.value("ProtectProc") for each in (GUARD, CDI, DRA, OBSERVE)} == {"ptraceable"}


# --- those of the CDI specification -----------------------------------------------------------------------------------

# What confines the daemon has to confine this too. Not the lines that are about living on, or about other folders.
SANDBOX: Final = {
    *("ProtectSystem", "UMask", "ProtectHome", "PrivateTmp", "PrivateMounts", "DevicePolicy", "DeviceAllow"),
    *("CapabilityBoundingSet", "AmbientCapabilities", "NoNewPrivileges", "RestrictSUIDSGID", "RestrictNamespaces"),
    *("RestrictRealtime", "LockPersonality", "SystemCallArchitectures", "SystemCallFilter", "SystemCallErrorNumber"),
    *("MemoryDenyWriteExecute", "ProtectKernelModules", "ProtectKernelTunables", "ProtectKernelLogs"),
    *("ProtectControlGroups", "ProtectClock", "ProtectHostname", "PrivateIPC", "KeyringMode"),
    *("PrivateNetwork", "IPAddressDeny", "LimitCORE", "KillMode", "StateDirectoryMode"),
}


def test_the_specification_is_written_where_runtimes_look() -> None:
    _, verb, action, option, output = CDI.value("ExecStart").split()
    [found] = [each for each in VERBS if each.name == verb]
    assert any(action in str(settings.get("choices")) for _, settings in found.options)
    assert any(option in flags for flags, _ in found.options)
    # Where systemd is, /var/run is a link to /run.
    assert Path("/var", *Path(output).parent.parts[1:]) in STANDARD
    assert Path(output).suffix in SUFFIXES
    assert Path("/run", CDI.value("RuntimeDirectory")) == Path(output).parent
    assert (CDI.value("RuntimeDirectoryMode"), CDI.value("RuntimeDirectoryPreserve")) == ("0755", "yes")
    assert DEFAULT_STAGE in {Path("/var/lib", name) for name in CDI.words("StateDirectory")}
    assert PREPARE.words("SuccessExitStatus") == [str(int(Exit.UNAVAILABLE))]  # on a machine without GPUs
    assert CDI.words("SuccessExitStatus") == [str(int(each)) for each in (Exit.UNAVAILABLE, Exit.FINDING)]
    assert PREPARE_FILE.name in CDI.words("After")
    assert {"docker.service", "snap.docker.dockerd.service"} < set(CDI.words("Before"))


def test_the_path_unit_starts_the_service() -> None:
    assert CDI_PATH.value("Unit") == CDI_FILE.name
    assert str(DEFAULT_PATH) in CDI_PATH.values("PathChanged")
    assert str(Path(CDI.value("ExecStart").split()[-1]).parent) in CDI_PATH.values("PathChanged")
    # It never ends, so a Condition or a `PathExists=` would start the service over and over.
    assert {line.key for line in CDI_PATH.lines if line.section == "Path"} == {"PathChanged", "Unit"}


def test_the_path_unit_watches_what_the_daemon_watches() -> None:
    """As far as systemd can: no file in /proc and /sys, and not /dev itself, where any device comes and goes."""
    watched = set(CDI_PATH.values("PathChanged"))
    folders = {f"/dev/{folder}" for folder in NODE_FOLDERS if folder}
    libraries = {
        f"/{folder}/{SONAMES[CUDA]}"
        for machine in MACHINES.values()
        for folder in machine.folders
        if folder.startswith("usr/") and "nvidia" not in folder  # the others are links to these, or alternatives
    }
    assert watched >= folders | libraries | {NVIDIACTL, UVM, MODESET}
    assert "/dev" not in watched


def test_the_specifications_unit_is_confined_like_the_daemon() -> None:
    assert {key: CDI.values(key) for key in SANDBOX} == {key: DAEMON.values(key) for key in SANDBOX}


def test_systemd_has_nothing_against_path_and_service_together(tmp_path: Path) -> None:
    for unit in (CDI_FILE, CDI_PATH_FILE):
        (tmp_path / unit.name).write_text(systemd_analyze.runnable(unit.read_text()))
    done = systemd_analyze.run("verify", "--man=no", *map(str, tmp_path.iterdir()))
    assert (done.returncode, "nri-gpu-cdi" in done.stderr) == (0, False)


# --- the drop-ins for the kubelet and for MPS -------------------------------------------------------------------------


def test_the_kubelets_folders_are_open_and_the_rest_stays_hidden() -> None:
    settings = Policy.default().kubelet
    writable, cdi = (Path(path.removeprefix("-")) for path in KUBELET.words("ReadWritePaths"))
    assert {Path(settings.dir).parent, Path(settings.registry_dir).parent} == {writable}
    first, hidden = KUBELET.values("InaccessiblePaths")
    assert first == ""  # lists of systemd's add up until they are emptied
    kept = set(DAEMON.words("InaccessiblePaths")) - {f"-{writable}"}
    assert set(hidden.split()) == kept | {f"-{writable}/pods", f"-{writable}/pki"}
    assert f"/var{cdi}" == settings.cdi_dir
    assert [line.split()[-1] for line in KUBELET.values("ExecStartPre")] == [str(writable), str(cdi)]
    assert KUBELET.words("RequiresMountsFor") == [str(writable)]
    assert not {"Before", "After", "Requires", "Wants"} & {line.key for line in KUBELET.lines}


def test_the_documentation_enables_each_feature() -> None:
    pages = "".join(page.read_text() for page in (PROJECT / "docs").glob("*.md"))
    assert [name for name in FEATURES if f"nri-gpu enable {name} --now" not in pages] == []
    assert {each.drop_in for each in FEATURES.values()} >= {KUBELET_FILE.name}


def test_mps_daemons_outlive_us_and_may_mount_and_change_users() -> None:
    assert MPS.value("KillMode") == "process"
    assert {"CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"} <= set(MPS.words("CapabilityBoundingSet"))
    assert MPS.value("RestrictNamespaces") == "mnt"


def test_what_mps_clients_write_is_limited_in_bytes_and_in_files() -> None:
    unit = Unit.read(MPS_MOUNT)
    assert (unit.value("Where"), unit.value("Type")) == (DEFAULT_MPS_DIR, "tmpfs")
    options = dict(option.partition("=")[::2] for option in unit.value("Options").split(","))
    assert options.keys() == {"size", "nr_inodes", "mode", "nosuid", "nodev", "noexec"}
    assert (options["size"], options["mode"]) == ("10%%", "0700")
    name = DEFAULT_MPS_DIR.strip("/").replace("-", "\\x2d").replace("/", "-") + ".mount"
    assert MPS.value("Wants") == MPS.value("After") == INSTALLED_AS[MPS_MOUNT.name] == name


# --- the drop-in for stray use ----------------------------------------------------------------------------------------


def test_stray_use_takes_two_capabilities_and_a_look_at_the_kubelets_socket() -> None:
    """That they suffice: tests/system/test_process_scan.py."""
    assert STRAY.values("CapabilityBoundingSet") == ["CAP_SYS_PTRACE CAP_DAC_READ_SEARCH"]
    assert STRAY.values("InaccessiblePaths") == KUBELET.values("InaccessiblePaths")
    socket = Path(Policy.default().kubelet.podresources)
    hidden = {Path(word.removeprefix("-")) for word in STRAY.words("InaccessiblePaths")}
    assert hidden.isdisjoint({socket, *socket.parents})


# --- the observer's ---------------------------------------------------------------------------------------------------

# Its own of what confines the daemon: it holds no file, and one call that its capabilities need.
OBSERVERS_OWN: Final = {"CapabilityBoundingSet", "SystemCallFilter", "StateDirectoryMode"}


def test_the_observers_unit_is_the_daemons_with_the_rights_to_look() -> None:
    assert {key: OBSERVE.values(key) for key in SANDBOX - OBSERVERS_OWN} == {
        key: DAEMON.values(key) for key in SANDBOX - OBSERVERS_OWN
    }
    assert OBSERVE.values("SystemCallFilter") == [*DAEMON.values("SystemCallFilter"), "capset"]
    assert OBSERVE.values("CapabilityBoundingSet") == STRAY.values("CapabilityBoundingSet")
    assert OBSERVE.words("InaccessiblePaths") == STRAY.words("InaccessiblePaths")


def test_the_observers_unit_writes_its_own_folder_alone() -> None:
    assert Path("/run") / OBSERVE.value("RuntimeDirectory") == DEFAULT_OBSERVE
    assert OBSERVE.value("RuntimeDirectoryMode") == "0700"
    assert not {"StateDirectory", "ReadWritePaths", "RuntimeDirectoryPreserve"} & {line.key for line in OBSERVE.lines}


def test_the_observer_holds_nobody_up_and_gives_way() -> None:
    assert not [key for key in (*REQUIREMENTS, "Before", "Conflicts", "Wants") if OBSERVE.values(key)]
    assert OBSERVE.words("After").count(OURS.name) == 1
    assert int(OBSERVE.value("OOMScoreAdjust")) > 0 > int(DAEMON.value("OOMScoreAdjust"))
    assert OBSERVE.words("RestartPreventExitStatus") == [str(int(Exit.USAGE))]
    assert OBSERVE.words("WantedBy") == ["multi-user.target"]
