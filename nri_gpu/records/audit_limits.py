"""The limits of the audit log's decisions: of one record, and of all records of one pod in one file.

A pod's author chooses annotations, labels and environment, and the kubelet creates a refused container again and again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container, Pod, PodUid
from nri_gpu.domain.decision import REFUSAL_MAX
from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.text import shown
from nri_gpu.domain.value import canonical
from nri_gpu.request.annotation import VALUE_MAX, select_annotation

# Bytes. An annotation of 4 KiB, 16 KiB of an image's requirements, and the ordinary rest of a container fit; so do the
# 500 device nodes of the host that a privileged container lists. A file of 4 MiB, the default, holds 128 such records.
RECORD_MAX: Final = 32 * 1024
POD_SHARE: Final = 8  # a pod may have one eighth of a file, and one record more
_NAME_MAX: Final = 253  # characters, as Kubernetes has it


class CutRecord(Struct, frozen=True, tag_field="kind", tag="cut"):
    """A decision whose record would be over RECORD_MAX. Its request cannot be decided again.

    container: its names and those of its pod, with the annotation that applies to it, all clipped. annotations: how
    many of ours there are. annotations_sha256: of all these. bytes: of the record that was cut.
    """

    at_s: float
    container: Mapping[str, object]
    annotations: int
    annotations_sha256: str
    bytes: int
    answer: Mapping[str, object]


class LeftOutRecord(Struct, frozen=True, tag_field="kind", tag="left_out"):
    """The number of decisions on a pod, so far, that its share of the file has no room for: 1, 2, 4, 8 and so on."""

    at_s: float
    namespace: str
    pod: str
    decisions: int


class PodShares:
    """The bytes that the decisions on each pod take of one file. most_bytes: of the file."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes // POD_SHARE
        self._bytes = Counter[PodUid]()
        self._left_out = Counter[PodUid]()

    def clear(self) -> None:
        """Begin another file."""
        self._bytes.clear()
        self._left_out.clear()

    def add(self, pod: Pod, written_bytes: int) -> None:
        """Count a record that is written."""
        self._bytes[pod.uid] += written_bytes

    def leave_out(self, pod: Pod) -> int:
        """Return how many decisions are left out, with the next one, or 0 if that is still to be written."""
        if self._bytes[pod.uid] > self._most_bytes:
            self._left_out[pod.uid] += 1
        return self._left_out[pod.uid]


def cut_record(container: Container, answer: Mapping[str, object], at_s: float, record_bytes: int) -> CutRecord:
    """Return the record of a decision whose own would have so many bytes. It is below RECORD_MAX itself."""
    annotations = container.pod.annotations, container.annotations
    pod = {**_clipped(container.pod, "id", "uid", "name", "namespace"), "annotations": _applying(container)}
    return CutRecord(
        at_s,
        {**_clipped(container, "id", "name"), "pod": pod},
        sum(map(len, annotations)),
        hashlib.sha256(canonical(annotations).encode()).hexdigest(),
        record_bytes,
        {key: shown(value, REFUSAL_MAX) if isinstance(value, str) else value for key, value in answer.items()},
    )


def left_out_record(pod: Pod, at_s: float, decisions: int) -> LeftOutRecord:
    return LeftOutRecord(at_s, shown(pod.namespace, _NAME_MAX), shown(pod.name, _NAME_MAX), decisions)


def _clipped(of: Container | Pod, *names: str) -> dict[str, str]:
    return {name: shown(getattr(of, name), _NAME_MAX) for name in names}


def _applying(container: Container) -> Mapping[str, str]:
    """Return the annotation that applies, or nothing: there is none, or the answer says which key is wrong."""
    try:
        applying = select_annotation(container.pod.annotations, container.annotations, container.name)
    except RequestError:
        return {}
    return {shown(applying[0], _NAME_MAX): shown(applying[1], VALUE_MAX)} if applying else {}
