"""One target under libFuzzer, in a process of its own: `python -m tests.fuzz.child NAME FOLDER FLAGS-OF-LIBFUZZER...`.

libFuzzer ends the process itself, so nothing comes after it. Only nri_gpu is instrumented: the edges that are counted
are ours. An input that breaks the invariant is put into FOLDER here and at once: what atheris does instead takes
seconds on a busy machine, and libFuzzer's own alarm may end it before.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import atheris
from loguru import logger

with atheris.instrument_imports(include=["nri_gpu"]):
    from nri_gpu.daemon.logs import set_up_command
    from tests.fuzz.catalogue import load

    TARGET = load(sys.argv[1])

BROKE = Path(sys.argv[2])
EXIT = 77  # libFuzzer's, of a target that broke

P = ParamSpec("P")
R = TypeVar("R")


def ending(call: Callable[P, R], kind: str, last: Callable[P, bytes]) -> Callable[P, R]:
    """The same, but an exception ends the process. kind: how the file is called that gets `last`, the input."""

    def guarded(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return call(*arguments, **named)
        except BaseException:
            data = last(*arguments, **named)
            (BROKE / f"{kind}-{hashlib.sha1(data).hexdigest()}").write_bytes(data)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(EXIT)

    return guarded


def main() -> None:
    set_up_command()
    logger.remove()
    logger.add(lambda _: None)  # what is logged is formatted, and thrown away
    # libFuzzer starts this again, by a shell, where it merges.
    again = shlex.join((sys.executable, "-m", "tests.fuzz.child", *sys.argv[1:3]))
    flags, check = [again, *sys.argv[3:]], ending(TARGET.check, "crash", lambda data: data)
    if TARGET.mutate is None:
        atheris.Setup(flags, check)
    else:
        atheris.Setup(flags, check, custom_mutator=ending(TARGET.mutate, "mutator", lambda data, *_: data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
