"""The checks of the driver: its modules, files and device nodes, and its services. NVML is never loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.observer_checks import observed_alone
from nri_gpu.doctor.programs import (
    NOT_THE_HOST,
    ON_THE_HOST,
    RunningProgram,
    is_installed,
    running,
    sees_the_host,
)
from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.finding import Finding, error, ok, unseen, warning
from nri_gpu.domain.gpu import closure
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import DriverFiles
from nri_gpu.domain.text import counted, listed
from nri_gpu.driver.driver_scan import FoundDriver, scan
from nri_gpu.driver.manifest import read_manifest
from nri_gpu.host.actions import FixNode, HostPlan, LoadModule, MakeLink, make_plan
from nri_gpu.host.facts import KernelModule, is_loaded, look
from nri_gpu.host.kernel_view import DRIVER, HostFolders, PciGpu, gpus_on_the_bus, nvswitches
from nri_gpu.host.modules import PROC, majors_by_name, module_version, module_versions
from nri_gpu.policy.model import Policy
from nri_gpu.system.sockets import SocketState, socket_state
from nri_gpu.system.storage import is_there, text_of

_PREPARE: Final = "nri-gpu prepare"
_RELOAD: Final = (
    "nri-gpu blockers    # what uses the driver, and what ends each; then load the modules again, or reboot:",
    "modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia && nri-gpu prepare",
)
_OURS: Final = ("nvidia", "nvidia-uvm", "nvidia-caps")
# Debian calls it nvidia-current.ko, and others. The kernel's own nvidiafb, i2c-nvidia-gpu and so on are not it.
_BUILT: Final = re.compile(r"/nvidia(?:-(?:current|open|tesla|legacy|[0-9])[\w-]*)?\.ko")
_MISSING: Final = (
    ("device nodes", False, "device nodes", "a container that needs them does not start, or its CUDA fails"),
    ("MIG nodes", True, "capability nodes of MIG devices", "a container with such a MIG device fails to open it"),
)
_NOTHING: Final = "no container of this node can be given one"
_NOVA: Final = ("nova_core", "blacklist nova_core\\n")
# Name on the PCI bus -> module, and what keeps it from taking a GPU. Source: Linux drivers/gpu/nova-core/nova_core.rs.
_KERNELS_OWN: Final = {
    "nouveau": ("nouveau", "blacklist nouveau\\noptions nouveau modeset=0\\n"),
    "NovaCore": _NOVA,
    "nova_core": _NOVA,
}
_IMEX: Final = "nvidia-imex"
_PROGRAMS: Final = {
    "nvidia-persistenced": "nvidia-persistenced",
    "nvidia-fabricmanager": "nv-fabricmanager",
    _IMEX: _IMEX,
}  # by their units
_MODULES_MAX: Final = 4 << 20  # bytes of modules.dep


def driver_findings(seen: Examined) -> Iterator[Finding]:
    """Check from the PCI bus to the device nodes."""
    if seen.simulated:
        yield ok("driver", "nri-gpu simulates its GPUs (--gpus), so the node's driver does not matter")
        return
    gpus = tuple(gpus_on_the_bus(seen.at("/sys")))
    module = is_loaded(seen.at("/sys"), KernelModule.NVIDIA)
    yield _on_the_bus(seen, gpus, module=module)
    if not gpus and not module:
        return
    yield from _bound_elsewhere(gpus)
    if gpus and all(gpu.of_machines for gpu in gpus):
        return
    yield from _modules(seen, gpus, module=module)
    if not observed_alone(seen):  # else nothing is given to containers, and what NVML says is the observer's to tell
        yield from _versions(seen)
    if module and seen.in_pod and not any(seen.at("/dev").glob("nvidia*")):
        yield unseen("device nodes", "the node's /dev is not mounted in this pod", ON_THE_HOST)
    elif module:
        yield from _nodes(seen)
    if module:
        yield _persistence(seen)
    yield from _fabric_manager(seen)


def _on_the_bus(seen: Examined, gpus: Sequence[PciGpu], *, module: bool) -> Finding:
    if gpus and all(gpu.of_machines for gpu in gpus):
        return warning("GPUs", f"each NVIDIA GPU on the PCI bus is for virtual machines: {_NOTHING}")
    if gpus:
        return ok("GPUs", f"{counted(len(gpus), 'NVIDIA GPU')} on the PCI bus")
    if not seen.at("/sys/bus/pci/devices").is_dir():
        return unseen("GPUs", "the PCI bus cannot be seen here: /sys/bus/pci/devices is missing")
    if module:
        return ok("GPUs", "no NVIDIA GPU on the PCI bus, but module nvidia is loaded")
    return warning(
        "GPUs",
        f"no NVIDIA GPU on the PCI bus: {_NOTHING}",
        "lspci -d 10de:    # still nothing where there is a GPU: see its power, slot, firmware or virtual machine",
    )


def _bound_elsewhere(gpus: Sequence[PciGpu]) -> Iterator[Finding]:
    """Report the GPUs that another driver has. A GPU that a virtual machine has is meant to be there.

    Beside a GPU that NVIDIA's driver or a virtual machine has, another may be an old card that the console needs.
    """
    served = any(gpu.driver == DRIVER or gpu.of_machines for gpu in gpus)
    for gpu in gpus:
        if gpu.of_machines:
            yield ok("GPU driver", f"GPU {gpu.bus_id} is bound to {gpu.driver}, for a virtual machine")
        elif served and gpu.driver != DRIVER:
            yield warning(
                "GPU driver",
                f"GPU {gpu.bus_id} is bound to {gpu.driver or 'no driver'}, so no container can get it. It may be the "
                "display's: then leave it as it is",
                "dmesg | grep -e NVRM -e nvidia    # if it is to serve containers: why the driver does not take it",
            )
        elif known := _KERNELS_OWN.get(gpu.driver):
            yield error(
                "GPU driver",
                f"GPU {gpu.bus_id} is bound to {gpu.driver}, the kernel's own driver, so NVIDIA's driver cannot use it",
                f"printf '{known[1]}' > /etc/modprobe.d/nri-gpu-{known[0]}.conf",
                "update-initramfs -u || dracut --force; reboot",
            )
        elif gpu.driver not in ("", DRIVER):
            yield warning(
                "GPU driver",
                f"GPU {gpu.bus_id} is bound to {gpu.driver}, so no container can get it",
                f"echo {gpu.bus_id} > /sys/bus/pci/drivers/{gpu.driver}/unbind",
                f"echo {gpu.bus_id} > /sys/bus/pci/drivers/nvidia/bind",
            )


def _modules(seen: Examined, gpus: Sequence[PciGpu], *, module: bool) -> Iterator[Finding]:
    subject = "driver modules"
    if not module:
        yield _not_loaded(seen, subject)
        return
    if not is_loaded(seen.at("/sys"), KernelModule.UVM):
        yield error(subject, "module nvidia-uvm is not loaded: every CUDA program fails in its first call", _PREPARE)
    elif (unbound := [gpu.bus_id for gpu in gpus if not gpu.driver]) and not any(gpu.driver == DRIVER for gpu in gpus):
        yield error(
            subject,
            f"module nvidia is loaded but does not drive GPU {listed(unbound)}: no container can get it",
            "dmesg | grep -e NVRM -e nvidia    # says why; often a driver too old or too new for this GPU, or not the "
            "open module that it needs",
        )
    else:
        yield ok(subject, "nvidia and nvidia-uvm are loaded")


def _not_loaded(seen: Examined, subject: str) -> Finding:
    """Return why there is no module nvidia: not built for this kernel, or not loaded."""
    release = (text_of(seen.at("/proc/sys/kernel/osrelease")) or "").strip()
    known = text_of(seen.at(f"/lib/modules/{release}/modules.dep"), _MODULES_MAX, "utf-8") if release else None
    if known is not None and not _BUILT.search(known):
        return error(
            subject,
            f"module nvidia is not installed for the running kernel {release}: no GPU can be granted",
            f"apt install linux-headers-{release} && dkms autoinstall -k {release}    # Debian, Ubuntu",
            f"dnf install kernel-devel-{release} && dkms autoinstall -k {release}     # RHEL, Fedora",
            _PREPARE,
        )
    return error(
        subject,
        "module nvidia is not loaded: no GPU can be granted",
        _PREPARE,
        "dmesg | grep -e NVRM -e nvidia    # if it does not load: says why (Secure Boot, another driver)",
    )


def _versions(seen: Examined) -> Iterator[Finding]:
    """Compare the versions of the loaded modules with that of the driver's files."""
    subject, settings = "driver versions", seen.policy.driver
    root, where = seen.at(settings.root), settings.root
    if settings.host_root and not root.is_dir():
        if seen.in_pod:
            yield unseen(subject, f"{where} is mounted in the daemon's pod alone", ON_THE_HOST)
            return
        root = seen.at(settings.host_root)  # the other is a mount in the daemon's pod
    kernel = module_version(seen.at("/sys"), seen.at(PROC))
    served = _served(seen.status, kernel)
    try:
        found = scan(root, library_dirs=settings.library_dirs, module=kernel)
    except DriverError as fault:
        means = f"Containers get the staged ones of {kernel}" if served else "No container can get a driver"
        yield (warning if served else error)(
            subject,
            f"the driver's libraries are not usable: {fault}. {means}",
            "# install the driver's libraries (nvidia-utils, or NVIDIA's .run file), or set driver.root and "
            "driver.library_dirs in /etc/nri-gpu/policy.toml to where they are",
        )
        return
    others = {name: each for name, each in module_versions(seen.at("/sys")).items() if each and kernel}
    odd = [f"{name} {each}" for name, each in sorted(others.items()) if each != kernel]
    if kernel and found.version != kernel:
        means = f"; containers get the staged ones of {kernel}" if served else ", so nri-gpu refuses every request"
        yield (warning if served else error)(
            subject,
            f"module nvidia is {kernel} and the libraries below {where} are {found.version}: NVML and CUDA fail "
            f"{'on the host ' if served else ''}(Driver/library version mismatch){means}",
            *_RELOAD,
        )
    elif odd:
        yield error(subject, f"module nvidia is {kernel}, but {listed(odd)}: CUDA fails", *_RELOAD)
    elif kernel:
        unused = f"; not used: {listed(map(str, found.others))}" if found.others else ""
        yield ok(subject, f"modules and libraries are {kernel}{unused}")
    else:
        yield ok(subject, f"the libraries below {where} are {found.version}; no module to compare them with")
    staged = read_manifest(seen.at(settings.stage_dir) / served) if served else None
    yield from lacking(staged.driver if staged else found, seen.policy)
    if found.left_out:
        yield warning(
            "driver files",
            f"{counted(len(found.left_out), 'file')} of the driver left out of containers, such as "
            f"{found.left_out[0].path}: {found.left_out[0].reason}",
            "nri-gpu driver    # lists each with its reason",
        )


def _served(status: DaemonStatus | None, kernel: str) -> str:
    """Return the generation of the loaded module's version whose staged files containers get, or empty."""
    node = status.node if status else None
    if not node or not kernel or node.driver_fault or node.inventory_fault:
        return ""
    return node.driver_generation if node.driver_generation.startswith(f"{kernel}-") else ""


def lacking(driver: FoundDriver | DriverFiles, policy: Policy) -> Iterator[Finding]:
    """Report the capabilities that containers have by default and that the driver cannot serve."""
    for each in sorted(driver.lacks.keys() & closure(policy.defaults.capabilities)):
        yield error(
            "driver files",
            f"the driver below {policy.driver.root} has no usable {driver.lacks[each]}: requests for {each} are "
            "refused until it is installed",
            "# install that part of the driver (libcuda1, nvidia-driver-cuda), and see: nri-gpu driver",
        )


def _nodes(seen: Examined) -> Iterator[Finding]:
    """Report what `nri-gpu prepare` would do about nodes and links."""
    facts = look(_folders(seen))
    if not facts.devices:
        return
    plan = make_plan(facts)
    for finding in facts.unreadable:
        yield unseen("device nodes", f"{finding}", "sudo nri-gpu doctor")
    for finding in (each for each in plan.findings if each not in facts.unreadable):
        yield error("device nodes", f"{finding}", f"{_PREPARE} --dry-run    # once fixed: nothing left to do")
    wrong = [action for action in plan.actions if not isinstance(action, LoadModule | MakeLink)]
    nodes = [action for action in wrong if not isinstance(action, FixNode)]
    for subject, of_mig, what, meaning in _MISSING:
        if paths := [action.subject for action in nodes if (action.node.major == facts.majors.nvidia_caps) is of_mig]:
            yield error(
                subject,
                f"{what} are missing or have an old number ({listed(paths)}): {meaning}",
                _PREPARE,
                "nri-gpu enable prepare    # each boot",
            )
    if fixes := [action for action in wrong if isinstance(action, FixNode)]:
        yield warning(
            "device nodes",
            f"{listed(map(str, fixes), 2)}: programs of users other than root may fail to open it",
            _PREPARE,
        )
    if not (wrong or plan.findings):
        majors = majors_by_name(text_of(seen.at("/proc/devices")) or "")
        shown = (f"{name} {','.join(map(str, sorted(majors[name])))}" for name in _OURS if name in majors)
        yield ok("device nodes", f"all are there, with the majors of /proc/devices: {', '.join(shown)}")
    yield from _links(plan)


def link_findings(seen: Examined) -> Iterator[Finding]:
    """Report missing links, without which a reload of systemd can take GPUs from containers."""
    yield from _links(make_plan(look(_folders(seen))))


def _folders(seen: Examined) -> HostFolders:
    return HostFolders(proc=seen.at("/proc"), sys=seen.at("/sys"), dev=seen.at("/dev"), host=seen.root)


def _links(plan: HostPlan) -> Iterator[Finding]:
    links = [each for each in plan.actions if isinstance(each, MakeLink)]
    if links:
        yield warning(
            "/dev/char links",
            f"{counted(len(links), 'link')} by number missing or wrong, such as {links[0].subject}: with runc 1.1.3 to "
            "1.1.6 or systemd before 240, containers lose their GPUs at the next `systemctl daemon-reload`",
            _PREPARE,
        )


_KEEPS_NOTHING: Final = "--no-persistence-mode"
_UNKEPT: Final = (
    "with no program on a GPU the driver shuts it down, so the next container waits seconds for it, and settings such "
    "as power limits are lost"
)


def _persistence(seen: Examined) -> Finding:
    subject, root = "persistence", _container_root(seen)
    process, where = _service(seen, "nvidia-persistenced")
    if process and _KEEPS_NOTHING in process.arguments:
        return warning(
            subject,
            f"nvidia-persistenced runs with {_KEEPS_NOTHING}{where}, so it keeps no GPU initialized: {_UNKEPT}",
            f"systemctl edit nvidia-persistenced    # ExecStart= without {_KEEPS_NOTHING}, after an empty ExecStart=",
            "nvidia-smi -pm 1    # until then",
        )
    sockets = (socket_state(seen.at(f"{each}/run/nvidia-persistenced/socket")) for each in {"", root})
    if process or {SocketState.LIVE, SocketState.CLOSED}.intersection(sockets):
        return ok(subject, f"nvidia-persistenced keeps the GPUs initialized{where}")
    if not sees_the_host(seen.at("/proc")):
        return unseen(subject, f"whether nvidia-persistenced runs: {NOT_THE_HOST}", ON_THE_HOST)
    return warning(
        subject,
        f"nvidia-persistenced does not run: {_UNKEPT}",
        _start(seen, "nvidia-persistenced"),
    )


def _fabric_manager(seen: Examined) -> Iterator[Finding]:
    """Check nodes with NVSwitches of their own; on HGX B200 and NVL72 only the GPUs show that something is missing."""
    subject = "fabric manager"
    switches = nvswitches(seen.at("/proc"))
    alive, where = _service(seen, "nvidia-fabricmanager")
    gpus = seen.status.gpus if seen.status else ()
    waiting = [each.place for each in gpus if Sign.FABRIC_NOT_READY in each.health.signs and ":" not in each.place]
    if switches and not alive and sees_the_host(seen.at("/proc")):
        yield error(
            subject,
            f"this node has {switches} NVSwitches and no fabric manager runs: CUDA fails in every container with error "
            "802, system not yet initialized",
            _start(seen, "nvidia-fabricmanager"),
        )
    elif waiting:
        yield error(
            "NVLink fabric",
            f"GPU {listed(waiting)}: its fabric is not ready, so CUDA may fail with error 802. What may be missing: "
            "the fabric manager of this node, and on NVL72 also IMEX or the fabric manager of the switch trays",
            *(() if alive else (_start(seen, "nvidia-fabricmanager"),)),
            *(
                (_start(seen, _IMEX),)
                if is_installed(seen, f"{_IMEX}.service") and not _service(seen, _IMEX)[0]
                else ()
            ),
            "nvidia-smi -q | grep -A4 Fabric    # Completed, with status Success, once it is",
        )
    elif switches and alive:
        yield ok(subject, f"runs, for {switches} NVSwitches{where}")
    elif switches:
        yield unseen(subject, f"whether it runs: {NOT_THE_HOST}", ON_THE_HOST)


def _container_root(seen: Examined) -> str:
    """Return the driver's root if it is a container's, such as that of the GPU Operator's driver, else empty."""
    root = (seen.policy.driver.host_root or seen.policy.driver.root).rstrip("/")
    own = root.startswith("/run/nvidia/") or (root and is_there(seen.at(root) / "etc/os-release"))
    return root if own else ""


def _service(seen: Examined, name: str) -> tuple[RunningProgram | None, str]:
    """Return the process of a program of the driver, and where, if in a container, which must be the driver's own."""
    names = {_PROGRAMS[name][:15]}
    if process := next(running(seen.at("/proc"), names), None):
        return process, ""
    contained = running(seen.at("/proc"), names, contained=True) if _container_root(seen) else iter(())
    process = next(contained, None)
    return process, f", in a container (pid {process.pid})" if process else ""


def _start(seen: Examined, unit: str) -> str:
    if is_installed(seen, f"{unit}.service"):
        return f"systemctl enable --now {unit}    # of the driver's exact version"
    if _container_root(seen):
        return f"# {_PROGRAMS[unit]} is the driver container's to start: see its log"
    return f"# install and start {unit} of the driver's exact version"
