"""Host programs for an image, with the loader and the libraries that they need: for tests of what a loader finds."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.errors import HarnessError
from tests.support.image import Entry, File

# "libc.so.6 => /lib/libc.so.6 (0x7f…)" for a library, "/lib64/ld-linux-x86-64.so.2 (0x7f…)" for the loader.
RESOLVED = re.compile(r"(/\S+) \(0x[0-9a-f]+\)$")
MISSING = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)


def glibc_files(programs: Mapping[str, Path]) -> dict[str, Entry]:
    """Layer entries for the programs (path in the image -> file on the host) and all that they are linked to.

    Libraries come under the paths by which the host's loader found them. Programs must be ones we trust: `ldd` may
    run them. Raises: HarnessError when a library is missing on the host.
    """
    found = {library for program in programs.values() for library in libraries(program)}
    own: dict[str, Entry] = {inside: File(program.read_bytes(), 0o755) for inside, program in programs.items()}
    linked: dict[str, Entry] = {library: File(Path(library).read_bytes(), 0o755) for library in found}
    return linked | own


def libraries(program: Path) -> Iterator[str]:
    """What a program or a library is linked to, by the paths the host's loader finds. Raises: HarnessError."""
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    if missing := MISSING.findall(done.stdout):
        raise HarnessError(f"{program} needs {', '.join(missing)}, which this machine does not have")
    if done.returncode:
        return  # a static program
    for line in done.stdout.splitlines():
        if match := RESOLVED.search(line):
            yield match[1]
