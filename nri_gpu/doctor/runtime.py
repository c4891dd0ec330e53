"""The container runtime: which one runs, and whether its NRI lets us in."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.doctor.finding import DoctorFinding, Examined, Level, error, listed, ok, unseen, warning
from nri_gpu.doctor.processes import NOT_THE_HOST, ON_THE_HOST, RunningProgram, running
from nri_gpu.doctor.runtime_settings import (
    CONTAINERD_CONFIG,
    CRIO_CONFIG,
    NRI,
    ContainerdSettings,
    NriSettings,
    containerd_settings,
    crio_settings,
    seconds,
)
from nri_gpu.doctor.sockets import SocketState, socket_state
from nri_gpu.system.storage import why_untrusted

VERSION_LIMIT_S: Final = 0.5
SLOW_S: Final = 1.0  # a request timeout below this leaves too little for a busy node
_VERSION: Final = re.compile(r"\bv?([0-9]+)\.([0-9]+)\.([0-9]+)")
_NRI_BY_DEFAULT: Final = {"containerd": (2,), "crio": (1, 30)}
_NRI_AT_ALL: Final = {"containerd": (1, 7), "crio": (1, 26)}
_VALIDATES: Final = {"containerd": (2, 2), "crio": (1, 34)}
_CRI: Final = frozenset({"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"})
_CONNECTIONS: Final = ("disable_connections = false", "nri_disable_connections = false")


class ContainerRuntime(Struct, frozen=True, kw_only=True):
    """The runtime that this node has. name: `containerd` or `crio`. version: empty where unknown.

    process: None where none is seen to run. config: its main file. containerd, crio_handler: the settings of each.
    """

    name: str
    process: RunningProgram | None
    version: str
    config: str
    nri: NriSettings
    files: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    containerd: ContainerdSettings | None = None
    crio_handler: str = ""

    @property
    def default_handler(self) -> str:
        """The OCI runtime of pods that ask for none."""
        return self.containerd.cri.containerd.default_runtime_name if self.containerd else self.crio_handler

    @property
    def release(self) -> tuple[int, ...] | None:
        return release_of(self.version)

    @property
    def nri_enabled(self) -> bool | None:
        """None where neither file nor version tells."""
        if self.nri.disable is not None:
            return not self.nri.disable
        if self.release:
            return self.release >= _NRI_BY_DEFAULT[self.name]
        return True if self.containerd and self.containerd.version > 2 else None


def release_of(version: str) -> tuple[int, ...] | None:
    """(2, 1, 9) of `2.1.9`, `v2.1.9~ds1` and so on."""
    match = _VERSION.search(version)
    return tuple(map(int, match.groups())) if match else None


def container_runtime(seen: Examined) -> ContainerRuntime | None:
    """The runtime whose NRI socket is ours, else the first that runs, else one that has a configuration."""
    found = [_described(seen, process.name, process) for process in running(seen.at("/proc"), {"containerd", "crio"})]
    if not found:
        names = (("containerd", CONTAINERD_CONFIG), ("crio", CRIO_CONFIG))
        found = [_described(seen, name, None) for name, path in names if _exists(seen.at(path))]
    ours = (each for each in found if _same(seen, each.nri.socket_path))
    return next(ours, found[0] if found else None)


def _described(seen: Examined, name: str, process: RunningProgram | None) -> ContainerRuntime:
    version = _version(seen, name, process)
    config = process.option("-c", "--config", "-config") if process else ""
    if name == "crio":
        faults: list[str] = []
        config = config or CRIO_CONFIG
        nri, handler, files = crio_settings(seen.root, config, faults)
        return ContainerRuntime(
            name=name,
            process=process,
            version=version,
            config=config,
            nri=nri,
            files=files,
            faults=tuple(faults),
            crio_handler=handler,
        )
    config = config or CONTAINERD_CONFIG
    settings = containerd_settings(seen.root, config, release_of(version))
    if process and (folder := process.option("--root")):
        settings = replace(settings, root=folder)
    return ContainerRuntime(
        name=name,
        process=process,
        version=version,
        config=config,
        nri=settings.nri,
        files=settings.files,
        faults=settings.faults,
        containerd=settings,
    )


def _version(seen: Examined, name: str, process: RunningProgram | None) -> str:
    """As the daemon was told by the runtime, else as the program says."""
    if seen.status and seen.status.runtime.version and name in (seen.status.runtime.name, "crio"):
        return seen.status.runtime.version
    program = seen.at(f"/proc/{process.pid}/exe") if process else seen.at(f"/usr/bin/{name}")
    try:
        if why_untrusted(program.stat()):
            return ""
        done = subprocess.run(
            [program, "--version"], env={}, capture_output=True, timeout=VERSION_LIMIT_S, check=False, text=True
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    match = _VERSION.search(done.stdout)
    return match[0].removeprefix("v") if match else ""


def runtime_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[DoctorFinding]:
    """Which runtime, its NRI, its timeouts and its validator."""
    if runtime is None:
        yield from _no_runtime(seen)
        return
    yield _which(runtime)
    for fault in runtime.faults:
        level = unseen if "by this user" in fault else error
        yield level("runtime configuration", fault, f"containerd -c {runtime.config} config dump")
    connected = seen.status is not None and seen.status.runtime.ready
    yield from (_later(each) if connected else each for each in _nri(seen, runtime))
    yield from _timeouts(runtime)
    yield from _validator(seen, runtime)


def _later(finding: DoctorFinding) -> DoctorFinding:
    """The same where nri-gpu is connected all the same: the runtime has not read its files since they changed."""
    if finding.level is not Level.ERROR:
        return finding
    meaning = f"nri-gpu is connected, but after the runtime's next start: {finding.meaning}"
    return replace(finding, level=Level.WARNING, meaning=meaning)


def _no_runtime(seen: Examined) -> Iterator[DoctorFinding]:
    subject = "container runtime"
    if socket_state(seen.at(seen.policy.plugin.socket)) in (SocketState.LIVE, SocketState.CLOSED):
        yield unseen(
            subject,
            f"a runtime has the NRI socket open, but {NOT_THE_HOST}: which one, and how it is configured, is not known",
            ON_THE_HOST,
        )
        return
    yield error(
        subject,
        "neither containerd nor CRI-O runs here, and neither is configured: nri-gpu has nobody to serve",
        "systemctl enable --now containerd",
    )


def _which(runtime: ContainerRuntime) -> DoctorFinding:
    subject = "container runtime"
    name = "CRI-O" if runtime.name == "crio" else runtime.name
    shown = f"{name} {runtime.version or '(version not known)'}"
    if runtime.process is None:
        service = runtime.name
        return error(subject, f"{shown} is configured and does not run", f"systemctl enable --now {service}")
    if runtime.release and runtime.release < _NRI_AT_ALL[runtime.name]:
        least = ".".join(map(str, _NRI_AT_ALL[runtime.name]))
        return error(subject, f"{shown} has no NRI: nri-gpu needs {least} or newer", f"apt install {runtime.name}")
    files = listed(runtime.files) or f"no file at {runtime.config}: built-in defaults"
    return ok(subject, f"{shown}, pid {runtime.process.pid}, configured by {files}")


def _nri(seen: Examined, runtime: ContainerRuntime) -> Iterator[DoctorFinding]:
    """Whether NRI is on, open to connections, and listens where we connect."""
    subject, socket = "NRI", seen.policy.plugin.socket
    disabled = runtime.containerd.disabled_plugins if runtime.containerd else ()
    if _CRI.intersection(disabled):
        yield error(
            "CRI",
            f"{runtime.config} disables containerd's CRI plugin (disabled_plugins, as Docker's package does): there is "
            "no NRI without it, and no kubelet can use this containerd",
            *_edit(runtime, "", 'disabled_plugins = []    # without "cri"'),
        )
    if f"{NRI}" in disabled or runtime.nri_enabled is False:
        why = (
            "in disabled_plugins"
            if NRI in disabled
            else "off"
            + (
                ""
                if runtime.nri.disable
                else f", as by default before {'.'.join(map(str, _NRI_BY_DEFAULT[runtime.name]))}"
            )
        )
        yield error(
            subject,
            f"NRI is {why}: nri-gpu cannot connect, and containers start without GPUs",
            *_edit(runtime, "nri", "disable = false", "enable_nri = true"),
        )
        return
    if runtime.nri.disable_connections:
        yield error(
            subject,
            "NRI accepts no connections (disable_connections): only plugins that the runtime starts itself can serve",
            *_edit(runtime, "nri", *_CONNECTIONS),
        )
    if not _same(seen, runtime.nri.socket_path):
        yield error(
            subject,
            f"the runtime's NRI socket is {runtime.nri.socket_path}, and nri-gpu connects to {socket}",
            "# in /etc/nri-gpu/policy.toml, below [plugin]:",
            f'socket = "{runtime.nri.socket_path}"',
            "systemctl restart nri-gpu nri-gpu-guard",
        )
        return
    yield from _nri_socket(seen, runtime, subject, socket)


def _nri_socket(seen: Examined, runtime: ContainerRuntime, subject: str, socket: str) -> Iterator[DoctorFinding]:
    state = socket_state(seen.at(socket))
    if state is SocketState.LIVE:
        yield ok(subject, f"on, and {socket} is open")
    elif state is SocketState.CLOSED:
        yield unseen(subject, f"whether anybody listens at {socket} can be seen by root only", "sudo nri-gpu doctor")
    elif runtime.process is None:
        yield unseen(subject, f"{socket} is {state}: the runtime makes it when it starts")
    else:
        yield error(
            subject,
            f"{socket} is {state}, although {runtime.name} runs: it was not restarted since NRI was switched on, or "
            "another process removed the file; nri-gpu cannot connect, and containers start without GPUs",
            f"systemctl restart {_service(runtime)}    # containers go on running",
        )


def _timeouts(runtime: ContainerRuntime) -> Iterator[DoctorFinding]:
    subject = "NRI timeouts"
    request, registration = runtime.nri.plugin_request_timeout, runtime.nri.plugin_registration_timeout
    request_s = seconds(request)
    if request_s is None or seconds(registration) is None:
        yield error(
            subject,
            f"a timeout is no duration: plugin_request_timeout {request!r}, plugin_registration_timeout "
            f"{registration!r}",
            *_edit(runtime, "nri", 'plugin_request_timeout = "2s"', 'nri_plugin_request_timeout = "2s"'),
        )
    elif request_s < SLOW_S:
        yield warning(
            subject,
            f"the runtime waits only {request} for an answer: after that it drops nri-gpu and creates containers "
            "without it; a busy node can take longer",
            *_edit(runtime, "nri", 'plugin_request_timeout = "2s"', 'nri_plugin_request_timeout = "2s"'),
        )
    else:
        yield ok(subject, f"{request} for a request, {registration} for a registration")


def _validator(seen: Examined, runtime: ContainerRuntime) -> Iterator[DoctorFinding]:
    """Whether required plugins mean what they say."""
    subject, validator = "required plugins", runtime.nri.default_validator
    required = validator.required_plugins
    ours = (seen.policy.plugin, seen.policy.guard)
    known = {name for each in ours for name in (each.name, f"{each.index}-{each.name}")}
    if not required:
        state = "on, and requires" if validator.enable else "off: it requires"
        yield ok(subject, f"the runtime's validator is {state} no plugin; while nri-gpu is away its guard refuses")
    elif not validator.enable:
        yield warning(
            subject,
            f"{listed(required)} {'is' if len(required) == 1 else 'are'} required, but the validator is off, so "
            "nothing is",
            *_edit(runtime, "nri.default_validator", "enable = true", "nri_enable_default_validator = true"),
        )
    elif runtime.release and runtime.release < _VALIDATES[runtime.name]:
        least = ".".join(map(str, _VALIDATES[runtime.name]))
        yield warning(subject, f"this {runtime.name} does not know required plugins: it needs {least}", "upgrade it")
    elif strangers := [name for name in required if "nri-gpu" in name and name not in known]:
        yield error(
            subject,
            f"{listed(strangers)} is required and no plugin of the policy is called that, so no container can be "
            "created on this node",
            *_edit(
                runtime,
                "nri.default_validator",
                f'required_plugins = ["{ours[0].name}", "{ours[1].name}"]',
                f'nri_validator_required_plugins = ["{ours[0].name}", "{ours[1].name}"]',
            ),
        )
    else:
        yield ok(subject, f"no container is created without {listed(required)}")


def _edit(runtime: ContainerRuntime, table: str, line: str, crio_line: str = "") -> tuple[str, ...]:
    """What to write into the runtime's file, and the restart that it takes."""
    service = _service(runtime)
    line = crio_line or line if runtime.name == "crio" else line
    name = f"[crio.{table}]" if runtime.name == "crio" else f'[plugins."{NRI}"{table.removeprefix("nri")}]'
    where = f"# in {_file(runtime)}, below {name}:" if table else f"# in {_file(runtime)}:"
    new = (f"containerd config default > {runtime.config}",) if runtime.containerd and not runtime.files else ()
    return (*new, where, line, f"systemctl restart {service}    # containers go on running")


def _service(runtime: ContainerRuntime) -> str:
    """The unit that runs it: k3s and RKE2 bring their own containerd."""
    return next((name for name in ("k3s", "rke2") if f"/{name}/" in runtime.config), runtime.name)


def _file(runtime: ContainerRuntime) -> str:
    """The file to edit; k3s and RKE2 make theirs from a template."""
    if _service(runtime) == runtime.name:
        return runtime.config
    newest = runtime.containerd is not None and runtime.containerd.version > 2
    name = f"{'config-v3' if newest else 'config'}.toml.tmpl"
    return f'{Path(runtime.config).with_name(name)}, behind {{{{ template "base" . }}}}'


def _same(seen: Examined, path: str) -> bool:
    """Whether a path leads to the NRI socket that the policy names; /var/run is mostly a link."""
    return os.path.realpath(seen.at(path)) == os.path.realpath(seen.at(seen.policy.plugin.socket)) or _plain(
        path
    ) == _plain(seen.policy.plugin.socket)


def _plain(path: str) -> str:
    return path.replace("/var/run/", "/run/", 1)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True
