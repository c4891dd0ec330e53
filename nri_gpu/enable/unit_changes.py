"""The steps of a plan, done: all of them, or none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from nri_gpu.domain.errors import CommandError, Exit, fault_of
from nri_gpu.enable.unit_plan import ChangeFile, DisableUnits, EnableUnits, MoveAside, Step, UnitFile
from nri_gpu.system.storage import below, draft_of, write_whole

_MODE: Final = 0o644
_SYSTEMCTL_S: Final = 60.0


def read_files(root: Path, folders: Iterable[str]) -> Mapping[str, UnitFile]:
    """Return the files and links of folders, by their paths; what is neither is empty. Raises: CommandError."""
    try:
        return {f"{folder}/{path.name}": _read(path) for folder in folders for path in _listed(below(root, folder))}
    except OSError as error:
        raise CommandError(Exit.of(error), f"{fault_of(error)}: nothing was changed") from None


def _listed(folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from (path for path in folder.iterdir() if path.is_symlink() or not path.is_dir())


def _read(path: Path) -> UnitFile:
    if path.is_symlink():
        return UnitFile(target=str(path.readlink()))
    with suppress(PermissionError):  # of a dry run; what we make can be read
        return UnitFile(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    return UnitFile()


def do(steps: Iterable[Step], root: Path) -> None:
    """Do the steps in order. If one fails or is interrupted, take back all that was done. Raises: CommandError."""
    with ExitStack() as undo:
        for step in steps:
            try:
                _do(step, root, undo)
            except OSError as error:
                raise CommandError(Exit.of(error), f"{step}: {fault_of(error)}: nothing was changed") from None
        undo.pop_all()


def systemctl(root: Path, *words: str) -> str:
    """Return what systemctl prints. Without a manager for another root than /. Raises: CommandError, if it fails."""
    command = ["systemctl", *([f"--root={root}"] if root != Path("/") else []), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SYSTEMCTL_S)
    except OSError as error:
        raise CommandError(Exit.UNAVAILABLE, f"{' '.join(command)}: {fault_of(error)}") from None
    except subprocess.TimeoutExpired:
        raise CommandError(Exit.UNAVAILABLE, f"{' '.join(command)}: no answer within {_SYSTEMCTL_S:g} s") from None
    if done.returncode:
        raise CommandError(Exit.UNAVAILABLE, f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def _do(step: Step, root: Path, undo: ExitStack) -> None:
    """Do a step. undo: gets what takes it back. Raises: OSError, CommandError."""
    match step:
        case ChangeFile(path, before, after):
            _put(below(root, path), after)
            undo.callback(_put, below(root, path), before)
        case MoveAside(path, kept):
            below(root, path).rename(below(root, kept))
            undo.callback(below(root, kept).rename, below(root, path))
        # systemctl may fail halfway, so it is taken back in any case. --no-reload: a reload is a step of its own, since
        # containers may lose devices by it.
        case EnableUnits(units, before):
            undo.callback(_quietly, root, "--no-reload", "disable", *(unit for unit in units if unit not in before))
            systemctl(root, "--no-reload", step.verb, *units)
        case DisableUnits(units):
            undo.callback(_quietly, root, "--no-reload", "enable", *units)
            systemctl(root, "--no-reload", "disable", *units)


def _put(path: Path, file: UnitFile | None) -> None:
    """Make a path that file, or nothing."""
    if file is None:
        path.unlink(missing_ok=True)
        if path.parent.name.endswith(".d"):
            with suppress(OSError):
                path.parent.rmdir()  # only where nothing else is in it
        return
    if not path.parent.is_dir():
        path.parent.mkdir()
        path.parent.chmod(0o755)  # whatever the umask
    if not file.target:
        write_whole(path, file.text.encode(), _MODE)
        return
    draft = draft_of(path)
    draft.unlink(missing_ok=True)
    draft.symlink_to(file.target)
    try:
        draft.replace(path)
    except OSError:
        draft.unlink()
        raise


def _quietly(root: Path, *words: str) -> None:
    with suppress(CommandError):
        systemctl(root, *words)
