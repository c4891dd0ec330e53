"""A runc that keeps nothing of a bundle's resources but its device rules, nor its OOM score, and then is the real one.

For cgroup v2 in a machine whose controllers belong to v1: memory, cpu and pids cannot be set there, while devices on
v2 are no controller but an eBPF program, which works. A negative OOM score needs a capability that root in a test
machine may lack. Run as `runc_devices_only.py REAL_RUNC ARGS...`.
"""

import itertools
import json
import os
import shlex
import sys
from pathlib import Path

CREATING = frozenset({"create", "run"})
BUNDLE_OPTIONS = ("--bundle", "-b")


def bundle_of(arguments: list[str]) -> Path | None:
    """The bundle that a create or a run is about; None for other commands."""
    if not CREATING.intersection(arguments):
        return None
    for option, value in itertools.pairwise(arguments):
        if option in BUNDLE_OPTIONS:
            return Path(value)
    return Path.cwd()


def keep_devices_only(config: Path) -> None:
    spec = json.loads(config.read_text())
    spec["linux"]["resources"] = {"devices": spec["linux"].get("resources", {}).get("devices", [])}
    spec.get("process", {}).pop("oomScoreAdj", None)
    config.write_text(json.dumps(spec))


def write_wrapper(
    wrapper: Path, real: Path, python: Path = Path(sys.executable), script: Path = Path(__file__)
) -> Path:
    """Write the program that containerd takes for runc; it runs this file (script), and in the end `real`."""
    filtered = shlex.join([str(python), "-I", "-S", str(script), str(real)])
    # Python only where a bundle is read: it would add some 20 ms to each of runc's other commands.
    wrapper.write_text(
        "#!/bin/sh\n"
        f'for argument; do case $argument in create | run) exec {filtered} "$@" ;; esac; done\n'
        f'exec {shlex.quote(str(real))} "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper


def main() -> None:
    real, arguments = sys.argv[1], sys.argv[2:]
    if bundle := bundle_of(arguments):
        keep_devices_only(bundle / "config.json")
    os.execv(real, [real, *arguments])


if __name__ == "__main__":
    main()
