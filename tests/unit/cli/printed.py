"""What several tests of verbs print, and the goldens that it is held against."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from nri_gpu.blockers.blocker import Blocker, BlockerKind, BlockersReport, BlockingProcess
from nri_gpu.blockers.module_references import Console, DriverModule, module_blockers
from nri_gpu.blockers.owners import BlockerOwner, endings
from nri_gpu.daemon.answers import (
    DaemonStatus,
    GpuUsage,
    HolderUsage,
    IdleStatus,
    ObserverStatus,
    RuntimeConnection,
    SamplingStatus,
)
from nri_gpu.daemon.view import status_of
from nri_gpu.decision.decide import decide
from nri_gpu.doctor.examine import DoctorDocument, Section
from nri_gpu.domain.decision import Refused
from nri_gpu.domain.finding import error, ok, unseen, warning
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import Happened, Health, HealthState, History
from nri_gpu.domain.value import encode
from nri_gpu.health.gpu_record import Moment
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.records.audit_records import NodeRecord, PolicyRecord, Record, changed_record, decision_record
from nri_gpu.system.node_name import NamedNode
from nri_gpu.verify.container_report import ContainerReport, Report, Verdict
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.ledgers import decided
from tests.support.terminal import STYLE
from tests.support.views import CLOCK, NOW, OTHER, TRAIN, view
from tests.unit.host.host_tree import NVIDIA, UVM, HostTree
from tests.unit.observe import seen

WIDTHS = (60, 80, 120)  # columns of terminals
GOLDENS = Path(__file__).parent / "goldens"
ROOT = Path(__file__).parents[3]
MIG = TOPOLOGIES / "mig-a100.toml"
WHY = "XID 79: the GPU has fallen off the bus"

REFUSED = Refused(
    number=7,
    at_s=NOW - 3,
    what="container refused",
    code="gpu-busy",
    reason="asked for 2, and 1 is free: wait until ml/alone is done.",
    namespace="ml",
    pod="greedy",
    container="main",
)
LOST = Happened(number=1, at_s=NOW - 60, kind="health", uuid=make.uuid(2), index=2, worse=True, what=f"GPU 2: {WHY}")
WHAT = "GPU 1 is held by ml/train, container main (shared)"
GRANTED = Happened(at_s=NOW - 70, kind="held", uuid=make.uuid(1), index=None, worse=False, what=WHAT)


@cache
def node_in_trouble() -> DaemonStatus:
    """Held, shared and free GPUs, and one that fell off the bus; the runtime is away."""
    bad = make.gpu(2, unavailable=f"bad since then because of {WHY}", health=Health(HealthState.BAD, NOW - 60, WHY, 1))
    node = make.node([make.gpu(0), make.gpu(1), bad, make.gpu(3)], driver_version="580.95.05")
    shared = [make.entry(1, to=each, mode=Mode.SHARED, since=CLOCK - 70) for each in (TRAIN, OTHER)]
    alone = make.entry(0, to=make.container(of="alone"), since=CLOCK - 7500)
    return status_of(
        view(
            make.ledger(alone, *shared),
            node,
            connection=RuntimeConnection(
                ready=False, since_s=NOW - 5, name="containerd", version="2.1.9", fault="gone"
            ),
            history=History(NOW - 9000, 1, {"health": 1}, (LOST,)),
            refusals=(REFUSED,),
        )
    )


LONG_POD = f"train-{'x' * 80}-7c9d-worker-0"  # of 99 characters
GIB = 2**30


@cache
def busy_node() -> DaemonStatus:
    """Four sampled H100s: one used, one shared with somebody idle, one of a pod without a process, one free."""
    gpus = [make.gpu(index, model="NVIDIA H100 80GB HBM3") for index in range(4)]
    long, sidecar = make.container(of=LONG_POD), make.container(of=TRAIN.pod, name="sidecar")
    ledger = make.ledger(
        make.entry(0, to=long, since=CLOCK - 4000),
        *(make.entry(1, to=each, mode=Mode.SHARED, since=CLOCK - 4900) for each in (sidecar, OTHER)),
        make.entry(2, to=make.container(of="forgotten"), since=CLOCK - 4900),
    )
    status = status_of(view(ledger, make.node(gpus, driver_version="580.95.05", simulated=True)))
    seen = IdleStatus(no_process=False, since_s=NOW - 10_800, samples=180)
    none = IdleStatus(no_process=True, since_s=NOW - 3600, samples=60)
    uses = (
        ((71 * GIB, 97, 3.0), (HolderUsage(memory_bytes=70 * GIB, processes=8),)),
        ((9 * GIB, 3, 3.0), (HolderUsage(memory_bytes=8 * GIB, processes=1), HolderUsage(memory_bytes=0, idle=seen))),
        ((GIB // 2, 0, 3.0), (HolderUsage(memory_bytes=0, processes=0, idle=none),)),
        ((None, None, 300.0), ()),
    )
    return replace(
        status,
        node=replace(status.node, name="node-7"),
        sampling=SamplingStatus(enabled=True, each_second=True),
        gpus=tuple(
            replace(
                gpu,
                usage=_usage(*of_gpu),
                holders=tuple(
                    replace(holder, usage=each) for holder, each in zip(gpu.holders, of_holders, strict=True)
                ),
            )
            for gpu, (of_gpu, of_holders) in zip(status.gpus, uses, strict=True)
        ),
    )


def _usage(used_bytes: int | None, percent: int | None, age_s: float) -> GpuUsage:
    if used_bytes is None:  # the driver tells nothing
        return GpuUsage(sampled_s=NOW - age_s)
    return GpuUsage(
        sampled_s=NOW - age_s,
        memory_used_bytes=used_bytes,
        memory_total_bytes=80 * GIB,
        utilization_percent=percent,
        temperature_c=41,
        power_w=122.6,
        power_limit_w=700.0,
        sm_clock_mhz=1980,
        memory_clock_mhz=2619,
    )


def unstyled(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in STYLE.sub("", text).splitlines())


# Real commands, which run in this tree's root.
COMMANDS = {
    "explain": (
        "explain",
        GOLDENS / "pod.yaml",
        *("--gpus", FOUR_GPUS, "--policy", GOLDENS / "empty-policy.toml"),
    ),
    "check": ("check", (GOLDENS / "bad-policy.toml").relative_to(ROOT)),
}


GOOD = ContainerReport(
    id="a", pod="ml/train", container="main", verdict=Verdict.OK, mode="exclusive", gpu_uuids=(make.uuid(1),)
)
WIDENED = (
    f"can open /dev/nvidia5 (195:5, GPU 2, {make.uuid(2)}), not granted, and its spec does not say so: its device "
    "rules were widened after it was created; stop it, and find out who did that"
)
BAD = ContainerReport(id="b", pod="ml/web", container="main", verdict=Verdict.DIFFERS, differences=(WIDENED,))
AGENT = ContainerReport(
    id="d", pod="kube-system/agent", container="node-exporter", verdict=Verdict.PRIVILEGED, privileged=True
)
IDLE = ContainerReport(id="e", pod="default/web", container="main", verdict=Verdict.NO_GPU)
HIDDEN = ContainerReport(id="c", pod="ml/vm", container="main", verdict=Verdict.UNSEEN, unseen="it is a VM")


NODE = NamedNode("node1")


def report(*containers: ContainerReport, **fields: object) -> Report:
    return Report(**{"node": NODE, "numbers_from": "daemon", "containers": containers, **fields})  # type: ignore[arg-type]


CHECKED = report(GOOD, BAD, HIDDEN, AGENT, IDLE, unseen=("container 0a1b of ml/lost, which has GPUs",))


KEPT = BlockersReport(
    node=NODE,
    driver_version="580.95.05",
    gpu=None,
    keeps_loaded=(
        Blocker(
            kind=BlockerKind.POD,
            name="ml/train",
            what="has /dev/nvidia1, /dev/nvidiactl, /dev/nvidia-uvm and 1 more, open in pid 4711 /usr/bin/python3",
            next=endings(BlockerOwner(kind=BlockerKind.POD, name="", namespace="ml", pod="train"), ()),
            gpu_uuids=(make.uuid(1),),
            nodes=("/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
            libcuda=True,
            processes=(BlockingProcess(4711, 12345, "/usr/bin/python3"),),
            namespace="ml",
            pod="train",
            container_ids=("0a1b",),
        ),
        Blocker(
            kind=BlockerKind.PERSISTENCE,
            name="nvidia-persistenced.service",
            what="has /dev/nvidia0, /dev/nvidia1, /dev/nvidiactl, open in pid 812 /usr/bin/nvidia-persistenced",
            next=("systemctl stop nvidia-persistenced.service",),
            unit="nvidia-persistenced.service",
        ),
        *module_blockers([DriverModule("nvidia", 1)], {}, Console()),
    ),
    will_break=(
        Blocker(
            kind=BlockerKind.UNIT,
            name="serve.service",
            what="maps libcuda, pid 990 /opt/serve",
            next=("systemctl stop serve.service",),
        ),
    ),
    unload=("modprobe -r nvidia_uvm nvidia",),
    unseen=("what 2 of 412 processes have open: be root on the host",),
)


POLICY = '[namespaces]\nallow = ["ml"]\n'


def record(file: Path) -> None:
    """Two pods of namespace ml that each got a GPU, and one whose request was nonsense."""
    node, ledger, now = make.node(), Ledger(), 10.0
    lines: list[Struct | Record] = [NodeRecord(node=encode(node)), PolicyRecord("policy.toml", POLICY)]
    for name, claim in (("one", "device=0"), ("two", "device=1"), ("three", "nonsense")):
        container = make.container(claim, of=name)
        decision = decide(container, node, ledger, Policy.default())
        lines.append(decision_record(container, decision, 1_800_000_000.0, now))
        old, ledger = ledger, decided(ledger, decision, now)
        if changed := changed_record(old, ledger, 0.0):
            lines.append(changed)
    file.write_text("".join(json.dumps(to_builtins(line)) + "\n" for line in lines))


def spoil(host: HostTree) -> None:
    """Have nodes and a link that are wrong, each in its own way."""
    host.node("nvidia0", NVIDIA, 0, 0o600)
    host.node("nvidia-uvm", NVIDIA, 9)
    host.write("dev/nvidia1", "")
    (host.dev / "char" / f"{UVM}:0").symlink_to("../gone")


LONG = "nri-gpu something --with=a-very-long-option-that-is-never-broken --and another    # because it is to be copied"
REPORT = DoctorDocument.of(
    NODE,
    Section("driver", (ok("modules", "are loaded"), error("nodes", "are missing " * 12, "nri-gpu prepare", LONG))),
    Section("nri-gpu", (warning("guard", "is away", "# in a file:", "a = 1"), unseen("daemon", "root only"))),
)


@cache
def observed_node() -> DaemonStatus:
    """Five GPUs beside NVIDIA's plugin and DRA driver: a container has one open that nobody gave it."""
    gpus = [make.gpu(index, model="NVIDIA H100 80GB HBM3") for index in range(5)]
    inventory = make.inventory(gpus, driver_version="580.95.05")
    train, notebook, claim = (seen.opened(pod, *seen.nodes(at)) for at, pod in enumerate(("train", "notebook", "eval")))
    thief = seen.container("sweep", asked="all")
    exporter = seen.container(
        "nvidia-dcgm-exporter-x7k2p", namespace="gpu-operator", name="nvidia-dcgm-exporter", privileged=True
    )
    looked = seen.look(
        *(train, notebook, claim, thief, exporter),
        seen.use(train, *seen.nodes(0)),
        seen.use(claim, *seen.nodes(2), pid=8),
        seen.use(thief, *seen.nodes(3), pid=4711, program="/usr/bin/python3"),
        seen.use(exporter, *seen.nodes(*range(5)), pid=10, program="/usr/bin/dcgm-exporter"),
    )
    listed = seen.given(
        (train, seen.plugin(make.uuid(0))),
        (notebook, seen.plugin(make.uuid(1))),
        (claim, [seen.claimed("gpu-5", "ml/eval")]),
        (seen.container("gone"), seen.plugin("MIG-00000000-0000-5000-8000-000000000000")),
    )
    first = seen.observed(looked, listed, inventory=inventory, moment=Moment(CLOCK - 5400, NOW - 5400))
    found = seen.observed(looked, listed, inventory=inventory, memory=first.memory, moment=Moment(CLOCK, NOW))
    observer = ObserverStatus(
        looked_s=NOW - 4,
        kubelet_s=NOW - 65,
        kubelet=True,
        unseen=("which devices the kernel lets containers open: this grade has no bpf(2)",),
        allocations=found.allocations,
        findings=found.findings,
        quiet=found.quiet,
    )
    return status_of(
        view(
            found.ledger,
            make.node(gpus, driver_version="580.95.05"),
            connection=RuntimeConnection(ready=True, since_s=NOW - 60, joined=False),
            observer=observer,
        )
    )
