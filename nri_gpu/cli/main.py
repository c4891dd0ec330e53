"""The `nri-gpu` command: a table of verbs, each a module with a `run` that returns an exit code."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import itertools
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NoReturn

from msgspec import Struct

from nri_gpu import __version__
from nri_gpu.domain.errors import CommandError, Exit, InventoryError, PolicyError, cause_of

EXIT_HELP: Final = """exit codes:
  0 ok   1 a finding or a refusal   2 wrong usage   69 unavailable   70 a bug   77 no permission   78 configuration"""


# Man pages first: a system may leave /usr/share/doc out. verb: with a dash before it, or empty.
MANUAL_HELP: Final = """manual:
  man nri-gpu{verb}; man nri-gpu-request (annotations); man nri-gpu-policy
  docs/... are its pages, below /usr/share/doc/nri-gpu of a package"""


# Spellings of an option, or the bare name of a positional argument; and what argparse has to know of it.
Option = tuple[tuple[str, ...], Mapping[str, object]]


class Verb(Struct, frozen=True):
    """A verb of the command. module: imported only when the verb is called."""

    name: str
    module: str
    help: str
    teach: str
    options: tuple[Option, ...]

    @property
    def example(self) -> str:
        """Return the example that `teach` ends with: what is indented there."""
        return next(line.strip() for line in self.teach.splitlines() if line.startswith("  "))


def _option(*flags: str, help: str, **settings: object) -> Option:
    return flags, {"help": help, **settings}


def _switch(flag: str, help: str) -> Option:
    return _option(flag, help=help, action="store_true")


def _value(flag: str, metavar: str, help: str) -> Option:
    return _option(flag, help=help, metavar=metavar)


class _Dropped(argparse.Action):
    """The action of an ignored option: it is noted in `dropped`, with what to do instead (`const`)."""

    def __call__(self, _: object, namespace: argparse.Namespace, *__: object) -> None:
        namespace.dropped = {**namespace.dropped, self.option_strings[0]: self.const}


def _dropped(flag: str, fix: str, *, values: int = 0) -> Option:
    """Return a former option, ignored for a release, with a warning. values: how many values follow it."""
    return _option(flag, help=argparse.SUPPRESS, action=_Dropped, nargs=values, const=fix, default=argparse.SUPPRESS)


SOCKET: Final = _value("--socket", "PATH", "the runtime's NRI socket (default /var/run/nri/nri.sock)")
POLICY: Final = _value("--policy", "FILE", "policy file (default /etc/nri-gpu/policy.toml)")
GPUS: Final = _value("--gpus", "FILE", "simulate the node in this topology file instead of asking NVML")
DRIVER_ROOT: Final = _value("--driver-root", "DIR", "root folder of the host's NVIDIA driver (default /)")
RUN_DIR: Final = _value("--run-dir", "DIR", "folder for this process's liveness file, which probes read")
STATE_DIR: Final = _value("--state-dir", "DIR", "the daemon's state folder (default /run/nri-gpu)")
OUTPUT: Final = _option(
    "-o", "--output", help="json: for programs; fields are added, never changed", choices=("text", "json")
)

WINDOW: Final = (
    _value("--since", "WHEN", "2d (ago), a day 2026-11-05, or the beginning of a month 2026-11"),
    _value("--until", "WHEN", "likewise (default: now)"),
)

FEATURE: Final = _option(
    "feature",
    help="cdi, dra, prepare: a unit; metrics, kubelet, stray, mps: a drop-in of nri-gpu.service",
    choices=("metrics", "kubelet", "stray", "mps", "cdi", "dra", "prepare"),
)

HOST_ROOT: Final = _value("--driver-host-root", "DIR", "the host's path of --driver-root, if that is a mount in a pod")
METRICS: Final = (
    _value("--metrics", "ADDRESS", "serve metrics for Prometheus at this address or socket"),
    _option("--metrics-public", help="allow an address that other machines reach", action="store_true", default=None),
)
OVERRIDES: Final = (  # as `policy` declares them, each by the `flag` of its setting
    SOCKET,
    _value("--plugin-name", "NAME", "name by which the runtime knows the plugin (default nri-gpu)"),
    _value("--index", "NN", "two digits: index among NRI plugins (default 10)"),
    DRIVER_ROOT,
    HOST_ROOT,
    _value("--stage-dir", "DIR", "folder for staged driver files"),
    _option(
        "--kubelet",
        help="be the kubelet's device plugin; off with --no-kubelet (docs/kubernetes.md)",
        action=argparse.BooleanOptionalAction,
    ),
    _value(
        "--kubelet-registration",
        "WORD",
        "register: call the kubelet (default); watcher: wait in plugins_registry to be found",
    ),
    _option(
        "--dra",
        help="serve the DRA driver, `nri-gpu dra`; off with --no-dra (docs/dra.md)",
        action=argparse.BooleanOptionalAction,
    ),
    _value("--dra-driver", "NAME", "name of that driver in DeviceClasses and ResourceSlices"),
    _value("--dra-dir", "DIR", "the kubelet's folder for plugins, where it finds that driver"),
    _value("--labels", "FILE", "write the node's labels to this file for Node Feature Discovery"),
    *METRICS,
)

LOG_LEVEL: Final = _option(
    "--log-level",
    help="lowest level to log (default INFO)",
    type=str.upper,
    choices=("TRACE", "DEBUG", "INFO", "WARNING", "ERROR"),
    default="INFO",
)

VERBS: Final = (
    Verb(
        "run",
        "nri_gpu.cli.run_command",
        "serve the container runtime: decide about GPUs and inject them, until stopped",
        "Connects to the runtime's NRI socket, and reconnects when it goes away. Options override the policy file.\n"
        "With --gpus it joins no runtime unless --socket says which, and prints its state folder (docs/inventory.md).\n"
        "SIGHUP reloads the policy (a broken one is reported, and the old one stays) and asks NVML again.\n"
        "SIGTERM answers the requests in flight and stops. Example:\n"
        "  nri-gpu run --kubelet --metrics 127.0.0.1:9464",
        (
            POLICY,
            GPUS,
            *OVERRIDES,
            _value("--state-dir", "DIR", "folder for key and ledger (default /run/nri-gpu)"),
            RUN_DIR,
            _switch("--stand-by", "wait for the daemon that runs with this state folder, and take over when it stops"),
            _switch("--watch-policy", "reload the policy whenever its file changes, such as a ConfigMap's"),
            LOG_LEVEL,
        ),
    ),
    Verb(
        "guard",
        "nri_gpu.cli.guard_command",
        "stop containers that ask for GPUs and were granted none, even while `run` is down",
        "A second NRI plugin, in a process of its own. It grants nothing: it checks signed grants with the key in the\n"
        "state folder of `run`, and refuses to start (with NRI 0.10: to create) a container that asks for GPUs and\n"
        "has no valid grant. It reads the policy's [guard] section when it starts. Example:\n"
        "  nri-gpu guard --policy /etc/nri-gpu/policy.toml",
        (
            SOCKET,
            POLICY,
            _value("--state-dir", "DIR", "state folder of `run` (default /run/nri-gpu); only read"),
            _value("--run-dir", "DIR", "folder for the guard's own state (default /run/nri-gpu-guard)"),
            LOG_LEVEL,
        ),
    ),
    Verb(
        "dra",
        "nri_gpu.cli.dra_command",
        "run the node's DRA driver for ResourceClaims, together with `run --dra` (docs/dra.md)",
        "Publishes what the daemon offers as ResourceSlices, and prepares ResourceClaims for the kubelet. Only this\n"
        "process talks to the API server: in a pod by its service account, elsewhere by --kubeconfig. It makes no\n"
        "decisions and stores no state. It waits until the daemon answers, and until any other `nri-gpu dra` on this\n"
        "node has exited. Example:\n"
        "  nri-gpu dra --kubeconfig /etc/kubernetes/kubelet.conf",
        (
            STATE_DIR,
            _value("--node-name", "NAME", "this node's name in Kubernetes (default NODE_NAME, else the host's)"),
            _value("--kubeconfig", "FILE", "how to reach the API server (default: as a pod does)"),
            RUN_DIR,
            LOG_LEVEL,
        ),
    ),
    Verb(
        "observe",
        "nri_gpu.cli.observe_command",
        "show who was given which GPU and who uses it, beside any stack, and change nothing",
        "For nodes where something else allocates GPUs: another device plugin, a DRA driver, Docker. Needs root. It\n"
        "never connects to NRI, grants and refuses nothing, and writes nothing but its run folder. `status`, `verify`\n"
        "and `doctor` ask it where no daemon answers. With a daemon on the node it waits; in a terminal it ends.\n"
        "SIGHUP reads the policy again.\n"
        "Example:\n"
        "  nri-gpu observe",
        (
            POLICY,
            GPUS,
            DRIVER_ROOT,
            HOST_ROOT,
            *METRICS,
            _value("--pod-resources", "PATH", "PodResources socket (default: the kubelet's in /var/lib/kubelet)"),
            _value("--containerd-state", "DIR", "a containerd's state folder beside the usual ones"),
            _value("--run-dir", "DIR", "folder for its lock and control socket (default /run/nri-gpu-observe)"),
            _value("--state-dir", "DIR", "state folder of the daemon to wait for (default /run/nri-gpu)"),
            _switch("--watch-policy", "read the policy again whenever its file changes, such as a ConfigMap's"),
            LOG_LEVEL,
        ),
    ),
    Verb(
        "gpus",
        "nri_gpu.cli.gpus_command",
        "show the GPUs of this node as nri-gpu sees them",
        "Asks NVML once, in a child process, and adds what a running daemon knows about the GPUs' health. A GPU that\n"
        "cannot be granted is shown with the reason. Policy, driver root and simulated node are the running daemon's,\n"
        "unless options say otherwise. Example:\n"
        "  nri-gpu gpus --gpus /usr/share/nri-gpu/topologies/four-gpus.toml",
        (
            POLICY,
            GPUS,
            DRIVER_ROOT,
            STATE_DIR,
            OUTPUT,
            _dropped("--watch", "run `nri-gpu status --watch`, which shows holders and health, too"),
            _dropped("--topology", "run `nvidia-smi topo -m`, or read `links` of -o json"),
            _value("--record", "FILE", "write this node as a topology file for --gpus; -: print it"),
            _dropped("--scrub", "replace the UUIDs in the recorded file, if nobody shall see them"),
        ),
    ),
    Verb(
        "status",
        "nri_gpu.cli.status_command",
        "show who holds which GPU, in which mode and since when, and why a GPU is unavailable",
        "Asks the running daemon over its control socket, which root and the policy's control.group may use; where\n"
        "none runs, an observer (`nri-gpu observe`). Exits 1 when the daemon cannot grant GPUs at the moment, 69 when\n"
        "neither runs. Example:\n"
        "  nri-gpu status --watch",
        (
            _value("--state-dir", "DIR", "of the daemon, or of an observer (default: those of whichever answers)"),
            _option("-n", "--namespace", help="show only what concerns pods of this namespace", metavar="NAMESPACE"),
            _switch("--watch", "keep running: a live page on a terminal, a line for each change in a pipe"),
            _switch("--processes", "also list the processes on GPUs, which only root may; with -o json, these alone"),
            _switch("--refusals", "print all refusals that the daemon keeps, instead of the table"),
            _switch("--no-headers", "print only the rows, each with its GPU; faults go to standard error"),
            _switch("--alive", "print nothing; exit 0 if the daemon answers at all"),
            _switch("--probe", "exit 0 also while a successor stands by"),
            _value("--guard", "DIR", "report the guard with this --run-dir instead"),
            _option(
                "-o",
                "--output",
                help="wide: whole names, absolute times, and all that is known of each GPU; name: UUIDs; json: for "
                "programs; fields are added, never changed",
                choices=("text", "wide", "name", "json"),
            ),
        ),
    ),
    Verb(
        "history",
        "nri_gpu.cli.history_command",
        "show who had which GPU, from when to when",
        "Reads what the daemon keeps over reboots (docs/record.md); for root. A hold whose end nobody saw, as after a\n"
        "loss of power, ends with the last line that knew it. Example:\n"
        "  nri-gpu history ml --since 2d",
        (
            _option("about", help="a GPU's index or UUID, or NAMESPACE[/POD]", nargs="?", metavar="GPU|NAMESPACE"),
            *WINDOW,
            POLICY,
            STATE_DIR,
            OUTPUT,
        ),
    ),
    Verb(
        "usage",
        "nri_gpu.cli.usage_command",
        "sum up how many GPU-seconds each namespace, pod, model or MIG profile had",
        "A MIG device counts as its part of the GPU's compute slices. Each moment of a GPU is divided by those who\n"
        "held it then, so that they never have more seconds than it. Example, for October:\n"
        "  nri-gpu usage --since 2026-10 --until 2026-11 --csv",
        (
            _option(
                "--by",
                help="what to sum up by (default namespace)",
                choices=("namespace", "pod", "model", "profile"),
                default="namespace",
            ),
            *WINDOW,
            _switch("--csv", "print comma-separated values"),
            POLICY,
            STATE_DIR,
            OUTPUT,
        ),
    ),
    Verb(
        "repaired",
        "nri_gpu.cli.repaired_command",
        "confirm a GPU reset that the driver cannot report",
        "After an XID whose action is a reset, a GPU is withheld until a reset is proven: by the driver's recovery\n"
        "action (570 and newer), by a driver that was loaded anew, by a memory remapping that is done, by a boot, or\n"
        "by this word, which only root may give and the audit log records. Exits 1 when no reset was due. Example:\n"
        "  nri-gpu repaired 0000:3b:00.0",
        (
            _option("gpu", help="its UUID, index or PCI address", metavar="GPU"),
            STATE_DIR,
        ),
    ),
    Verb(
        "cordon",
        "nri_gpu.cli.cordon_command",
        "take a GPU out of use: nothing new is granted it",
        "What has the GPU keeps it, over restarts and boots: pods and their later containers, what the kubelet\n"
        "allocated, claims that are prepared. Everything new is refused, by annotation, kubelet and claim. Only root\n"
        "may say so, and the GPU's MIG devices are out of use with it. Exits 1 when nothing changed. Example:\n"
        "  nri-gpu cordon 3 --why ticket-4711",
        (
            _option("gpu", help="its UUID, index or PCI address", metavar="GPU"),
            _option(
                "--why", help="the reason, for root and `status`: 1 to 200 characters", metavar="TEXT", required=True
            ),
            _switch("--until-reset", "until a reset of the GPU is proven as well, or confirmed by `nri-gpu repaired`"),
            STATE_DIR,
        ),
    ),
    Verb(
        "uncordon",
        "nri_gpu.cli.uncordon_command",
        "take a GPU back into use",
        "Ends what `nri-gpu cordon` began. A GPU that is unhealthy stays withheld for that, and the answer says so.\n"
        "Only root may say so. Exits 1 when nothing changed. Example:\n"
        "  nri-gpu uncordon 3",
        (
            _option("gpu", help="its UUID, index or PCI address", metavar="GPU"),
            STATE_DIR,
        ),
    ),
    Verb(
        "verify",
        "nri_gpu.cli.verify_command",
        "prove that each container has the GPUs it was granted, and no others",
        "Compares every running container's OCI spec, mounts, environment and the kernel's device rules with its\n"
        "signed grant; beside an observer (`nri-gpu observe`), the device rules with what the kubelet, claims, CDI\n"
        "and Docker gave. Needs root. Exits 1 when one differs, 69 or 77 when something could not be seen. Example:\n"
        "  nri-gpu verify",
        (
            _dropped("--watch", "run `nri-gpu verify` from a timer, and read its exit code"),
            _dropped("--every", "set the interval of that timer", values=1),
            _value("--containerd-state", "DIR", "containerd's state folder (default: the usual ones)"),
            POLICY,
            STATE_DIR,
            OUTPUT,
        ),
    ),
    Verb(
        "blockers",
        "nri_gpu.cli.blockers_command",
        "show who keeps the driver loaded or a GPU in use, and what ends each",
        "Before a driver upgrade or the reset of a GPU: containers with a node, processes that have one open, and\n"
        "references to kernel modules, each with the command that ends it, in the order in which to end them; below\n"
        "them who breaks when the driver is replaced. It needs root, no daemon and no NVML, and changes nothing.\n"
        "Exits 1 when something keeps it, 69 or 77 when nothing does but not all could be seen. Example:\n"
        "  nri-gpu blockers",
        (
            _option("gpu", help="only who uses this GPU: its index, UUID or PCI address", nargs="?", metavar="GPU"),
            _value("--containerd-state", "DIR", "containerd's state folder (default: the usual ones)"),
            _value("--root", "DIR", "root folder of the host's files, in a pod that mounts them"),
            OUTPUT,
        ),
    ),
    Verb(
        "driver",
        "nri_gpu.cli.driver_command",
        "show which files of the NVIDIA driver containers can get, and which are missing",
        "Looks where `run` would and lists, by capability, libraries with the names that programs load them by,\n"
        "programs and configuration files. Exits 1 when files had to be left out, 69 when there is no driver.\n"
        "Example:\n"
        "  nri-gpu driver --driver-root /run/nvidia/driver",
        (POLICY, DRIVER_ROOT, STATE_DIR, OUTPUT),
    ),
    Verb(
        "check",
        "nri_gpu.cli.check_command",
        "check a policy file, and report all faults at once with their lines",
        "Exits 78 when the file has faults, and 1 where all that is wrong is a table without a key. Advice on a valid\n"
        "file does not change the exit code. The options of `run` that override the file do so here, and so do those\n"
        "that a running daemon was started with, unless they are given here: faults are those of all together. What\n"
        "differs between several --gpus names the file.\n"
        "Example:\n"
        "  nri-gpu check new-policy.toml",
        (
            _option("file", help="policy file (default /etc/nri-gpu/policy.toml)", nargs="?", metavar="FILE"),
            _switch("--forget", "first forget that a policy was in force, so that without a file the defaults apply"),
            _option(
                "--gpus",
                help="compare pools and limits with the GPUs of this topology file; may be given several times",
                metavar="FILE",
                action="append",
            ),
            _value(
                "--require-plugin",
                "NAME",
                "name that pods require: it is a fault if the plugin has another, or the guard has it",
            ),
            *OVERRIDES,
            STATE_DIR,
            OUTPUT,
        ),
    ),
    Verb(
        "doctor",
        "nri_gpu.cli.doctor_command",
        "show what is wrong on this node, from the kernel to the container, and how to fix it",
        "Changes nothing, and takes a second or two. Works without daemon, driver or root, and says what it could not\n"
        "see. Exits 1 when a finding is an error. Example:\n"
        "  nri-gpu doctor --bundle report.tar.gz",
        (
            POLICY,
            STATE_DIR,
            _value("--run-dir", "DIR", "the guard's --run-dir (default /run/nri-gpu-guard)"),
            _value("--root", "DIR", "root folder of the host's files, in a pod that mounts them"),
            _value("--bundle", "FILE.tar.gz", "also write a bundle for a bug report, without secrets"),
            OUTPUT,
        ),
    ),
    Verb(
        "cdi",
        "nri_gpu.cli.cdi_command",
        "write a CDI specification of the GPUs, without hooks, for Docker, podman and others",
        "Devices are named by index, by UUID, and `all`. If the node has no usable GPU (no driver, or a kernel module\n"
        "of another version), it prints why, removes an existing specification, and exits 69. It does the same, and\n"
        "exits 1, if another file in that folder has one of its names: runtimes resolve no such name. Example:\n"
        "  nri-gpu cdi generate --output /var/run/cdi/nri-gpu.json && docker run --device nvidia.com/gpu=0 ...",
        (
            _option("action", help="generate: print the specification, or write it to --output", choices=("generate",)),
            POLICY,
            GPUS,
            DRIVER_ROOT,
            _value("--stage-dir", "DIR", "folder for staged driver files (default /var/lib/nri-gpu/cdi)"),
            _value("--capabilities", "LIST", "driver capabilities to include (default: the policy's)"),
            _value("--output", "FILE", "file to write, ending in .json or .yaml; without it, or -: print"),
            _dropped("--watch", "enable nri-gpu-cdi.path, which keeps the file up to date; here it is written once"),
            _dropped("--log-level", "leave it out: this verb logs only warnings", values=1),
        ),
    ),
    Verb(
        "explain",
        "nri_gpu.cli.explain_command",
        "show what each container of a pod would get, and why, without a runtime",
        "Decides about the pods' containers in order, on an otherwise empty node, exactly as `run` would. Before, it\n"
        "allocates to limits and ResourceClaims as kubelet and scheduler would. With --gpus it needs no GPU either.\n"
        "Without, node and policy are those of the running daemon, unless options say otherwise.\n"
        "Exits 1 when a container would be refused. Example:\n"
        "  nri-gpu explain pod.yaml --gpus /usr/share/nri-gpu/topologies/four-gpus.toml",
        (
            _option("file", help="pods, or objects with pod templates; -: standard input", metavar="POD.yaml"),
            _option(
                "-n", "--namespace", help="namespace for objects without one (default: default)", metavar="NAMESPACE"
            ),
            POLICY,
            GPUS,
            DRIVER_ROOT,
            STATE_DIR,
            OUTPUT,
        ),
    ),
    Verb(
        "replay",
        "nri_gpu.cli.replay_command",
        "decide the requests of an audit log again, and print what differs",
        "With the recorded policies nothing differs. With --policy, try a change of policy on last week's requests.\n"
        "Several files are read as one log: pass the oldest first. Example:\n"
        "  nri-gpu replay /run/nri-gpu/audit.1.jsonl /run/nri-gpu/audit.jsonl --policy new.toml",
        (
            _option("files", help="audit logs, the oldest first", nargs="+", metavar="LOG"),
            _value("--policy", "FILE", "policy to use instead of the recorded ones"),
            OUTPUT,
        ),
    ),
    Verb(
        "try",
        "nri_gpu.cli.try_command",
        "make a pod that asks for a GPU, and say what became of it: the Job of `helm test` runs it",
        "Runs in a pod with an account that may make pods (templates/test.yaml of the chart). It asks as policy\n"
        "and options let pods ask: by limits, by a ResourceClaim, by annotation. It waits for 60 s at most,\n"
        "prints the GPU and the driver, or why there is none, and deletes what it made. Exits 1 when there is none.\n"
        "Example:\n"
        "  nri-gpu try --namespace nri-gpu --pod $HOSTNAME --kubelet",
        (
            _option("--namespace", help="the namespace of this pod", metavar="NAMESPACE", required=True),
            _value("--pod", "NAME", "this pod's name; what is made has its image, and its Job as owner"),
            _value("--place", "JSON", "the part of a pod's spec that says on which nodes it may run"),
            _value(
                "--observers", "LABELS", "ask for nothing, and look whether the observers with these labels are ready"
            ),
            POLICY,
            *OVERRIDES,
        ),
    ),
    Verb(
        "prepare",
        "nri_gpu.cli.prepare_command",
        "prepare the host: load kernel modules, make device nodes and /dev/char links",
        "Does only what is missing. Exits 1 when something is left for the administrator to fix. Makes no device node\n"
        "if the driver's parameter ModifyDeviceFiles is 0. Example:\n"
        "  nri-gpu prepare --dry-run",
        (
            _switch("--dry-run", "print what would be done, and change nothing"),
            _switch("--graphics", "also nvidia-modeset, for containers that use graphics"),
            DRIVER_ROOT,
            OUTPUT,
        ),
    ),
    Verb(
        "enable",
        "nri_gpu.cli.enable_command",
        "install and enable the unit or drop-in of a feature, from this installation",
        "A package's units are enabled by name, drop-ins linked; a checkout's are copied to start its own program.\n"
        "The policy stays as it is: what it lacks is printed. systemd is reloaded only with --now, and not while\n"
        "containers would lose GPUs by it. Needs root. Exits 1 when something is in the way, 69 when this node cannot\n"
        "have the feature. Example:\n"
        "  nri-gpu enable cdi --now",
        (
            FEATURE,
            _switch("--dry-run", "print what would be done, and change nothing"),
            _switch("--replace", "move a file that is in the way aside, to NAME.old"),
            _switch("--now", "reload systemd, and start the unit"),
            POLICY,
        ),
    ),
    Verb(
        "disable",
        "nri_gpu.cli.disable_command",
        "remove what `enable` installed for a feature, and nothing else",
        "A file that `enable` did not make, or that was changed since, stays and is named. Needs root. Example:\n"
        "  nri-gpu disable cdi --now",
        (
            FEATURE,
            _switch("--dry-run", "print what would be done, and change nothing"),
            _switch("--now", "stop the unit, and reload systemd"),
            POLICY,
        ),
    ),
)


ABOUT: Final = (
    "Gives containers NVIDIA GPUs through containerd's NRI, without a hook or a wrapper runtime. Pods ask by "
    'annotation: `gpu.nri.io: "2"`, or `gpu.nri.io/container.NAME: "device=0,1;mode=shared"`.'
)
MORE: Final = "`nri-gpu help VERB` shows the options of a verb, `nri-gpu version` (or -V) the version."
HELP_COLUMNS_MIN: Final = 40
NAME_COLUMNS: Final = 10  # of the longest name, and two blanks

# Headings of `nri-gpu help`, and their verbs.
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "every day": (
        "status",
        "history",
        "usage",
        "gpus",
        "verify",
        "blockers",
        "doctor",
        "explain",
        "cordon",
        "uncordon",
        "repaired",
    ),
    "setting up": ("prepare", "enable", "disable", "driver", "check", "replay", "cdi", "try"),
    "services": ("run", "guard", "dra", "observe"),
}
HELP: Final = ("help", "-h", "--help")
VERSION: Final = ("version", "-V", "--version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return an exit code. Raises: SystemExit, as argparse does."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if argv is None:
        _own_process(arguments)
    if not arguments and "NRI_PLUGIN_SOCKET" in os.environ:
        arguments = ["run"]  # started by the runtime itself, which passes no arguments
    try:
        code = _command(*arguments)
        sys.stdout.flush()
    except (PolicyError, InventoryError) as error:
        print("\n".join(map(str, error.faults)) or f"nri-gpu: {error}", file=sys.stderr)
        return Exit.of_faults(error.faults) if error.faults else Exit.UNAVAILABLE
    except CommandError as error:
        print(error, file=sys.stderr)
        return error.code
    except BrokenPipeError:
        _give_up_stdout()  # the reader has enough
        return Exit.OK
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # Python's own exit code, 1, would read as a finding
        if isinstance(error, OSError) and not _can_print():
            print(f"nri-gpu: the output cannot be written: {cause_of(error)}", file=sys.stderr)
            _give_up_stdout()
            return Exit.of(error)
        traceback.print_exc()
        return Exit.BUG
    return code


def _own_process(arguments: Sequence[str]) -> None:
    """Name this process, and open /dev/null for each stream that is closed: a file of ours would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: PTH123, SIM115
    from nri_gpu.system.proc import name_process  # not for those who only import this module

    name_process(arguments[0] if arguments[:1] in (["guard"], ["dra"], ["observe"]) else "")


def _command(first: str = "", *rest: str) -> int:
    """Run a verb, or show help or version. Return an exit code."""
    if first in HELP and rest:
        first, rest = rest[0], ("--help",)
    if first in VERSION:
        print(f"nri-gpu {__version__}")
        return Exit.OK
    if not first or first in HELP:
        print(_help(), file=sys.stdout if first else sys.stderr)
        return Exit.OK if first else Exit.USAGE
    args = parse(first, *rest)
    run = _imported(args.module)
    if args.dropped or not getattr(args, "log_level", None):  # a verb that serves sets up the log itself, at once
        from nri_gpu.daemon.logs import set_up_command  # not for --help, which needs no log

        set_up_command()
    _warn_of(args.dropped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that this locale lacks
    return run(args)


def _can_print() -> bool:
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _give_up_stdout() -> None:
    """Keep the interpreter from complaining at exit about what it cannot write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _imported(module: str) -> Callable[[argparse.Namespace], int]:
    """Return the verb.

    The garbage collector need not look through what is imported: that was a tenth of a start.
    """
    gc.disable()
    os.environ.setdefault("LOGURU_AUTOINIT", "False")  # no handler of its own, which would be a twentieth of a start
    run: Callable[[argparse.Namespace], int] = importlib.import_module(module).run
    gc.freeze()
    gc.enable()
    return run


def _warn_of(dropped: Mapping[str, str]) -> None:
    from loguru import logger  # set up by now

    for name, fix in dropped.items():
        logger.bind(name=name, fix=fix).warning("option was removed and is ignored")


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one sentence."""

    def format_help(self) -> str:
        from nri_gpu.cli.installed import here  # only for help

        return here(super().format_help())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # here, where main sees that nobody reads the help
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        _refuse(self.prog, message)


def parse(name: str, *words: str) -> argparse.Namespace:
    """Return the arguments of a verb. Raises: SystemExit: 2 for wrong ones, 0 where help was printed."""
    verb = next((each for each in VERBS if each.name == name), None)
    if verb is None:
        known = (*(each.name for each in VERBS), "help", "version")
        _refuse("nri-gpu", f'no verb "{name}"{_did_you_mean(name, known)}')
    parser = _Parser(
        prog=f"nri-gpu {verb.name}",
        description=f"{verb.help}\n\n{verb.teach}",
        epilog=f"{EXIT_HELP}\n\n{MANUAL_HELP.format(verb=f'-{verb.name}')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(module=verb.module, dropped={})
    add: Callable[..., object] = parser.add_argument
    for flags, settings in verb.options:
        add(*flags, **settings)
    options = [flag[2:] for flags, _ in verb.options for flag in flags if flag.startswith("--")]
    options += ["help", *(f"no-{option}" for option in options)]
    for word in itertools.takewhile("--".__ne__, words):
        option = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and not any(each.startswith(option) for each in options):
            meant = _did_you_mean(option, options).replace('"', '"--', 1)
            _refuse(parser.prog, f"unrecognized arguments: {word}{meant}")
    return parser.parse_args(words)


def _refuse(prog: str, what: str) -> NoReturn:
    print(f"{prog}: {what}: see `{prog} --help`", file=sys.stderr)
    sys.exit(Exit.USAGE)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    from nri_gpu.domain.text import did_you_mean  # brings difflib: only for a slip

    return did_you_mean(word, known)


def _help() -> str:
    """Return the verbs by their groups, each with its example, fit to the terminal."""
    columns = max(shutil.get_terminal_size().columns, HELP_COLUMNS_MIN)
    verbs = {verb.name: verb for verb in VERBS}
    lines = ["usage: nri-gpu VERB [options]", ""]
    lines += textwrap.wrap(ABOUT, columns)
    for group, names in GROUPS.items():
        lines += ["", f"{group}:"]
        for name in names:
            first = f"  {name:<{NAME_COLUMNS}}"
            lines += textwrap.wrap(verbs[name].help, columns, initial_indent=first, subsequent_indent=" " * len(first))
            lines.append(f"{' ' * len(first)}$ {verbs[name].example}")
    lines += ["", *textwrap.wrap(MORE, columns), "", *EXIT_HELP.splitlines(), "", MANUAL_HELP.format(verb="")]
    from nri_gpu.cli.installed import here  # only for help

    return here("\n".join(lines))
