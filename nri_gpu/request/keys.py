"""Which of a pod's annotations speaks for a container: the most specific one, whole, never merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nri_gpu.domain.errors import RequestError
from nri_gpu.request.text import guess, listed, quoted

BASE_KEY: Final = "gpu.nri.io"
POD_KEY: Final = "gpu.nri.io/pod"
CONTAINER_PREFIX: Final = "gpu.nri.io/container."
GRANT_KEY: Final = "gpu.nri.io/grant"  # the mark, written by the plugin on the container it grants to

_SPACE: Final = "gpu.nri.io/"
_KNOWN: Final = (BASE_KEY, POD_KEY, CONTAINER_PREFIX + "<name>")
_NAMES: Final = {"pod": POD_KEY, "container": CONTAINER_PREFIX + "<name>"}
_KEY_SHOWN_MAX: Final = 90  # characters; a Kubernetes key of ours has at most 11 + 63


def select_annotation(
    pod_annotations: Mapping[str, str], container_annotations: Mapping[str, str], container_name: str
) -> tuple[str, str] | None:
    """Key and value of the annotation that speaks for a container about to be created; None when none does.

    container_annotations: those the container comes with. One that already runs carries our own mark: give an empty
    mapping for it.

    Raises:
        RequestError: a key in our space that means nothing (a mistyped request must not start without its GPU), or
            a key of ours that stands on the container itself.

    """
    # One search over all keys at once, because nearly every container asks for nothing.
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
    """An annotation's key as it may stand in a sentence: whoever made the pod chose it."""
    return quoted(key, _KEY_SHOWN_MAX)[1:-1]


def _ours(annotations: Mapping[str, str]) -> list[str]:
    return sorted(key for key in annotations if key == BASE_KEY or key.startswith(_SPACE))


def _check_pod_keys(annotations: Mapping[str, str]) -> None:
    for key in _ours(annotations):
        if key == CONTAINER_PREFIX:
            raise RequestError(shown_key(key), f"the container's name is missing: write {CONTAINER_PREFIX}<name>")
        if key not in (BASE_KEY, POD_KEY) and not key.startswith(CONTAINER_PREFIX):
            raise RequestError(shown_key(key), f"unknown annotation, known: {listed(_KNOWN)}{_guess_key(key)}")


def _check_container_keys(pod: Mapping[str, str], container: Mapping[str, str]) -> None:
    for key in _ours(container):
        if key == GRANT_KEY:
            raise RequestError(key, "this mark is written by nri-gpu alone; a container cannot bring its own")
        # Runtimes can be told to copy annotations of the pod to its containers; such a copy is no request of its own.
        if pod.get(key) != container[key]:
            raise RequestError(shown_key(key), "stands on the container; requests are read from the pod's annotations")


def _guess_key(key: str) -> str:
    """Where the word after the slash is nearly a known one."""
    word = key[len(_SPACE) :].partition(".")[0]
    close = guess(word, _NAMES)
    return next((f' (did you mean "{_NAMES[name]}"?)' for name in _NAMES if f'"{name}"' in close), "")
