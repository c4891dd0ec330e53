"""Samples in pages, between `<!-- sample: NAME -->` and `<!-- end -->`: what verbs print of nodes made up here."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nri_gpu.cli import main as program
from nri_gpu.cli.page import plain
from nri_gpu.cli.render import Times
from nri_gpu.cli.status_page import status_page
from nri_gpu.daemon.answers import DaemonStatus, GpuUsage, HolderUsage, IdleStatus, PolicyStatus, SamplingStatus
from nri_gpu.daemon.view import status_of
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.health.gpu_record import Moment
from tests.support import builders as make
from tests.support.health import after_xid
from tests.support.records import SAMPLE, filled, marked
from tests.support.views import CLOCK, NOW, view
from tools.files import ROOT, Files

GIB: Final = 2**30
TOPOLOGY: Final = "config/topologies/four-gpus.toml"
POD: Final = """\
apiVersion: v1
kind: Pod
metadata:
  name: train
  annotations:
    gpu.nri.io: "2"
spec:
  containers:
    - name: main
      image: my/image
"""
KEPT: Final = ("container", "granted", "device")  # words of the lines that the sample shows


def status() -> str:
    """Return the page of `nri-gpu status`: a GPU held, one shared, one free, and one that has fallen off the bus."""
    return _fenced(f"$ nri-gpu status\n{plain(status_page(_four_gpus(), Times(NOW), glance=True))}")


def _four_gpus() -> DaemonStatus:
    gpus = [make.gpu(index, model="NVIDIA H100 80GB HBM3") for index in range(4)]
    found, notes = after_xid(79, gpus[3].uuid, make.inventory(gpus, driver_version="580.95.05"), _ago(240))
    ledger = make.ledger(
        make.entry(0, to=make.container(of="train"), since=CLOCK - 7500),
        make.entry(1, to=make.container(of="notebook-a"), mode=Mode.SHARED, since=CLOCK - 3660),
        make.entry(1, to=make.container(of="notebook-b"), mode=Mode.SHARED, since=CLOCK - 10_800),
    )
    policy = PolicyStatus("/etc/nri-gpu/policy.toml", "", digest="3f9c01d2e4b7")
    made = status_of(view(ledger, replace(make.node(), inventory=found), policy=policy, notes=notes))
    unused = IdleStatus(no_process=False, since_s=NOW - 10_800, samples=180)
    uses = (
        (71, 97, (HolderUsage(memory_bytes=70 * GIB, processes=8),)),
        (11, 3, (HolderUsage(memory_bytes=10 * GIB, processes=1), HolderUsage(memory_bytes=0, idle=unused))),
        (0, 0, ()),
    )
    used = (
        replace(
            gpu,
            usage=GpuUsage(
                sampled_s=NOW - 3, memory_used_bytes=gib * GIB, memory_total_bytes=80 * GIB, utilization_percent=percent
            ),
            holders=tuple(replace(holder, usage=each) for holder, each in zip(gpu.holders, of_holders, strict=True)),
        )
        for gpu, (gib, percent, of_holders) in zip(made.gpus, uses, strict=False)
    )
    node = replace(made.node, name="worker-1")
    return replace(made, node=node, sampling=SamplingStatus(enabled=True), gpus=(*used, made.gpus[3]))


def _ago(seconds: float) -> Moment:
    return Moment(CLOCK - seconds, NOW - seconds)


def pod() -> str:
    """Return a pod, and beside it what `nri-gpu explain` says that it gets."""
    command = (
        f"$ nri-gpu explain train.yaml --gpus \\\n  {TOPOLOGY} |\n  grep {' '.join(f'-e {each}' for each in KEPT)}\n"
    )
    said = "".join(f"{line}\n" for line in _explained().splitlines() if re.search("|".join(KEPT), line))
    cells = {"train.yaml": _fenced(POD, "yaml"), "what it would get": _fenced(command + said)}
    heads = "".join(f"<th>{head}</th>" for head in cells)
    bodies = "".join(f"<td>\n\n{body}\n</td>\n" for body in cells.values())
    table = f"<table>\n<tr>{heads}</tr>\n<tr>\n{bodies}</tr>\n</table>"
    return f'<div class="table-wrapper">\n{table}\n</div>\n'  # scrolls by itself on a narrow page of the site


def _explained() -> str:
    """Return what `nri-gpu explain` prints about the pod, under the policy that is built in."""
    with tempfile.TemporaryDirectory(prefix="ng-") as folder, redirect_stdout(io.StringIO()) as printed:
        (file := Path(folder, "train.yaml")).write_text(POD)
        (policy := Path(folder, "policy.toml")).write_text("schema = 1\n")
        program.main(["explain", str(file), "--gpus", str(ROOT / TOPOLOGY), "--policy", str(policy)])
    return printed.getvalue()


def _fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


MADE: Final[Mapping[str, Callable[[], str]]] = {"status": status, "pod": pod}


def pages() -> Files:
    """Return the pages that have a place for a sample."""
    texts = {page: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
    return {
        page: filled(text, lambda name: MADE[name](), SAMPLE) for page, text in texts.items() if marked(text, SAMPLE)
    }
