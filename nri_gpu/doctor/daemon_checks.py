"""The checks of nri-gpu itself: its daemon and guard, its policy, its files, what it says of its GPUs' health."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.cordon.cordon_file import CordonError, read_cordons
from nri_gpu.daemon.answers import DaemonStatus, RuntimeConnection
from nri_gpu.decision.overlaps import SEPARATE, conflict_sentence
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.programs import RunningProgram, is_installed, running
from nri_gpu.doctor.runtimes import ContainerRuntime
from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.finding import Finding, error, ok, unseen, warning
from nri_gpu.domain.text import counted
from nri_gpu.driver.stage_owner import stage_advice
from nri_gpu.health.health_notes import failing, reset_steps, withhold_step
from nri_gpu.mps.mps_folders import mps_advice
from nri_gpu.plugin.guard_status import read_guard_status
from nri_gpu.plugin.second_plugin import connected_daemons
from nri_gpu.policy.findings import advise
from nri_gpu.policy.model import BUILT_IN
from nri_gpu.records.kept_folder import kept_folder
from nri_gpu.system.runtime_cri import WITHOUT
from nri_gpu.system.storage import signature

_RESTART: Final = ("journalctl -u nri-gpu -e", "systemctl restart nri-gpu")
_GUARD_PODS: Final = "kubectl get pods --all-namespaces -l app.kubernetes.io/component=guard"
JOIN: Final = "# for it to serve the runtime, add --socket /var/run/nri/nri.sock to its command line"
FAULTS_SHOWN: Final = 10
SLOW_S: Final = 1.0  # half of the time that the runtime usually waits


def daemon_findings(seen: Examined, runtime: ContainerRuntime | None) -> Iterator[Finding]:
    """Check whether the daemon runs and is registered, whether the guard is, and whether the policy can be used."""
    yield from _policy(seen)
    yield _answers(seen)
    if seen.status:
        yield from registration_findings(seen.status.runtime, seen.now_s)
        yield from _synchronize(seen.status.runtime, runtime.service if runtime else "containerd")
        yield from cri_findings("nri-gpu", seen.status.runtime.cri_fault)
        yield from _able(seen.status)
        yield from _held(seen.status, seen.now_s)
    yield from _second(seen)
    if not (seen.status and not seen.status.runtime.joined):
        yield guard_finding(seen)
    if guard := read_guard_status(seen.at(seen.guard_dir)):
        yield from cri_findings("the guard", guard.cri_fault)


def _policy(seen: Examined) -> Iterator[Finding]:
    if seen.policy_error:
        for fault in seen.policy_error.faults[:FAULTS_SHOWN]:
            if fault.denied:
                yield unseen("policy", f"{fault}", "sudo nri-gpu doctor")
            else:
                yield error(
                    "policy", f"{fault}: a daemon that starts now refuses every container that asks", "nri-gpu check"
                )
    else:
        yield ok("policy", f"no faults in {seen.policy.source}")
        if seen.policy.source == BUILT_IN and seen.status and seen.status.policy.source != BUILT_IN:
            yield unseen(
                "policy in force",
                f"the daemon's policy is {seen.status.policy.source}, and not on this node: the defaults are assumed",
                "nri-gpu doctor --policy FILE    # with a copy of it",
            )
        yield from policy_findings(seen)


def policy_findings(seen: Examined) -> Iterator[Finding]:
    """Check for oddities in the policy, and in the folders that it names."""
    policy, state_dir = seen.policy, seen.at(seen.state_dir)
    yield from advise(policy)
    yield from stage_advice(str(seen.at(policy.driver.stage_dir)), state_dir)
    if signature(state_dir):
        yield from mps_advice(state_dir, enabled=policy.mps.enabled)


def _start(seen: Examined, unit: str) -> tuple[str, ...]:
    """Return how to start the program if its unit is installed, else where to look."""
    if is_installed(seen, f"{unit}.service"):
        return f"systemctl enable --now {unit}", f"journalctl -u {unit} -e    # if it does not stay up"
    return (
        f"# no {unit}.service is installed here: see docs/install.md, and in a cluster the chart's pods:",
        "kubectl get pods --all-namespaces -o wide -l app.kubernetes.io/name=nri-gpu",
    )


def _answers(seen: Examined) -> Finding:
    """Check whether a daemon answers at the control socket."""
    subject = "daemon"
    match seen.silence:
        case None:
            return ok(subject, "nri-gpu runs and answers")
        case PermissionError():
            return unseen(subject, f"only root may query the daemon in {seen.state_dir}", "sudo nri-gpu doctor")
        case FileNotFoundError() if found := min(_ours(seen, "run"), key=_simulates_alone, default=None):
            if _simulates_alone(found):
                what = f"the nri-gpu that runs (pid {found.pid}) simulates a node (--gpus) and joins no runtime"
                return error(subject, f"{what}: containers start without GPUs", JOIN, *_start(seen, "nri-gpu"))
            return error(
                subject,
                f"nri-gpu runs (pid {found.pid}), and its control socket is not in {seen.state_dir}: that folder was "
                "removed or replaced, or is not the daemon's (--state-dir)",
                *_RESTART,
            )
        case FileNotFoundError() | NotADirectoryError() | ConnectionRefusedError():
            missing = not isinstance(seen.silence, ConnectionRefusedError)
            which = f"with state folder {seen.state_dir}"
            what = f"no nri-gpu runs {which}" if missing else f"the nri-gpu {which} has ended"
            return error(subject, f"{what}: containers start without GPUs", *_start(seen, "nri-gpu"))
        case TimeoutError():
            return error(subject, "nri-gpu runs but does not answer: it hangs, or the machine is overloaded", *_RESTART)
        case fault:
            return error(
                subject,
                f"what answers in {seen.state_dir} is no nri-gpu of this version: {fault_of(fault)}",
                "nri-gpu --version; systemctl restart nri-gpu    # daemon and command of one version",
            )


def registration_findings(runtime: RuntimeConnection, now_s: float = 0.0) -> Iterator[Finding]:
    subject = "registration"
    if not runtime.joined:
        what = "it simulates a node and joins no runtime: no container gets a GPU from it"
        yield warning(subject, what, JOIN)
        return
    name = f"{runtime.name or 'the runtime'} {runtime.version}".strip()
    if runtime.ready:
        nri = f" (NRI {runtime.nri_version})" if runtime.nri_version else ""
        answered = runtime.answered_s
        last = "" if answered is None else f"; its last request was answered {max(0.0, now_s - answered):.0f} s ago"
        yield ok(subject, f"registered with {name}{nri}{last}")
    else:
        yield error(
            subject,
            "nri-gpu is not connected to the runtime, so containers start without GPUs: "
            f"{runtime.fault or 'connecting'}",
            *_RESTART,
        )
    if runtime.list_fault:
        yield error(subject, runtime.list_fault, "crictl pods    # remove or shrink the pods that are named")


def _synchronize(runtime: RuntimeConnection, unit: str) -> Iterator[Finding]:
    """Check how the runtime's last list of containers came through."""
    subject, last = "Synchronize", runtime.synchronize
    if last is None:
        return
    size = f"{last.objects} pods and containers, {last.size_bytes / 1024:.0f} KiB in {counted(last.parts, 'message')}"
    if not last.whole:
        yield error(
            subject,
            f"the runtime's list of its containers was cut off after {size} and {last.duration_s:.1f} s: until it "
            "arrives whole, nri-gpu grants no GPU",
            "crictl pods    # remove the pods with the largest environments and annotations",
            f"journalctl -u {unit} -e | grep -i -e nri -e synchroni",
        )
    elif last.duration_s > SLOW_S:
        yield warning(
            subject,
            f"the runtime's last list ({size}) took {last.duration_s:.1f} s; at its request timeout, 2 s unless set, "
            "it would drop nri-gpu",
            "# raise plugin_request_timeout in the runtime's NRI settings, or run fewer containers here",
        )
    else:
        yield ok(subject, f"{size}, in {last.duration_s:.2f} s")


def cri_findings(process: str, fault: str) -> Iterator[Finding]:
    """Check whether a process of ours can ask the runtime's CRI."""
    if fault:
        what = f"{process} cannot ask the runtime's CRI ({fault}): {WITHOUT}"
        yield warning(
            "CRI", what, "# set guard.cri_socket; in the chart, guard.criDir and health.criDir mount the socket"
        )


def _able(status: DaemonStatus) -> Iterator[Finding]:
    """Check for other faults that keep a connected daemon from granting."""
    for subject, fault, steps in (
        ("inventory", status.node.inventory_fault, _described(status)),
        ("driver in use", status.node.driver_fault, _RESTART),
    ):
        if fault:
            yield error(subject, f"{fault}: requests are refused", *steps)
    if status.policy.fault:
        yield error(
            "policy in force",
            f"the daemon runs without a usable policy, and refuses every request: {status.policy.fault}",
            "nri-gpu check    # then: systemctl reload nri-gpu",
        )
    if status.policy.rejected:
        yield error(
            "policy file",
            f"the daemon has rejected it, and keeps the previous policy: {status.policy.rejected}",
            "nri-gpu check    # then: systemctl reload nri-gpu",
        )


def _described(status: DaemonStatus) -> tuple[str, ...]:
    """Return what to do about a node that is not known: its own, or that of a topology file (--gpus)."""
    topology = status.options.get("topology")
    if not topology:
        return _RESTART
    return (
        f"ls -l {topology}    # put a topology file there, as --gpus names it: nri-gpu reads it again by itself",
        "# or start nri-gpu without --gpus, to serve this machine's own GPUs",
    )


def _held(status: DaemonStatus, now_s: float) -> Iterator[Finding]:
    """Check for faults among the holders of GPUs."""
    for each in (each for each in status.overlaps if each.granted):
        sentence = f"GPU {each.gpu_uuid} was granted to {' and '.join(each.pods)}, to one of them exclusively"
        yield error("overlapping grants", sentence, "# delete all of these pods but one")
    for found in status.conflicts:
        sentence = conflict_sentence(found.pod, found.container, found.gpu_uuids, found.holders)
        yield error("GPUs of other components", sentence, f"# {SEPARATE}")
    for lost in (each for each in status.lost if not each.sought):
        sentence = (
            f"{lost.pod}, container {lost.container}, has ended for the runtime, but its processes still hold its GPUs"
        )
        yield warning(
            "lost containers", f"{sentence} ({lost.shown_pids})", "# end them, or thaw a paused one: docs/handover.md"
        )
    for process in status.unkilled:
        yield error(
            "hanging programs",
            f"{process.clause} (for {max(0.0, now_s - process.since_s):.0f} s): no second one is started",
            "dmesg | grep NVRM    # then reset the GPU, or restart the node: docs/health.md",
        )
    if status.sampling.each_second:
        yield ok(
            "samples",
            "nri-gpu samples each second what GPUs do, and holds NVML open for it: a GPU that is held cannot be reset, "
            "nor the driver unloaded, until 5 s after the last `nri-gpu status` or scrape",
        )
    holders = (each for gpu in status.gpus for each in gpu.holders)
    if names := sorted({f"{each.namespace}/{each.pod}" for each in holders if each.unseen}):
        yield warning(
            "cgroups",
            f"the cgroups of {', '.join(names)} are not seen: their GPUs are offered again once the runtime reports "
            "that they ended, although their processes may live on",
            "# run nri-gpu on the host, or with the chart's mounts of /proc and /sys/fs/cgroup",
        )


def _second(seen: Examined) -> Iterator[Finding]:
    """Report two daemons on one runtime, by what the runtime told one of them, or by their connections."""
    socket = seen.policy.plugin.socket
    pids = [*connected_daemons(seen.at(socket), seen.at("/proc"))]
    told = seen.status.runtime.second if seen.status else ""
    if len(pids) > 1 or told:
        which = f"pids {' and '.join(map(str, pids))} are connected to {socket}" if len(pids) > 1 else told
        yield error(
            "second nri-gpu",
            f"two nri-gpu serve one runtime, and refuse each other's containers: {which}",
            f"ps -o pid,args -p {','.join(map(str, pids))}" if pids else "pgrep -af 'nri.gpu.* run'",
            "# stop one of them: a simulation (--gpus) joins no runtime without --socket",
        )


def _ours(seen: Examined, verb: str) -> Iterator[RunningProgram]:
    """Yield each nri-gpu that runs with this verb, also in a pod."""
    found = running(seen.at("/proc"), {"nri-gpu", "python", "python3"}, contained=True)
    return (each for each in found if verb in each.arguments and any("nri" in word for word in each.arguments[:3]))


def _simulates_alone(program: RunningProgram) -> bool:
    """Return whether a daemon joins no runtime, by its command line."""
    return bool(program.option("--gpus")) and not program.option("--socket")


def guard_finding(seen: Examined) -> Finding:
    subject = "guard"
    status = read_guard_status(seen.at(seen.guard_dir))
    if status is None:
        hidden = ""
        if seen.in_pod:
            hidden = "its status is not shown in this pod: the readiness of its own pod"
        elif running_guard := next(_ours(seen, "guard"), None):
            hidden = f"one runs in a container (pid {running_guard.pid}): the readiness of its pod"
        if hidden:
            return unseen(subject, f"{hidden} says whether it is connected", _GUARD_PODS)
        return warning(
            subject,
            "no guard runs on this node: a container that asks for GPUs, created and started while nri-gpu is away, "
            "runs without them: start nri-gpu-guard",
            *_start(seen, "nri-gpu-guard"),
        )
    if not status.connected:
        return error(
            subject,
            f"the guard (pid {status.pid}) is not connected to the runtime: {status.fault or 'its log says why'}",
            "journalctl -u nri-gpu-guard -e",
            "systemctl restart nri-gpu-guard",
        )
    if status.ungranted:
        return error(
            subject,
            f"{counted(status.ungranted, 'container')} ran without the GPUs asked for when the guard connected: delete "
            "the pods to have them granted",
            "journalctl -u nri-gpu-guard    # names them",
        )
    if status.policy_fault:
        return warning(
            subject,
            f"it cannot use the policy as it is written now, and goes by the one from before: {status.policy_fault}",
            "nri-gpu check",
            "journalctl -u nri-gpu-guard -e",
        )
    how = "creations and starts" if status.validates else "starts"
    return ok(subject, f"connected, and checks {how} of containers")


def health_findings(seen: Examined) -> Iterator[Finding]:
    """Report GPUs that wait for a reset, and those on which the applications of several namespaces fail."""
    for gpu in seen.status.gpus if seen.status else ():
        notes, name = gpu.notes, f"GPU {gpu.place}"
        if notes.reset:
            yield error(name, f"it is withheld until it is reset: {notes.reset}", *reset_steps(gpu.uuid))
        if notes.soon:
            soon, *_ = reset_steps(gpu.uuid)
            yield warning(name, f"it is not granted again once its holder has ended: {notes.soon}", soon)
        if notes.namespaces:
            yield warning(name, failing(notes), withhold_step(gpu.uuid))


def cordon_findings(seen: Examined) -> Iterator[Finding]:
    """Report GPUs that root took out of use, as the daemon says, or the file if none answers."""
    if seen.status:
        fault = seen.status.cordon_fault
        found = {gpu.place: (gpu.uuid, gpu.cordoned.by, gpu.cordoned.why) for gpu in seen.status.gpus if gpu.cordoned}
    else:
        try:
            folder = kept_folder(seen.policy.usage)
            records = {} if isinstance(folder, str) else read_cordons(folder)
        except CordonError as unread:
            if unread.denied:
                yield unseen("GPUs out of use", str(unread))
                return
            records, fault = {}, str(unread)
        else:
            fault = ""
        found = {uuid: (uuid, record.by, record.why) for uuid, record in records.items()}
    if fault:
        yield error("GPUs out of use", f"nothing new is granted: {fault}", "systemctl reload nri-gpu")
    for place, (uuid, by, why) in found.items():
        step = f"nri-gpu uncordon {uuid}    # once that is over"
        yield warning(f"GPU {place}", f"it was taken out of use by {by}: {why}", step)
