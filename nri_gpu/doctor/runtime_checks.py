"""The checks of the runtime's NRI: whether it lets nri-gpu in, and what it then does for nri-gpu."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Final

from msgspec.structs import replace

from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.go_toml import seconds
from nri_gpu.doctor.programs import NOT_THE_HOST, ON_THE_HOST
from nri_gpu.doctor.runtime_settings import NRI, TEXT_MAX, NriSettings
from nri_gpu.doctor.runtimes import NRI_BY_DEFAULT, ContainerRuntime, in_path, same_socket
from nri_gpu.domain.finding import Finding, Level, error, ok, unseen, warning
from nri_gpu.domain.text import listed
from nri_gpu.system.sockets import SocketState, socket_state
from nri_gpu.system.storage import text_of

SLOW_S: Final = 1.0  # a request timeout below this leaves too little for a busy node
_NRI_AT_ALL: Final = {"containerd": (1, 7), "crio": (1, 26)}
_VALIDATES: Final = {"containerd": (2, 2), "crio": (1, 34)}
# The lines of containerd that restored checkpoints, each with its first release that does only where
# `enable_experimental_restore_via_create` is set (internal/cri/config/config.go).
_RESTORES_BEFORE: Final[Mapping[tuple[int, ...], tuple[int, ...]]] = {
    (2, 1): (2, 1, 10),
    (2, 2): (2, 2, 7),
    (2, 3): (2, 3, 4),
}
_APART: Final = (
    "# give the NRI socket to the runtime that has your pods: in the other one's NRI settings write `disable = true`,",
    "# restart that one first, and then the one with your pods",
)
_REQUIRES: Final = "required plugins"
_VALIDATOR: Final = "nri.default_validator"
_CONNECTIONS: Final = ("disable_connections = false", "nri_disable_connections = false")
_REQUEST: Final = ('plugin_request_timeout = "2s"', 'nri_plugin_request_timeout = "2s"')


def runtime_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    """Check the runtime, its NRI, its timeouts and its validator."""
    if runtime is None:
        yield from _no_runtime(seen)
        return
    yield _which(runtime)
    yield from _beside(seen, runtime)
    if not runtime.certain:
        return
    if runtime.dockers:
        yield error(
            "CRI",
            "Docker started this containerd for its own use, without CRI: no NRI plugin serves its containers",
            "# give them GPUs by a CDI specification (docs/quickstart/docker.md):",
            "systemctl enable --now nri-gpu-cdi.path nri-gpu-cdi.service",
        )
        return
    if _has_none(runtime):
        return
    yield from _faults(runtime)
    connected = seen.status is not None and seen.status.runtime.ready
    yield from (_later(each) if connected else each for each in _nri(seen, runtime))
    yield from _timeouts(runtime)
    yield from _checkpoints(seen, runtime)
    yield from _validator(seen, runtime)


def _faults(runtime: ContainerRuntime) -> Iterator[Finding]:
    """Report what keeps the runtime from starting with its files, though it may run with what it read before."""
    subject = "runtime configuration"
    shows = f"{runtime.name} -c {runtime.config} {'config dump' if runtime.containerd else 'config'}"
    for fault in runtime.faults:
        where = fault.where if fault.where.startswith("/") else runtime.config
        mend = f"# fix {runtime.place(where)}" if runtime.distribution else shows
        fix = (*filter(None, (fault.fix, mend)), *runtime.lasting([where]))
        if fault.unseen:
            yield unseen(subject, fault.sentence, *(() if fault.fix else ("sudo nri-gpu doctor",)))
        elif runtime.process:
            still = "It runs with the file it read before, and will exit at its next start"
            yield warning(subject, f"{fault.sentence}. {still}", *fix)
        else:
            yield error(subject, fault.sentence, *fix)


def _later(finding: Finding) -> Finding:
    """Downgrade an error to a warning while nri-gpu is connected: it takes effect when the runtime restarts."""
    if finding.level is not Level.ERROR:
        return finding
    meaning = f"nri-gpu is connected for now, but after the runtime's next start: {finding.meaning}"
    return replace(finding, level=Level.WARNING, meaning=meaning)


def _no_runtime(seen: Examined) -> Iterator[Finding]:
    subject = "container runtime"
    if socket_state(seen.at(seen.policy.plugin.socket)) in (SocketState.LIVE, SocketState.CLOSED):
        yield unseen(
            subject,
            f"a runtime has the NRI socket open, but {NOT_THE_HOST}: which one, and how it is configured, is not known",
            ON_THE_HOST,
        )
        yield unseen(_REQUIRES, f"whether the runtime's validator is on: {NOT_THE_HOST}", ON_THE_HOST)
        return
    yield error(
        subject,
        "neither containerd nor CRI-O runs or is configured here: nri-gpu has no runtime to serve",
        "systemctl enable --now containerd",
    )


def _has_none(runtime: ContainerRuntime) -> bool:
    """Return whether the runtime is from before NRI: then what its files say of NRI means nothing."""
    return runtime.release is not None and runtime.release < _NRI_AT_ALL[runtime.name]


def _which(runtime: ContainerRuntime) -> Finding:
    subject = "container runtime"
    if runtime.supervisor and runtime.distribution:
        what = f"{runtime.distribution.title} (pid {runtime.supervisor}) runs, but its containerd does not"
        why = next((f", because {each.sentence}" for each in runtime.faults if not each.unseen), f" ({runtime.config})")
        return error(subject, f"{what}{why}", f"journalctl -u {runtime.service} -e    # says more")
    if runtime.process is None and runtime.ends_at_start:
        fix = f"journalctl -u {runtime.service} -e"
        return error(subject, f"{runtime.title} does not run, and cannot with its configuration: see below", fix)
    if runtime.process is None:
        return error(
            subject, f"{runtime.title} is configured but does not run", f"systemctl enable --now {runtime.service}"
        )
    if _has_none(runtime):
        least = ".".join(map(str, _NRI_AT_ALL[runtime.name]))
        return error(subject, f"{runtime.title} has no NRI: nri-gpu needs {least} or newer", runtime.upgrade)
    return ok(subject, f"{runtime}")


def _beside(seen: Examined, runtime: ContainerRuntime) -> Iterator[Finding]:
    """Check the node's other runtimes, but advise no restart or switch of theirs: it would take the NRI socket."""
    subject, socket = "second runtime", seen.policy.plugin.socket
    for other in runtime.beside:
        apart = () if runtime.ends_at_start or other.ends_at_start else _APART
        if not runtime.certain:
            what = f"{other}, listens at {socket} too, and whose file lies there is not seen"
            yield error(subject, f"{what}: containers of one of the two start without GPUs", *apart)
        elif other.listens:
            what = f"{other}, listened at {socket} until the runtime above took it"
            yield error(subject, f"{what}: its containers start without GPUs", *apart)
        elif other.opens_nri and same_socket(seen, other.nri.socket_path):
            yield warning(subject, f"{other}, takes {socket} from the runtime above when it restarts", *apart)
        else:
            yield ok(subject, f"{other}, does not use {socket}: nri-gpu serves only the runtime above")


def _nri(seen: Examined, runtime: ContainerRuntime) -> Iterator[Finding]:
    """Check whether NRI is on, open to connections, and listens where we connect."""
    subject, socket = "NRI", seen.policy.plugin.socket
    disabled = runtime.containerd.disabled_plugins if runtime.containerd else ()
    if runtime.disabled_cri:
        yield error(
            "CRI",
            "containerd's CRI plugin is disabled (disabled_plugins, as Docker's package does): there is no NRI without "
            "it, and no kubelet can use this containerd",
            *runtime.enable(runtime.disabled_cri),
        )
    if fault := runtime.cri_fault:
        yield error(
            "CRI",
            f"{fault.sentence}. containerd starts without CRI then: no pod starts, and there is no NRI socket",
            *_handler(seen, runtime),
        )
    if NRI in disabled or runtime.nri_enabled is False:
        since = ".".join(map(str, NRI_BY_DEFAULT[runtime.name]))
        by_default = "off" if runtime.nri.disable else f"off, as by default before {since}"
        why = "in disabled_plugins" if NRI in disabled else by_default
        yield error(
            subject,
            f"NRI is {why}: nri-gpu cannot connect, and containers start without GPUs",
            *(runtime.enable([NRI]) if NRI in disabled else _switch_on(seen, runtime)),
        )
        return
    here = socket_state(seen.at(socket))
    if runtime.nri_enabled is None and runtime.process and here not in (SocketState.LIVE, SocketState.CLOSED):
        since = ".".join(map(str, (*NRI_BY_DEFAULT[runtime.name], 0)[:2]))
        where = listed(runtime.files) or runtime.config
        yield error(
            subject,
            f"NRI is not mentioned in {where}, and off by default before {since}; {socket} is {here}: nri-gpu cannot "
            "connect, and containers start without GPUs",
            *_switch_on(seen, runtime),
        )
        return
    if runtime.nri.disable_connections:
        yield error(
            subject,
            "NRI accepts no connections (disable_connections): only plugins that the runtime starts itself can serve",
            *_edit(runtime, "nri", *_CONNECTIONS),
        )
    if not same_socket(seen, runtime.nri.socket_path):
        yield error(
            subject,
            f"the runtime's NRI socket is {runtime.nri.socket_path}, but nri-gpu connects to {socket}",
            "# in /etc/nri-gpu/policy.toml, below [plugin]:",
            f'socket = "{runtime.nri.socket_path}"',
            "systemctl restart nri-gpu nri-gpu-guard",
        )
        return
    yield from _nri_socket(seen, runtime, subject, socket)


def _handler(seen: Examined, runtime: ContainerRuntime) -> Iterator[str]:
    """Yield the lines of a fix that gives CRI a default runtime that there is."""
    settings = runtime.containerd.cri.containerd if runtime.containerd else None
    if settings and settings.default_runtime_name != "runc":
        yield from runtime.default_to_runc(seen)[:-1]
    if settings and settings.runtimes and "runc" not in settings.runtimes and (runtime.release or (2,)) < (2,):
        title = "in a table runtimes.runc below the CRI plugin's [containerd] table"
        yield from runtime.edit("cri.containerd.runtimes", title, 'runtime_type = "io.containerd.runc.v2"')[:-1]
    yield from runtime.restart_with_cri


def _nri_socket(seen: Examined, runtime: ContainerRuntime, subject: str, socket: str) -> Iterator[Finding]:
    state = socket_state(seen.at(socket))
    if state is SocketState.LIVE:
        yield ok(subject, f"on, and {socket} is open")
    elif state is SocketState.CLOSED:
        yield unseen(subject, f"only root can see whether a process listens at {socket}", "sudo nri-gpu doctor")
    elif runtime.process is None or runtime.cri_fault or runtime.disabled_cri:
        yield unseen(subject, f"{socket} is {state}: the runtime makes it when it starts, and its CRI with it")
    else:
        cri = "its CRI plugin did not come up (its log says why), " if runtime.containerd else ""
        yield error(
            subject,
            f"{socket} is {state}, although {runtime.name} runs: NRI was switched on after its start, "
            f"{cri}or another process removed the file; nri-gpu cannot connect, and containers start without GPUs",
            *runtime.restart,
        )


def _timeouts(runtime: ContainerRuntime) -> Iterator[Finding]:
    subject, usual = "NRI timeouts", NriSettings()
    request, registration = (
        set_ if seconds(set_) else default
        for set_, default in (
            (runtime.nri.plugin_request_timeout, usual.plugin_request_timeout),
            (runtime.nri.plugin_registration_timeout, usual.plugin_registration_timeout),
        )
    )
    if (seconds(request) or 0) < SLOW_S:
        number = (
            f" (a number without a unit counts nanoseconds, and some builds of {runtime.name} do not start with it)"
        )
        yield warning(
            subject,
            f"the runtime waits only {request} for an answer{number if request.endswith('ns') else ''}: after that it "
            "drops nri-gpu and creates containers without it; a busy node can take longer",
            *_edit(runtime, "nri", *_REQUEST),
        )
    else:
        yield ok(subject, f"{request} for a request, {registration} for a registration")


def _checkpoints(seen: Examined, runtime: ContainerRuntime) -> Iterator[Finding]:
    """Check whether containerd restores every image that calls itself a checkpoint, and tells NRI of no such start."""
    subject, release, process = "checkpoints", runtime.release or (), runtime.process
    opt_in = _RESTORES_BEFORE.get(release[:2])
    if runtime.containerd is None or opt_in is None or process is None:
        return
    if release >= opt_in and not runtime.containerd.cri.enable_experimental_restore_via_create:
        return
    shown, criu = f"containerd {runtime.version}", in_path(seen, process, "criu")
    if criu is None:
        yield unseen(subject, f"only root can see whether {shown} finds criu", "sudo nri-gpu doctor")
    elif not criu:
        yield ok(subject, f"{shown} finds no criu, so it restores none")
    else:
        yield warning(
            subject,
            f"{shown} finds {criu}, so it restores every image that calls itself a checkpoint, and tells no plugin of "
            "the start: nri-gpu and its guard refuse that in pods that ask for GPUs, but not while both are away",
            "# upgrade containerd: 2.2.7, 2.3.4, 2.4 and newer restore none unless told to",
            f"# or keep {criu} out of its PATH",
        )


def _validator(seen: Examined, runtime: ContainerRuntime) -> Iterator[Finding]:
    """Check whether required plugins take effect: those of the node, and what a pod requires by its annotation."""
    validator, name = runtime.nri.default_validator, seen.policy.plugin.name
    required, least = validator.required_plugins, _VALIDATES[runtime.name]
    needs, release = ".".join(map(str, least)), runtime.release
    by_pod = f"a pod that requires {name} by its annotation"
    if any(each.unseen for each in runtime.faults):
        return  # what it may say is not seen, and that is said already
    if not validator.enable and required:
        yield warning(
            _REQUIRES,
            f"required_plugins lists {listed(required)}, but the validator is off, so the list has no effect",
            *_edit(runtime, _VALIDATOR, "enable = true", "nri_enable_default_validator = true"),
        )
    elif not validator.enable:
        yield ok(
            _REQUIRES,
            f"the validator is off, so {by_pod} starts without it, too: only the guard stops containers while nri-gpu "
            "is away",
        )
    elif release is None:
        yield unseen(_REQUIRES, f"the validator is on; whether this {runtime.name} is {needs} or newer, and knows it")
    elif release < least:
        yield warning(_REQUIRES, f"this {runtime.name} does not know required plugins: it needs {needs}", "upgrade it")
    else:
        yield _required(seen, runtime, by_pod)


def _required(seen: Examined, runtime: ContainerRuntime, by_pod: str) -> Finding:
    """Say what a validator that is on requires. by_pod: a pod that requires us, in words."""
    validator, ours = runtime.nri.default_validator, (seen.policy.plugin, seen.policy.guard)
    required, voids = validator.required_plugins, validator.tolerate_missing_plugins_annotation
    known = {name for each in ours for name in (each.name, f"{each.index}-{each.name}")}
    if strangers := [name for name in required if "nri-gpu" in name and name not in known]:
        return error(
            _REQUIRES,
            f"required_plugins lists {listed(strangers)}, which no plugin of the policy is called, so no container can "
            "be created on this node",
            *_edit(
                runtime,
                _VALIDATOR,
                f'required_plugins = ["{ours[0].name}", "{ours[1].name}"]',
                f'nri_validator_required_plugins = ["{ours[0].name}", "{ours[1].name}"]',
            ),
        )
    if required:
        tolerant = f", but for pods with {voids}, whatever they require themselves" if voids else ""
        return ok(_REQUIRES, f"no container is created without {listed(required)}{tolerant}")
    if voids:
        return warning(
            _REQUIRES,
            f"tolerate_missing_plugins_annotation is set, so {by_pod} starts without it if it also has {voids}",
            *_edit(
                runtime,
                _VALIDATOR,
                'tolerate_missing_plugins_annotation = ""',
                'nri_validator_tolerate_missing_plugins_annotation = ""',
            ),
        )
    return ok(_REQUIRES, f"{by_pod} has no container created while that is not connected; no other pod waits for it")


def _switch_on(seen: Examined, runtime: ContainerRuntime) -> tuple[str, ...]:
    """Return commands to paste that switch NRI on; where the file is not as plain as they need, what to write where."""
    in_words = _edit(runtime, "nri", "disable = false", "enable_nri = true")
    if runtime.containerd is None or runtime.distribution or runtime.faults:
        return in_words
    (file, *_), name = runtime.places("nri.disable"), runtime.containerd.nri_table if runtime.files else NRI
    header = f'[plugins."{name}"]'
    text = text_of(seen.at(file), TEXT_MAX, "utf-8") or ""
    table = f"\\n{header}\\n  disable = false\\n"
    if not runtime.files:
        write = f"mkdir -p {PurePath(file).parent} && printf 'version = 2\\n{table}' > {file}"
    elif not any(f"{key}.".startswith("nri.") for key in runtime.said):
        write = f"printf '{table}' >> {file}"
    elif re.search(rf"^ *{re.escape(header)}\n(?! *\[)(.*\n(?! *\[))*? *disable = true$", text, re.MULTILINE):
        begin = header.replace("[", "\\[").replace("]", "\\]").replace(".", "\\.")
        write = f"sed -i '/^ *{begin}/,/^ *\\[/ s/^\\( *disable =\\) true/\\1 false/' {file}"
    else:
        return in_words
    return (write, *runtime.restart)


def _edit(runtime: ContainerRuntime, table: str, line: str, crio_line: str) -> tuple[str, ...]:
    """Return what to write into the runtime's NRI settings, and the restart that it takes."""
    if runtime.name == "crio":
        return runtime.edit(table, f"below [crio.{table}]", crio_line)
    name = runtime.containerd.nri_table if runtime.containerd else NRI
    return runtime.edit(table, f'below [plugins."{name}"{table.removeprefix("nri")}]', line)
