"""The command: a table of verbs, each a function that returns an exit code."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from nri_gpu import __version__
from nri_gpu.domain.errors import Exit, InventoryError, PolicyError

EXIT_HELP: Final = """exit codes:
  0 ok   1 a finding or a refusal   2 wrong usage   69 not available   70 a bug   77 no permission   78 configuration"""


class Option(Struct, frozen=True):
    """One argument. flags: `--long` spellings, or a bare name for a positional one."""

    flags: tuple[str, ...]
    help: str
    settings: Mapping[str, Any]


class Verb(Struct, frozen=True):
    """One verb. module: imported only when it is the one called, so that none pays for another."""

    name: str
    module: str
    help: str
    teach: str
    options: tuple[Option, ...]


def _option(*flags: str, help: str, **settings: object) -> Option:
    return Option(flags, help, settings)


POLICY: Final = _option("--policy", help="policy file (default /etc/nri-gpu/policy.toml)", metavar="FILE")
GPUS: Final = _option(
    "--gpus", help="simulate the node that this topology file describes, instead of asking NVML", metavar="FILE"
)
DRIVER_ROOT: Final = _option("--driver-root", help="folder that the host's NVIDIA driver lives under", metavar="DIR")
STATE_DIR: Final = _option("--state-dir", help="the daemon's state folder (default /run/nri-gpu)", metavar="DIR")
OUTPUT: Final = _option(
    "-o", "--output", help="`json` for programs; its fields are only ever added to", choices=("text", "json")
)

LOG_LEVEL: Final = _option(
    "--log-level",
    help="least level logged (default INFO)",
    type=str.upper,
    choices=("TRACE", "DEBUG", "INFO", "WARNING", "ERROR"),
    default="INFO",
)

VERBS: Final = (
    Verb(
        "run",
        "nri_gpu.cli.run",
        "serve the container runtime: decide and inject, until told to stop",
        "Connects to the runtime's NRI socket, and again whenever it goes away. Options override the policy file.\n"
        "SIGHUP reads the policy again (a broken one is reported and the old one kept) and looks at the node again.\n"
        "SIGTERM answers what is in flight and stops.",
        (
            _option("--socket", help="the runtime's NRI socket (default /var/run/nri/nri.sock)", metavar="PATH"),
            _option("--index", help="two digits: our place among NRI plugins (default 10)", metavar="NN"),
            POLICY,
            GPUS,
            DRIVER_ROOT,
            _option(
                "--kubelet",
                help="be the kubelet's device plugin, too, or not (docs/kubernetes.md)",
                action=argparse.BooleanOptionalAction,
            ),
            _option(
                "--kubelet-registration",
                help="register: we call the kubelet (default); watcher: it looks for us in plugins_registry",
                metavar="WORD",
            ),
            _option(
                "--driver-host-root",
                help="what the runtime calls --driver-root, where that is a mount of it in a pod",
                metavar="DIR",
            ),
            _option("--state-dir", help="folder for key and ledger (default /run/nri-gpu)", metavar="DIR"),
            _option("--stage-dir", help="folder for staged driver files", metavar="DIR"),
            _option(
                "--stand-by",
                help="where a daemon runs with this state folder: wait, and take over from it when it is told to stop",
                action="store_true",
            ),
            _option("--labels", help="file for Node Feature Discovery with the node's labels", metavar="FILE"),
            _option(
                "--watch-policy",
                help="read the policy again whenever its file is another one, as a ConfigMap's",
                action="store_true",
            ),
            LOG_LEVEL,
        ),
    ),
    Verb(
        "guard",
        "nri_gpu.cli.guard",
        "refuse containers that ask for GPUs and were granted none, whatever became of `run`",
        "A second NRI plugin, in a process of its own. It grants nothing: it reads the marks' key from the state\n"
        "folder of `run`, and refuses to start (with NRI 0.10, to create) what asked and carries no valid grant.\n"
        "The policy's [guard] section is read when it starts.",
        (
            _option("--socket", help="the runtime's NRI socket (default /var/run/nri/nri.sock)", metavar="PATH"),
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
        "Asks NVML once, in a child process, and prints what it said, with what a running daemon knows of the GPUs'\n"
        "health; a GPU that cannot be granted has its reason.",
        (
            POLICY,
            GPUS,
            DRIVER_ROOT,
            STATE_DIR,
            OUTPUT,
            _option(
                "--watch",
                help="go on, and print each change, of the running daemon where there is one",
                action="store_true",
            ),
            _option(
                "--topology", help="how GPUs reach each other, as `nvidia-smi topo -m` has it", action="store_true"
            ),
            _option("--record", help="write the node as a topology file, for --gpus elsewhere", metavar="FILE"),
            _option("--scrub", help="with --record: made-up UUIDs in place of the real ones", action="store_true"),
        ),
    ),
    Verb(
        "status",
        "nri_gpu.cli.status",
        "show who holds which GPU, in which mode and since when, and why another is not to be had",
        "Asks the running daemon over its control socket: root, or the group that the policy names, and nobody over a\n"
        "network. Exits 1 when the daemon cannot grant just now, 69 when there is none.",
        (
            STATE_DIR,
            _option("--alive", help="print nothing; exit 0 as soon as it answers at all", action="store_true"),
            _option("--probe", help="exit 0 also while its successor stands by (run --stand-by)", action="store_true"),
            _option("--guard", help="the same of the guard with this --run-dir, connected or --alive", metavar="DIR"),
            OUTPUT,
        ),
    ),
    Verb(
        "driver",
        "nri_gpu.cli.driver",
        "show what of the NVIDIA driver is found for containers, and what is not",
        "Looks where `run` would, by each capability: libraries with the names programs load them by, programs,\n"
        "configuration. Exits 1 when files had to be left out, 69 when there is no driver.",
        (POLICY, DRIVER_ROOT, OUTPUT),
    ),
    Verb(
        "check",
        "nri_gpu.cli.check",
        "check a policy file: every fault at once, with its place",
        "Exits 78 when the file has faults. Advice on a good file does not change the exit code. Where a daemon runs,\n"
        "the options that it was started with go before the file here, too.",
        (
            _option("file", help="policy file (default /etc/nri-gpu/policy.toml)", nargs="?", metavar="FILE"),
            _option("--gpus", help="hold pools and limits against this topology file's GPUs", metavar="FILE"),
            STATE_DIR,
            OUTPUT,
        ),
    ),
    Verb(
        "cdi",
        "nri_gpu.cli.cdi",
        "describe the GPUs as a CDI specification without hooks, for Docker, podman and others",
        "Devices are named by index, by UUID, and `all`. Where nothing true can be said (no driver, or its module has\n"
        "another version), it says why, removes a specification that is there already, and exits 69. Example:\n"
        "  nri-gpu cdi generate --output /var/run/cdi/nri-gpu.json && docker run --device nvidia.com/gpu=0 ...",
        (
            _option("action", help="`generate`: print it, or write it to --output", choices=("generate",)),
            POLICY,
            GPUS,
            DRIVER_ROOT,
            _option("--stage-dir", help="folder for staged driver files (default /var/lib/nri-gpu/cdi)", metavar="DIR"),
            _option("--capabilities", help="parts of the driver (default: the policy's)", metavar="LIST"),
            _option("--output", help="file to write whole or not at all; ends in .json or .yaml", metavar="FILE"),
            _option("--watch", help="go on: write it again when driver or GPUs change", action="store_true"),
            LOG_LEVEL,
        ),
    ),
    Verb(
        "explain",
        "nri_gpu.cli.explain",
        "what each container of a pod would get, and why; no runtime, and with --gpus no GPU",
        "Decides for the pod's containers in order, on an otherwise empty node, exactly as `run` would.\n"
        "Exits 1 when a container would be refused. Example:\n"
        "  nri-gpu explain pod.yaml --gpus config/topologies/four-gpus.toml",
        (
            _option("file", help="a pod, or anything with a pod template; `-` is standard input", metavar="POD.yaml"),
            POLICY,
            GPUS,
            DRIVER_ROOT,
            OUTPUT,
        ),
    ),
    Verb(
        "replay",
        "nri_gpu.cli.replay",
        "decide again what an audit log recorded, and print what differs",
        "Decisions are pure, so by the recorded policies nothing differs. With --policy, a change can be tried on\n"
        "last week's requests. Several files go on from one another, the oldest first. Example:\n"
        "  nri-gpu replay /run/nri-gpu/audit.1.jsonl /run/nri-gpu/audit.jsonl --policy new.toml",
        (
            _option("files", help="audit logs, the oldest first", nargs="+", metavar="LOG"),
            _option("--policy", help="policy in place of those recorded", metavar="FILE"),
            OUTPUT,
        ),
    ),
    Verb(
        "prepare",
        "nri_gpu.cli.prepare",
        "make the host ready: kernel modules, device nodes, /dev/char links",
        "Does what is missing and nothing twice, and exits 1 when something is left that only people can mend.\n"
        "Where the driver's ModifyDeviceFiles is 0 it makes no node. --dry-run prints and changes nothing.",
        (
            _option("--dry-run", help="print what would be done, and do nothing", action="store_true"),
            _option("--graphics", help="nvidia-modeset too, for containers that draw", action="store_true"),
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
    try:
        code = run(args)
        sys.stdout.flush()
    except PolicyError as error:
        print("\n".join(map(str, error.faults)), file=sys.stderr)
        return Exit.CONFIGURATION
    except InventoryError as error:
        print(f"nri-gpu: {error}", file=sys.stderr)
        return Exit.CONFIGURATION if getattr(args, "gpus", None) else Exit.UNAVAILABLE
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
    """The verb. What is imported stays: looking through it again and again was a tenth of a start."""
    gc.disable()
    run: Callable[[argparse.Namespace], int] = importlib.import_module(module).run
    gc.freeze()
    gc.enable()
    return run


def _parser(verbs: Sequence[Verb] = VERBS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nri-gpu",
        description="Gives containers NVIDIA GPUs through containerd's NRI: no hook binary, no wrapper runtime.",
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
        for option in verb.options:
            sub.add_argument(*option.flags, help=option.help, **option.settings)
    return parser
