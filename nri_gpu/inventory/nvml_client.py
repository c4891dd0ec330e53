"""How NVML is asked: a call that says itself aloud, fails by a number, and may be one that not every driver has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

# Codes of nvml.h.
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NOT_FOUND: Final = 6
TIMEOUT: Final = 10
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16

ABSENT: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
GONE: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})


class CallError(Exception):
    """An NVML call that failed: `nvmlDeviceGetUUID: GPU is lost (15)`. code: 0 where the answer was unreadable."""

    def __init__(self, name: str, message: str, code: int = 0) -> None:
        super().__init__(f"{name}: {message} ({code})" if code else f"{name}: {message}")
        self.code = code


class Ask(Protocol):
    """Makes one NVML call, said aloud before it is made."""

    def __call__(self, name: str, *arguments: object, gpu: int | None = None) -> Any:  # noqa: ANN401 (NVML's own types)
        """The call's result.

        Raises: CallError.
        """


def tolerant(ask: Ask, default: object, name: str, *arguments: object, gpu: int) -> Any:  # noqa: ANN401
    """An answer nothing depends on: links only help to choose well."""
    try:
        return ask(name, *arguments, gpu=gpu)
    except CallError:
        return default


def maybe(
    ask: Ask,
    default: object,
    name: str,
    *arguments: object,
    gpu: int | None = None,
    tolerated: frozenset[int] | None = None,
) -> Any:  # noqa: ANN401
    """An optional fact: `default` where this GPU or driver lacks it, or on any error short of a lost GPU.

    Raises: CallError, for a code that is not in `tolerated`; where that is not given, for a GPU that is gone.
    """
    try:
        return ask(name, *arguments, gpu=gpu)
    except CallError as error:
        if error.code in GONE if tolerated is None else error.code not in tolerated:
            raise
        return default


def parsed(parse: Callable[[str], str], text: str, name: str) -> str:
    """What a call answered, if it is what such a thing looks like.

    Raises: CallError.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise CallError(name, str(error)) from error
