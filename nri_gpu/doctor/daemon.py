"""nri-gpu itself: its daemon and guard, its policy, its files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.doctor.finding import DoctorFinding, Examined, error, ok, unseen, warning
from nri_gpu.plugin.guard_status import read_guard_status

_START: Final = ("systemctl enable --now nri-gpu", "journalctl -u nri-gpu -e    # if it does not stay up")
_RESTART: Final = ("journalctl -u nri-gpu -e", "systemctl restart nri-gpu")
FAULTS_SHOWN: Final = 10


def daemon_findings(seen: Examined) -> Iterator[DoctorFinding]:
    """Whether the daemon runs and is registered, whether the guard is, and whether the policy can be used."""
    yield from _policy(seen)
    yield _answers(seen)
    if seen.status:
        yield from _registered(seen.status)
        yield from _able(seen.status)
    yield _guard(seen)


def _policy(seen: Examined) -> Iterator[DoctorFinding]:
    if seen.policy_error:
        for fault in seen.policy_error.faults[:FAULTS_SHOWN]:
            if "may not read it" in fault.message:
                yield unseen("policy", f"{fault}", "sudo nri-gpu doctor")
            else:
                yield error(
                    "policy", f"{fault}: a daemon that starts now refuses every container that asks", "nri-gpu check"
                )
    else:
        yield ok("policy", f"no faults in {seen.policy.source}")


def _answers(seen: Examined) -> DoctorFinding:
    """Whether a daemon answers at the control socket."""
    subject = "daemon"
    match seen.silence:
        case None:
            return ok(subject, "nri-gpu runs and answers")
        case PermissionError():
            return unseen(subject, f"only root may ask the daemon in {seen.state_dir}", "sudo nri-gpu doctor")
        case FileNotFoundError():
            return error(
                subject, f"no nri-gpu runs with state folder {seen.state_dir}: containers start without GPUs", *_START
            )
        case ConnectionRefusedError():
            return error(
                subject,
                f"the nri-gpu with state folder {seen.state_dir} has ended: containers start without GPUs",
                *_START,
            )
        case TimeoutError():
            return error(subject, "nri-gpu runs and does not answer: it hangs, or the machine is overloaded", *_RESTART)
        case fault:
            return error(
                subject,
                f"what answers in {seen.state_dir} is no nri-gpu of this version: {fault}",
                "nri-gpu --version; systemctl restart nri-gpu    # daemon and command of one version",
            )


def _registered(status: DaemonStatus) -> Iterator[DoctorFinding]:
    subject, runtime = "registration", status.runtime
    name = f"{runtime.name or 'the runtime'} {runtime.version}".strip()
    if runtime.ready:
        nri = f" (NRI {runtime.nri_version})" if runtime.nri_version else ""
        yield ok(subject, f"registered with {name}{nri}")
    else:
        yield error(
            subject,
            "nri-gpu is not connected to the runtime, so containers start without GPUs: "
            f"{runtime.fault or 'connecting'}",
            *_RESTART,
        )
    if runtime.list_fault:
        yield error(subject, runtime.list_fault, "crictl pods    # remove or shrink the pods that are named")


def _able(status: DaemonStatus) -> Iterator[DoctorFinding]:
    """What else keeps a connected daemon from granting."""
    for subject, fault in (("inventory", status.node.inventory_fault), ("driver in use", status.node.driver_fault)):
        if fault:
            yield error(subject, f"{fault}: requests are refused", *_RESTART)
    if status.policy.fault:
        yield error(
            "policy in force",
            f"the daemon runs without a usable policy, and refuses who asks: {status.policy.fault}",
            "nri-gpu check    # then: systemctl reload nri-gpu",
        )


def _guard(seen: Examined) -> DoctorFinding:
    subject = "guard"
    status = read_guard_status(seen.at(seen.guard_dir))
    if status is None:
        return warning(
            subject,
            "no guard runs: a container that asks for GPUs, created and started while nri-gpu is away, runs without "
            "them",
            "systemctl enable --now nri-gpu-guard",
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
            f"{status.ungranted} containers ran without the GPUs they asked for when the guard connected",
            "journalctl -u nri-gpu-guard    # names them: delete their pods to have them granted",
        )
    how = "creations and starts" if status.validates else "starts"
    return ok(subject, f"connected, and checks {how} of containers")
