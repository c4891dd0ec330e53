"""A machine that is an unprivileged container: a real user namespace with a map of its own, in which a program runs."""

import subprocess
from pathlib import Path
from typing import Final

LXC: Final = "0 0 65536"  # as LXC's usual map has 65534, too; but root is the real one, so that it can read everything
SMALL: Final = "0 0 1000"  # without 65534
OF_THE_HOST: Final = 70000  # in neither


def run(*command: str, ids: str = LXC, own_init: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program as root of a new user namespace, with its own mounts. own_init: the program is process 1, too."""
    alone = ("unshare", "--mount", *(("--pid", "--fork", "--mount-proc") if own_init else ()))
    waiting = ("unshare", "--user", "sh", "-c", 'echo; read go; exec "$@"', "sh", *alone, *command)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(waiting, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        for name in ("gid_map", "uid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(f"{ids}\n", "ascii")
        out, err = process.communicate("\n", timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
