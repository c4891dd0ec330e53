"""The few verbs of crictl that our pages use, for machines without it: Debian has no package of it.

    python -m tests.support.crictl config --set runtime-endpoint=unix://SOCKET | run --no-pull CONTAINER.json POD.json |
        exec ID COMMAND... | pods --quiet --name PATTERN | rmp --force ID...

It asks the runtime the same over the same socket; what it prints is what crictl 1.36 prints.
"""

import re
import sys
from pathlib import Path
from typing import Final

from google.protobuf import json_format

from tests.support._pb import cri_tests_pb2 as pb
from tests.support.cri import ContainerId, Cri, CriError, PodId

FATAL: Final = 1
CONFIG: Final = Path("/etc/crictl.yaml")


def main(words: list[str]) -> int:
    """Returns an exit code."""
    match words:
        case ["config", "--set", setting]:
            key, _, value = setting.partition("=")
            CONFIG.write_text(f"{key}: {value}\n")
            return 0
        case _:
            socket = CONFIG.read_text().split("unix://")[1].strip()
            with Cri(Path(socket)) as cri:
                return _ask(cri, words)


def _ask(cri: Cri, words: list[str]) -> int:
    match words:
        case ["run", "--no-pull", container, pod]:
            return _run(cri, Path(container), Path(pod))
        case ["exec", container, *command]:
            done = cri.execute(ContainerId(container), *command)
            print(done.stdout, end="")
            print(done.stderr, end="", file=sys.stderr)
            return done.code
        case ["pods", "--quiet", "--name", pattern]:
            print(*(each.id for each in cri.pods() if re.search(pattern, each.metadata.name)), sep="\n")
        case ["rmp", "--force", *pods]:
            for pod in pods:
                cri.remove_pod(PodId(pod))
                print(f"Removed sandbox {pod}")
        case _:
            raise SystemExit(f"this stand-in for crictl does not know: {' '.join(words)}")
    return 0


def _run(cri: Cri, container: Path, pod: Path) -> int:
    sandbox = cri.run_pod_as(json_format.Parse(pod.read_text(), pb.PodSandboxConfig()))
    try:
        created = cri.create_as(sandbox, json_format.Parse(container.read_text(), pb.ContainerConfig()))
        cri.start(created)
    except CriError as error:
        print(f'level=fatal msg="running container: {error.details}"', file=sys.stderr)
        return FATAL
    print(created)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
