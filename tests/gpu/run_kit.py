"""Runs the tests on real GPUs of a kit (`make gpu-kit`), with nothing but Python: no network, no pip.

    python3 run_kit.py KIT.tar.xz     unpacked below build/gpu-kit
    python3 run.py                    in a kit that is unpacked

The report is printed, and written to build/real-gpu.json and build/real-gpu.md. Nothing outside `build` is changed, and
no setting of a GPU. Ends with 0: every test that could run passed; 1: one failed; 2: wrong usage; 69: none could run;
77: not root.
"""

from __future__ import annotations

import ctypes
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

OK, FINDING, USAGE, UNAVAILABLE, PERMISSION = 0, 1, 2, 69, 77


def main(arguments: list[str]) -> int:
    """Install, test, report. Returns an exit code."""
    if len(arguments) > 1 or (not arguments and not (Path(__file__).parent / "wheels").is_dir()):
        print(__doc__, file=sys.stderr)
        return USAGE
    if os.geteuid():
        return _ended(PERMISSION, "the tests boot a private containerd and need root: run this with sudo")
    out = Path("build").resolve()
    try:
        kit = _unpacked(Path(arguments[0]), out / "gpu-kit") if arguments else Path(__file__).resolve().parent
    except (OSError, EOFError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        return _ended(USAGE, f"{arguments[0]} is not a kit of `make gpu-kit`: {error}")
    if fault := _unfit(kit):
        return _ended(UNAVAILABLE, fault)
    venv = out / "gpu-kit" / "venv"
    try:
        python = _installed(kit, venv)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        return _ended(UNAVAILABLE, f"the kit's packages cannot be installed in {venv}: {error}")
    return _tested(kit, python, out)


def _ended(code: int, why: str) -> int:
    print(why, file=sys.stderr)
    return code


def _unpacked(archive: Path, folder: Path) -> Path:
    """The kit's folder, in place of an earlier run's.

    Raises: OSError, EOFError, lzma.LZMAError, tarfile.TarError, ValueError.
    """
    with lzma.open(archive) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # Python 3.11.4 and newer ask for it.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(folder, **safely)  # type: ignore[arg-type]
        while file.read(1 << 20):  # its checksum comes after the last member
            pass
    kits = [each.parent for each in folder.glob("*/run.py") if (each.parent / "wheels").is_dir()]
    if len(kits) != 1:
        raise ValueError("it has no run.py beside wheels")
    return kits[0]


def _unfit(kit: Path) -> str:
    """Why this machine cannot run it; empty when it can."""
    if platform.machine() != "x86_64":
        return f"the kit's programs are for x86_64, and this machine is {platform.machine()}"
    # Of wheels that were made for one Python alone.
    found = (re.search(r"-cp3(\d+)-cp3\1-", wheel.name) for wheel in (kit / "wheels").iterdir())
    pythons = [f"3.{minor}" for minor in sorted({int(match[1]) for match in found if match})]
    if platform.python_version().rpartition(".")[0] not in pythons:
        having = f"the kit has wheels for Python {', '.join(pythons)}, and this is {platform.python_version()}"
        return f"{having}: name another one, such as make test-gpu PYTHON=python{pythons[0]} KIT=..."
    if shutil.which("runc") is None:
        try:
            ctypes.CDLL("libseccomp.so.2")
        except OSError:
            return "the kit's runc needs libseccomp.so.2: install libseccomp2 (Debian) or libseccomp (RHEL)"
    return ""


def _installed(kit: Path, folder: Path) -> Path:
    """The Python of a new virtual environment with the kit's wheels.

    Raises: OSError, ValueError, subprocess.CalledProcessError.
    """
    venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
    subprocess.run(venv, check=True, env=_environment())
    python, wheels = folder / "bin" / "python", kit / "wheels"
    [pip] = wheels.glob("pip-*.whl")  # a zip file that Python runs
    exactly = ["--no-index", f"--find-links={wheels}", "--no-deps", "--require-hashes"]
    lock = kit / "checkout" / "deploy" / "locks" / "gpu-kit.txt"
    quietly = ["--quiet", "--disable-pip-version-check", "--root-user-action=ignore", "--no-cache-dir", "--no-compile"]
    command = [str(python), str(pip / "pip"), "--isolated", "install", *quietly, *exactly, f"--requirement={lock}"]
    # Nor what this machine has set for pip.
    subprocess.run(command, check=True, env=_environment() | {"PIP_CONFIG_FILE": os.devnull})
    # nri-gpu starts some of its processes isolated, where neither PYTHONPATH nor the current folder is searched.
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / "nri-gpu.pth").write_text(f"{kit / 'checkout'}\n")
    return python


def _environment() -> dict[str, str]:
    """Without what this machine has set for Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _tested(kit: Path, python: Path, out: Path) -> int:
    junit = out / "gpu-kit" / "junit.xml"
    junit.unlink(missing_ok=True)
    brought = {"NRI_GPU_CACHE": str(kit / "cache"), "NRI_GPU_PROGRAMS": str(kit / "programs")}
    environment = _environment() | brought
    tests = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={junit}", "tests/gpu"]
    checkout = kit / "checkout"
    subprocess.run([str(python), *tests], cwd=checkout, env=environment, check=False)
    if not junit.exists():
        return _ended(FINDING, "pytest ended before it had a result")
    report = ["-m", "tests.gpu.report", str(junit), "--out", str(out)]
    return subprocess.run([str(python), *report], cwd=checkout, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
