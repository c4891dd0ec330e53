"""What a fuzz target is: what is done with bytes, what to begin with, and the inputs that are kept.

A target's `check` states the invariant of one untrusted entrance. Any exception that comes out of it is a bug, and so
are bytes that take longer than INPUT_S or more than MEMORY_MIB.

The kept inputs lie in corpus/<target>/, in three forms: `*.b64` (of `--keep`) has one input a line, compressed;
`*.hex` is hex with comments after #, one input a file; any other file is an input as it is. An input that once
broke the invariant is a file of its own, whose name says what it did.
"""

from __future__ import annotations

import atexit
import base64
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

CORPUS: Final = Path(__file__).parent / "corpus"
FOUND: Final = "found.b64"  # the name of what fuzzing found and `--keep` made small
INPUT_S: Final = 10  # seconds for one input, on a busy machine and with instrumented code
MEMORY_MIB: Final = 1024  # of the whole process

Mutate = Callable[[bytes, int, int], bytes]  # (input, most bytes, seed) -> another input


class Target(Struct, frozen=True):
    """One entrance.

    check: whether these bytes were understood. good, bad: inputs that must be, and must not be. pieces: what is worth
    putting in. mutate: where random bytes would get no further than the first parser. bytes_max: of an input; a few
    times what the entrance itself allows, or what makes quadratic time show.
    """

    check: Callable[[bytes], object]
    good: Sequence[bytes]
    bad: Sequence[bytes] = ()
    pieces: Sequence[str | bytes] = ()
    mutate: Mutate | None = None
    bytes_max: int = 1 << 14


Targets = Mapping[str, Target]


def scratch() -> Path:
    """A folder for files that a check writes, until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="nri-gpu-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def written(data: bytes, folder: Path, *parts: str) -> Path:
    """A file with that content, below that folder."""
    file = folder.joinpath(*parts)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def chosen(readers: Mapping[str, Callable[[bytes], object]]) -> Callable[[bytes], object]:
    """A check for inputs whose first line names the reader of the rest."""

    def check(data: bytes) -> object:
        name, _, rest = data.partition(b"\n")
        reader = readers.get(name.decode(errors="replace"))
        return reader(rest) if reader else None

    return check


def named(name: str, *inputs: str | bytes) -> Iterator[bytes]:
    """Inputs for that reader of a `chosen`."""
    for each in inputs:
        yield f"{name}\n".encode() + (each.encode(errors="surrogatepass") if isinstance(each, str) else each)


def words(text: str) -> list[str]:
    """Pieces without blanks in them, written with blanks between them."""
    return text.split()


def kept(name: str) -> Iterator[tuple[str, bytes]]:
    """The inputs that are kept for a target, each with what it is called."""
    for path in sorted((CORPUS / name).glob("*")):
        match path.suffix:
            case ".b64":
                for number, line in enumerate(path.read_text().splitlines()):
                    yield f"{path.stem}-{number}", zlib.decompress(base64.b64decode(line))
            case ".hex":
                lines = path.read_text().splitlines()
                yield path.stem, bytes.fromhex("".join(line.partition("#")[0] for line in lines))
            case _:
                yield path.name, path.read_bytes()


def keep(name: str, inputs: Sequence[bytes]) -> Path:
    """Put these in place of what fuzzing found before."""
    path = CORPUS / name / FOUND
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (base64.b64encode(zlib.compress(each, 9)).decode() for each in sorted(inputs, key=lambda b: (len(b), b)))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def seeds(name: str, target: Target) -> Iterator[tuple[str, bytes]]:
    """All that a run begins with."""
    for kind, inputs in (("good", target.good), ("bad", target.bad)):
        yield from ((f"{kind}-{number}", each) for number, each in enumerate(inputs))
    yield from kept(name)


def dictionary(pieces: Sequence[str | bytes]) -> str:
    """The pieces as libFuzzer reads them."""
    raw = (each.encode(errors="surrogatepass") if isinstance(each, str) else each for each in pieces)
    return "".join('"' + "".join(f"\\x{byte:02x}" for byte in each) + '"\n' for each in raw if each)
