"""The installation that runs: a package of the distribution, or a checkout or virtual environment."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

import nri_gpu
from nri_gpu.domain.errors import CommandError, Exit, fault_of
from nri_gpu.enable.features import INSTALLED_AS, SERVICE, UNIT_PROGRAM, Feature
from nri_gpu.enable.unit_plan import PACKAGE_DROP_INS, UnitFile
from nri_gpu.system.storage import below, is_there, stat_of, why_untrusted

ETC_UNITS: Final = "/etc/systemd/system"
PACKAGE_UNITS: Final = "/usr/lib/systemd/system"
PACKAGE_CODE: Final = Path("/usr/lib/nri-gpu")
# The units have ProtectHome= and PrivateTmp=: a program there does not start.
_HIDDEN: Final = ("/root", "/home", "/run/user", "/tmp", "/var/tmp")
_PLAIN: Final = re.compile(r"[\w./+@:-]+", re.ASCII)
# systemd could take these for something else, and nobody has them in a path. The last are bytes that are not UTF-8.
_ODD: Final = re.compile("[\x00-\x1f\x7f\"'\\\\$\ud800-\udfff]")


class Installation(Struct, frozen=True):
    """An installation. program: what its units start.

    units: its folder with the units of this tree, or None for a package, which has its own in place. python, code,
    libraries: what the program consists of beside itself.
    """

    program: Path
    units: Path | None = None
    python: Path = Path(sys.executable)
    code: Path = Path(nri_gpu.__file__).parent
    libraries: tuple[Path, ...] = tuple(
        dict.fromkeys(Path(sysconfig.get_path(each)) for each in ("purelib", "platlib"))
    )

    def wanted(self, feature: Feature, service: str, root: Path) -> Mapping[str, UnitFile | None]:
        """Return the files of a feature by their paths; None: nothing, since it would hide the package's unit.

        service: that the drop-in is for.

        Raises: CommandError, if the installation lacks a file, or cannot run as a unit.
        """
        sources = {name: source for source, name in INSTALLED_AS.items()}
        names = {f"{ETC_UNITS}/{unit}": unit for unit in (*feature.units, *feature.mounts)}
        drop_in = feature.drop_in
        drop_ins = {f"{ETC_UNITS}/{service}.d/{drop_in}": f"{SERVICE}.d/{drop_in}"} if drop_in else {}
        if self.units is None:
            for unit in names.values():
                _need(root, f"{PACKAGE_UNITS}/{unit}")
            for each in drop_ins.values():
                _need(root, f"{PACKAGE_DROP_INS}/{each}")
            links = {path: UnitFile(target=f"{PACKAGE_DROP_INS}/{each}") for path, each in drop_ins.items()}
            return {**dict.fromkeys(names), **links}
        for unit in (*((service,) if drop_in else ()), *names.values()):
            if is_there(below(root, f"{PACKAGE_UNITS}/{unit}")):
                sentence = f"{unit} is a package's here, and a copy would hide it: use /usr/bin/nri-gpu enable"
                raise CommandError(Exit.UNAVAILABLE, sentence)
        texts = {path: self._text(sources.get(each, each)) for path, each in {**names, **drop_ins}.items()}
        return {path: UnitFile.made(text) for path, text in texts.items()}

    def _text(self, name: str) -> str:
        """Return the text of a unit of this tree, with our own program."""
        file = Path(self.units or "", name)
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:
            raise CommandError(Exit.UNAVAILABLE, f"this installation has no {file}: install nri-gpu anew") from None
        return text.replace(UNIT_PROGRAM, self._started()) if UNIT_PROGRAM in text else text

    def _started(self) -> str:
        """Return the program as the units start it. Raises: CommandError, if they cannot."""
        for path in (self.program, self.python, self.code):
            for each in _on_the_way(path):
                if hidden := next((folder for folder in _HIDDEN if each.is_relative_to(folder)), ""):
                    sentence = f"the units hide {hidden}, so they cannot start {path}: install below /opt"
                    raise CommandError(Exit.UNAVAILABLE, sentence)
        return exec_word(str(self.program))

    def why_unsafe(self) -> str:
        """Return why systemd must not run this program as root, as a clause, or empty."""
        if self.units is None:
            return ""
        for path in (self.program, self.python, self.units, self.code, *self.libraries):
            try:
                for each in _on_the_way(path):
                    if why := why_untrusted(each.stat(), each):
                        return f"{each}: {why}"
                for each in path.rglob("*"):
                    # A link that leads nowhere is nothing that runs.
                    if (found := stat_of(each)) and (why := why_untrusted(found, each)):
                        return f"{each}: {why}"
            except OSError as error:
                return fault_of(error)
        return ""


def _on_the_way(path: Path) -> Iterator[Path]:
    """Yield a path and the folders above it; then those of each link among them. Whoever can write one, leads it away.

    Raises: OSError, if links lead in a circle.
    """
    for each in (path, *path.parents):
        yield each
        if each.is_symlink():
            each.stat()
            yield from _on_the_way(Path(os.path.normpath(each.parent.resolve() / each.readlink())))


def exec_word(program: str) -> str:
    """Return a program as ExecStart= takes it. Raises: CommandError."""
    if _ODD.search(program):
        raise CommandError(Exit.UNAVAILABLE, f"systemd cannot start {program!r}: install below a plain path")
    return program if _PLAIN.fullmatch(program) else f'"{program.replace("%", "%%")}"'


def running_installation() -> Installation:
    """Return the installation of this process. Raises: CommandError, if it has no units."""
    code = Path(nri_gpu.__file__).parent
    if code.is_relative_to(PACKAGE_CODE):
        return Installation(Path("/usr/bin/nri-gpu"))
    for units in (code.parent / "systemd", Path(sys.prefix) / "share/nri-gpu/systemd"):
        if (units / SERVICE).is_file():
            return Installation(Path(sys.prefix) / "bin/nri-gpu", units)
    sentence = f"{code.parent} has no units: install the package, or `pip install` a checkout as docs/install.md has it"
    raise CommandError(Exit.UNAVAILABLE, sentence)


def _need(root: Path, path: str) -> None:
    if not is_there(below(root, path)):
        sentence = f"{path} is missing: it is in the package nri-gpu or nri-gpu-common; install or repair it"
        raise CommandError(Exit.UNAVAILABLE, sentence)
