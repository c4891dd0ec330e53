"""The image's build file, as far as it can be tried without a builder: what it copies installs, and then runs alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nri_gpu import __version__

ROOT: Final = Path(__file__).parents[3]
BUILD: Final = ROOT / "deploy" / "Containerfile"
KNOWN: Final = {"FROM", "COPY", "RUN", "ENV", "LABEL", "ENTRYPOINT", "CMD"}
# Imports every module of the package from one folder, with nothing of this interpreter's but the standard library.
IMPORTING: Final = """
import importlib, pathlib, sys
folder = sys.argv[1]
sys.path.append(folder)
for file in sorted(pathlib.Path(folder, "nri_gpu").rglob("*.py")):
    name = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith("__main__"):
        importlib.import_module(name)
from nri_gpu.cli.main import main
sys.exit(main(["check", folder + "/policy.toml"]))
"""


def instructions() -> Iterator[tuple[str, str]]:
    """Word and rest, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", BUILD.read_text())
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


def copied() -> Iterator[tuple[str, str]]:
    """Source in the checkout, and the folder in the image it goes to."""
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                yield source, target


def test_every_instruction_is_one_and_says_what_runs() -> None:
    found = list(instructions())
    assert found[0][0] == "FROM"
    assert {word for word, _ in found} <= KNOWN
    last = dict(found)
    assert json.loads(last["ENTRYPOINT"]) == ["nri-gpu"]
    assert json.loads(last["CMD"]) == ["run"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z]+)="([^"]+)"', last["LABEL"]))
    assert (labels["title"], labels["version"], labels["licenses"]) == ("nri-gpu", __version__, "Apache-2.0")


def test_images_are_named_without_a_registry_and_nothing_is_fetched_but_by_pip() -> None:
    for word, rest in instructions():
        registry = rest.split()[0].partition("/")[0].partition(":")[0]
        assert word != "FROM" or "." not in registry, rest
        assert not re.search("curl|wget|apt-get|http", rest)


def test_what_is_copied_is_let_through_to_the_builder() -> None:
    ignored = (BUILD.parent / f"{BUILD.name}.dockerignore").read_text().splitlines()
    for source, _ in copied():
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored


def test_what_it_copies_installs_and_then_lacks_nothing(tmp_path: Path) -> None:
    """As the builder does it: the same files, the same options of pip, dependencies from the package index."""
    source, target = tmp_path / "src", tmp_path / "target"
    source.mkdir()
    for name, folder in copied():
        place = source / Path(folder).relative_to("/src")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place)
    installs = re.findall(r"/bin/pip install --no-cache-dir (.+?) *(?:&&|$)", dict(instructions())["RUN"])
    assert installs == ["--require-hashes -r /src/runtime.txt", "--no-deps /src"]
    for options in installs:
        words = [
            str(source / Path(word).relative_to("/src")) if word.startswith("/src") else word
            for word in options.split()
        ]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-input"]
        done = subprocess.run([*pip, "--target", str(target), *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (target / "policy.toml").write_text("")
    alone = [sys.executable, "-I", "-S", "-c", IMPORTING, str(target)]
    done = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (target / "bin" / "nri-gpu").is_file()
