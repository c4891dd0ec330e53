"""The sentences: which condition failed, what the node has, and what an operator can do about it."""

from __future__ import annotations

from typing import Final

from nri_gpu.requirements.facts import Facts, GpuFacts, Property, View
from nri_gpu.requirements.grammar import Condition, Malformed
from nri_gpu.requirements.text import quoted, shown

LEGACY: Final = "CUDA_VERSION (no NVIDIA_REQUIRE_CUDA is set)"

_FACT_MAX: Final = 16  # characters of a version or a brand
_OTHER_NODE: Final = "run it on a node with another driver"
_OTHER_GPU: Final = "ask for other GPUs (clause {} of the annotation), or run it on a node that has them"


def unmet(called: str, failed: Condition, others: int, facts: Facts, gpu: GpuFacts | None, view: View) -> str:
    """A condition that does not hold. called: the variable, shown. others: alternatives beside the first."""
    also = f", and none of its {others} other alternatives holds" if others > 1 else ""
    also = ", and its other alternative does not hold" if others == 1 else also
    return (
        f"{called} needs {shown(failed.text)}{also}; this node has {_has(facts, gpu)}: {_advice(failed, facts, view)}"
    )


def malformed(called: str, fault: Malformed) -> str:
    """A condition that means nothing."""
    return f"{called} cannot be understood: {fault.why}; correct it in the image or the pod"


def oversize(longest: str, total: int, limit: int) -> str:
    """More text than any image needs."""
    what = f"the NVIDIA_REQUIRE_ variables have {total} characters, over the limit of {limit}"
    return f"{what}: shorten {shown(longest)}, the longest"


def not_a_version(value: str) -> str:
    """A legacy image's CUDA_VERSION that says nothing."""
    return (
        f"CUDA_VERSION is {quoted(value)}, not a version such as 12.4.1: correct it, or set NVIDIA_REQUIRE_CUDA "
        "(cuda>=12.4), which then counts instead"
    )


def ending(*, disabled: bool, may_disable: bool) -> str:
    """What NVIDIA_DISABLE_REQUIRE could do, or could not."""
    if may_disable:
        return "; NVIDIA_DISABLE_REQUIRE=1 starts it unchecked"
    return "; NVIDIA_DISABLE_REQUIRE is set, but policy does not let it count" if disabled else ""


def _has(facts: Facts, gpu: GpuFacts | None) -> str:
    node = f"CUDA {_fact(facts.cuda_version)}, driver {_fact(facts.driver_version)}"
    if gpu is None:
        return node
    arch = "{}.{}".format(*gpu.arch) if any(gpu.arch) else ""
    return f"{node}, a GPU of arch {_fact(arch)} and brand {_fact(gpu.brand)}"


def _fact(text: str) -> str:
    return shown(text, _FACT_MAX) if text else "(not known)"


def _advice(failed: Condition, facts: Facts, view: View) -> str:
    fact = view[failed.property]
    if fact is None:
        return "what is not known meets no condition; nri-gpu gpus shows what this node's driver says"
    match failed.property:
        case Property.ARCH:
            return _OTHER_GPU.format("arch")
        case Property.BRAND:
            return _OTHER_GPU.format("model")
    if not (isinstance(fact, tuple) and isinstance(failed.operand, tuple) and fact < failed.operand):
        return _OTHER_NODE
    if failed.property is Property.CUDA:
        return f"update its driver, or use an image for CUDA {_fact(facts.cuda_version)} or older"
    return f"update its driver, or {_OTHER_NODE}"
