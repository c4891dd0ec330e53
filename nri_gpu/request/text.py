"""Pieces of an annotation's value that know their position, and which annotation of a pod applies to a container."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.names import BASE_KEY, CONTAINER_PREFIX, GRANT_KEY, KEY_PREFIX, POD_KEY
from nri_gpu.domain.text import did_you_mean, shown

BLANKS: Final = " \t"


class Piece(NamedTuple):
    """A part of an annotation's value without the blanks around it.

    key: the annotation it stands in, fit to be shown. at: 0-based offset into the value.
    """

    key: str
    text: str
    at: int

    def error(self, message: str) -> RequestError:
        """A fault at this very place."""
        return RequestError(self.key, message, self.at)

    def cut(self, start: int, end: int | None = None) -> Piece:
        """The part from start to end, blanks around it left out."""
        raw = self.text[start:end]
        text = raw.lstrip(BLANKS)
        return Piece(self.key, text.rstrip(BLANKS), self.at + start + len(raw) - len(text))

    def split(self, separator: str) -> Iterator[Piece]:
        """The parts between separators; an empty text has one empty part."""
        start = 0
        while (end := self.text.find(separator, start)) >= 0:
            yield self.cut(start, end)
            start = end + 1
        yield self.cut(start)


def listed(words: Iterable[str]) -> str:
    """`a, b, c`, as it follows "known:"."""
    return ", ".join(words)


_KNOWN: Final = (BASE_KEY, POD_KEY, CONTAINER_PREFIX + "<name>")
_NAMES: Final = {"pod": POD_KEY, "container": CONTAINER_PREFIX + "<name>"}
_KEY_SHOWN_MAX: Final = 90  # characters; a Kubernetes key of ours has at most 11 + 63


def select_annotation(
    pod_annotations: Mapping[str, str], container_annotations: Mapping[str, str], container_name: str
) -> tuple[str, str] | None:
    """Key and value of the annotation that applies to a container about to be created; None where none does.

    container_annotations: the container's own. An existing container carries our signed grant: give an empty mapping.

    Raises:
        RequestError: an unknown key with our prefix (a mistyped request must not start without its GPU), or one of our
            keys on the container itself.

    """
    # One search over all keys at once, since most containers ask for nothing.
    if BASE_KEY in "\n".join(container_annotations):
        _check_container_keys(pod_annotations, container_annotations)
    if BASE_KEY not in "\n".join(pod_annotations):
        return None
    _check_pod_keys(pod_annotations)
    for key in (CONTAINER_PREFIX + container_name, POD_KEY, BASE_KEY):
        value = pod_annotations.get(key)
        if value is not None:
            return key, value
    return None


def shown_key(key: str) -> str:
    """An annotation's key, fit for a sentence: the pod's creator chose it."""
    return shown(key, _KEY_SHOWN_MAX)


def _ours(annotations: Mapping[str, str]) -> list[str]:
    return sorted(key for key in annotations if key == BASE_KEY or key.startswith(KEY_PREFIX))


def _check_pod_keys(annotations: Mapping[str, str]) -> None:
    for key in _ours(annotations):
        if key == CONTAINER_PREFIX:
            raise RequestError(shown_key(key), f"the container's name is missing: write {CONTAINER_PREFIX}<name>")
        if key not in (BASE_KEY, POD_KEY) and not key.startswith(CONTAINER_PREFIX):
            raise RequestError(shown_key(key), f"unknown annotation, known: {listed(_KNOWN)}{_guess_key(key)}")


def _check_container_keys(pod: Mapping[str, str], container: Mapping[str, str]) -> None:
    for key in _ours(container):
        if key == GRANT_KEY:
            raise RequestError(key, "only nri-gpu writes this annotation; remove it from the container")
        # Runtimes can be configured to copy annotations of the pod to its containers; such a copy is no request.
        if pod.get(key) != container[key]:
            raise RequestError(
                shown_key(key),
                "is set on the container; requests are read from the annotations of the pod: set it there",
            )


def _guess_key(key: str) -> str:
    """The known key whose word after the slash is close."""
    word = key[len(KEY_PREFIX) :].partition(".")[0]
    close = did_you_mean(word, _NAMES)
    return next((f' (did you mean "{key}"?)' for name, key in _NAMES.items() if f'"{name}"' in close), "")
