"""The `nri-gpu` command: a table of verbs, each a module with a `run` that returns an exit code."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from nri_gpu import __version__
from nri_gpu.domain.errors import CommandError, Exit, InventoryError, PolicyError

EXIT_HELP: Final = """exit codes:
  0 ok   1 a finding or a refusal   2 wrong usage   69 unavailable   70 a bug   77 no permission   78 configuration"""


# Spellings of an option, or the bare name of a positional argument; and what argparse has to know of it.
Option = tuple[tuple[str, ...], Mapping[str, object]]


class Verb(Struct, frozen=True):
    """One verb. module: imported only when the verb is called."""

    name: str
    module: str
    help: str
    teach: str
    options: tuple[Option, ...]


def _option(*flags: str, help: str, **settings: object) -> Option:
    return flags, {"help": help, **settings}


SOCKET: Final = _option("--socket", help="the runtime's NRI socket (default /var/run/nri/nri.sock)", metavar="PATH")
POLICY: Final = _option("--policy", help="policy file (default /etc/nri-gpu/policy.toml)", metavar="FILE")
GPUS: Final = _option("--gpus", help="simulate the node in this topology file instead of asking NVML", metavar="FILE")
DRIVER_ROOT: Final = _option("--driver-root", help="root folder of the host's NVIDIA driver (default /)", metavar="DIR")
STATE_DIR: Final = _option("--state-dir", help="the daemon's state folder (default /run/nri-gpu)", metavar="DIR")
OUTPUT: Final = _option(
    "-o", "--output", help="json: for programs; fields are added, never changed", choices=("text", "json")
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
        "nri_gpu.cli.run",
        "serve the container runtime: decide about GPUs and inject them, until stopped",
        "Connects to the runtime's NRI socket, and reconnects when it goes away. Options override the policy file.\n"
        "SIGHUP reloads the policy (a broken one is reported, and the old one stays) and asks NVML again.\n"
        "SIGTERM answers the requests in flight and stops.",
        (
            SOCKET,
            _option("--index", help="two digits: index among NRI plugins (default 10)", metavar="NN"),
            POLICY,
            GPUS,
            DRIVER_ROOT,
            _option(
                "--kubelet",
                help="also be the kubelet's device plugin, or not (docs/kubernetes.md)",
                action=argparse.BooleanOptionalAction,
            ),
            _option(
                "--kubelet-registration",
                help="register: call the kubelet (default); watcher: be found in plugins_registry",
                metavar="WORD",
            ),
            _option(
                "--driver-host-root",
                help="--driver-root as the runtime sees it, where ours is a mount in a pod",
                metavar="DIR",
            ),
            _option("--state-dir", help="folder for key and ledger (default /run/nri-gpu)", metavar="DIR"),
            _option("--stage-dir", help="folder for staged driver files", metavar="DIR"),
            _option(
                "--stand-by",
                help="wait for the daemon that runs with this state folder, and take over when it stops",
                action="store_true",
            ),
            _option("--labels", help="write the node's labels to this file for Node Feature Discovery", metavar="FILE"),
            _option("--metrics", help="serve metrics for Prometheus at this address or socket", metavar="ADDRESS"),
            _option("--metrics-public", help="also where other machines reach it", action="store_true", default=None),
            _option(
                "--watch-policy",
                help="reload the policy whenever its file changes, such as a ConfigMap's",
                action="store_true",
            ),
            LOG_LEVEL,
        ),
    ),
    Verb(
        "guard",
        "nri_gpu.cli.guard",
        "stop containers that ask for GPUs and were granted none, even while `run` is down",
        "A second NRI plugin, in a process of its own. It grants nothing: it checks signed grants with the key in the\n"
        "state folder of `run`, and refuses to start (with NRI 0.10: to create) a container that asks for GPUs and\n"
        "has no valid grant. It reads the policy's [guard] section when it starts.",
        (
            SOCKET,
            POLICY,
            _option("--state-dir", help="state folder of `run` (default /run/nri-gpu); only read", metavar="DIR"),
            _option("--run-dir", help="folder for the guard's own state (default /run/nri-gpu-guard)", metavar="DIR"),
            LOG_LEVEL,
        ),
    ),
    Verb(
        "gpus",
        "nri_gpu.cli.gpus",
        "show the GPUs of this node as nri-gpu sees them",
        "Asks NVML once, in a child process, and adds what a running daemon knows about the GPUs' health. A GPU that\n"
        "cannot be granted is shown with the reason.",
        (
            POLICY,
            GPUS,
            DRIVER_ROOT,
            STATE_DIR,
            OUTPUT,
            _option("--watch", help=argparse.SUPPRESS, action="store_true"),  # says what to use instead
            _option(
                "--topology", help="how the GPUs are connected, as `nvidia-smi topo -m` shows it", action="store_true"
            ),
            _option("--record", help="write this node as a topology file for --gpus", metavar="FILE"),
            _option("--scrub", help="with --record: replace the UUIDs by made-up ones", action="store_true"),
        ),
    ),
    Verb(
        "status",
        "nri_gpu.cli.status",
        "show who holds which GPU, in which mode and since when, and why a GPU is unavailable",
        "Asks the running daemon over its control socket, which root and the policy's control.group may use. Exits 1\n"
        "when the daemon cannot grant GPUs at the moment, 69 when none runs.",
        (
            STATE_DIR,
            _option(
                "--watch",
                help="stay, live on a terminal; into a pipe, print a line for each change",
                action="store_true",
            ),
            _option("--alive", help="print nothing; exit 0 if the daemon answers at all", action="store_true"),
            _option("--probe", help="exit 0 also while a successor stands by", action="store_true"),
            _option("--guard", help="ask about the guard with this --run-dir instead", metavar="DIR"),
            OUTPUT,
        ),
    ),
    Verb(
        "verify",
        "nri_gpu.cli.verify",
        "prove that each container has the GPUs it was granted, and no others",
        "Compares every running container's OCI spec, mounts, environment and the kernel's device rules with its\n"
        "signed grant. Needs root. Exits 1 when one differs, 69 or 77 when something could not be seen.",
        (
            _option("--watch", help="keep looking, and print what changes", action="store_true"),
            _option(
                "--every",
                help="with --watch: seconds between looks (default 5)",
                type=float,
                default=5.0,
                metavar="SECONDS",
            ),
            _option("--containerd-state", help="containerd's state folder (default: the usual ones)", metavar="DIR"),
            POLICY,
            STATE_DIR,
            OUTPUT,
        ),
    ),
    Verb(
        "driver",
        "nri_gpu.cli.driver",
        "show which files of the NVIDIA driver containers can get, and which are missing",
        "Looks where `run` would and lists, by capability, libraries with the names that programs load them by,\n"
        "programs and configuration files. Exits 1 when files had to be left out, 69 when there is no driver.",
        (POLICY, DRIVER_ROOT, OUTPUT),
    ),
    Verb(
        "check",
        "nri_gpu.cli.check",
        "check a policy file, and report all faults at once with their lines",
        "Exits 78 when the file has faults. Advice on a valid file does not change the exit code. If a daemon runs,\n"
        "the options that it was started with override the file here, too.",
        (
            _option("file", help="policy file (default /etc/nri-gpu/policy.toml)", nargs="?", metavar="FILE"),
            _option("--gpus", help="compare pools and limits with the GPUs of this topology file", metavar="FILE"),
            STATE_DIR,
            OUTPUT,
        ),
    ),
    Verb(
        "doctor",
        "nri_gpu.cli.doctor",
        "show what is wrong on this node, from the kernel to the container, and how to fix it",
        "Changes nothing, and takes a second or two. Works without daemon, driver or root, and says what it could not\n"
        "see. Exits 1 when a finding is an error.",
        (
            POLICY,
            STATE_DIR,
            _option("--run-dir", help="the guard's --run-dir (default /run/nri-gpu-guard)", metavar="DIR"),
            _option("--root", help="root folder of the host's files, in a pod that mounts them", metavar="DIR"),
            _option(
                "--bundle", help="also pack what was seen, for a bug report, without secrets", metavar="FILE.tar.gz"
            ),
            OUTPUT,
        ),
    ),
    Verb(
        "cdi",
        "nri_gpu.cli.cdi",
        "write a CDI specification of the GPUs, without hooks, for Docker, podman and others",
        "Devices are named by index, by UUID, and `all`. If the node has no usable GPU (no driver, or a kernel module\n"
        "of another version), it prints why, removes an existing specification, and exits 69. Example:\n"
        "  nri-gpu cdi generate --output /var/run/cdi/nri-gpu.json && docker run --device nvidia.com/gpu=0 ...",
        (
            _option("action", help="generate: print it, or write it to --output", choices=("generate",)),
            POLICY,
            GPUS,
            DRIVER_ROOT,
            _option("--stage-dir", help="folder for staged driver files (default /var/lib/nri-gpu/cdi)", metavar="DIR"),
            _option("--capabilities", help="driver capabilities to include (default: the policy's)", metavar="LIST"),
            _option("--output", help="file to write, ending in .json or .yaml", metavar="FILE"),
            _option(
                "--watch", help="keep running, and update the file when driver or GPUs change", action="store_true"
            ),
            LOG_LEVEL,
        ),
    ),
    Verb(
        "explain",
        "nri_gpu.cli.explain",
        "show what each container of a pod would get, and why, without a runtime",
        "Decides about the pod's containers in order, on an otherwise empty node, exactly as `run` would. With --gpus\n"
        "it needs no GPU either. Exits 1 when a container would be refused. Example:\n"
        "  nri-gpu explain pod.yaml --gpus config/topologies/four-gpus.toml",
        (
            _option("file", help="a pod, or anything with a pod template; -: standard input", metavar="POD.yaml"),
            POLICY,
            GPUS,
            DRIVER_ROOT,
            OUTPUT,
        ),
    ),
    Verb(
        "replay",
        "nri_gpu.cli.replay",
        "decide the requests of an audit log again, and print what differs",
        "With the recorded policies nothing differs. With --policy, try a change of policy on last week's requests.\n"
        "Several files continue each other, the oldest first. Example:\n"
        "  nri-gpu replay /run/nri-gpu/audit.1.jsonl /run/nri-gpu/audit.jsonl --policy new.toml",
        (
            _option("files", help="audit logs, the oldest first", nargs="+", metavar="LOG"),
            _option("--policy", help="policy to use instead of the recorded ones", metavar="FILE"),
            OUTPUT,
        ),
    ),
    Verb(
        "prepare",
        "nri_gpu.cli.prepare",
        "prepare the host: load kernel modules, make device nodes and /dev/char links",
        "Does only what is missing. Exits 1 when something is left for the administrator to fix. Makes no device node\n"
        "if the driver's parameter ModifyDeviceFiles is 0.",
        (
            _option("--dry-run", help="print what would be done, and change nothing", action="store_true"),
            _option("--graphics", help="also nvidia-modeset, for containers that use graphics", action="store_true"),
            DRIVER_ROOT,
            OUTPUT,
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns an exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments and "NRI_PLUGIN_SOCKET" in os.environ:
        arguments = ["run"]  # started by the runtime itself, which passes no arguments
    asked = [verb for verb in VERBS if [verb.name] == arguments[:1]]
    args = _parser(asked or VERBS).parse_args(arguments)  # describing all verbs takes longer than reading the policy
    run = _imported(args.module)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that this locale lacks
    try:
        code = run(args)
        sys.stdout.flush()
    except PolicyError as error:
        print("\n".join(map(str, error.faults)), file=sys.stderr)
        return Exit.CONFIGURATION
    except InventoryError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.CONFIGURATION if getattr(args, "gpus", None) else Exit.UNAVAILABLE
    except CommandError as error:
        print(error, file=sys.stderr)
        return error.code
    except BrokenPipeError:
        # The reader has enough; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except KeyboardInterrupt:
        return 130
    except Exception:  # Python's own exit code, 1, would read as a finding
        traceback.print_exc()
        return Exit.BUG
    return code


def _imported(module: str) -> Callable[[argparse.Namespace], int]:
    """The verb, which logs warnings alone until it asks for more.

    The garbage collector need not look through what is imported: that was a tenth of a start.
    """
    gc.disable()
    run: Callable[[argparse.Namespace], int] = importlib.import_module(module).run
    from nri_gpu.daemon.logs import set_up_command  # not for --help, which needs no log

    gc.freeze()
    gc.enable()
    set_up_command()
    return run


def _parser(verbs: Sequence[Verb] = VERBS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nri-gpu",
        description="Gives containers NVIDIA GPUs through containerd's NRI, without a hook or a wrapper runtime.",
        epilog='Pods ask by annotation: `gpu.nri.io: "2"`, or `gpu.nri.io/container.NAME: "device=0,1;mode=shared"`.\n'
        f"{EXIT_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nri-gpu {__version__}")
    rows = parser.add_subparsers(metavar="VERB", required=True)
    for verb in verbs:
        sub = rows.add_parser(
            verb.name,
            help=verb.help,
            description=f"{verb.help}\n\n{verb.teach}",
            epilog=EXIT_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(module=verb.module)
        add: Callable[..., object] = sub.add_argument
        for flags, settings in verb.options:
            add(*flags, **settings)
    return parser
