"""What NVML says of GPUs' health, through the real binding and a made-up library."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.domain.health import Sign
from tests.support.nvml import Act, FakeGpu, FakeHealth
from tests.unit.inventory.played import played

# Every return code of NVML that is an error (nvml.h).
CODES = (1, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 17, 18, 19, 20, 23, 25, 27, 28, 29, 999)
OPTIONAL = (
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        (FakeHealth(), ()),
        (FakeHealth(remap_pending=1), (Sign.REMAP_PENDING,)),
        (FakeHealth(remap_failed=1), (Sign.REMAP_FAILED,)),
        (FakeHealth(clock_reasons=0x40), (Sign.THERMAL,)),
        (FakeHealth(clock_reasons=0x20 | 0x80 | 0x4), (Sign.THERMAL, Sign.POWER_BRAKE)),
        (FakeHealth(recovery_action=1), (Sign.RESET_REQUIRED,)),
        (FakeHealth(recovery_action=3), ()),
        (FakeHealth(recovery_action=-1), ()),
        (FakeHealth(fabric_state=2), (Sign.FABRIC_NOT_READY,)),
        (FakeHealth(fabric_state=3), ()),
    ],
)
def test_signs(tmp_path: Path, health: FakeHealth, expected: tuple[Sign, ...]) -> None:
    inventory = played(tmp_path, [FakeGpu(), FakeGpu(health=health)])
    assert [gpu.signs for gpu in inventory.gpus] == [(), expected]
    assert not any(gpu.unavailable for gpu in inventory.gpus)


def test_an_old_driver_has_none_of_it(tmp_path: Path) -> None:
    inventory = played(tmp_path, [FakeGpu(health=FakeHealth(remap_failed=1))], without=OPTIONAL)
    assert [(gpu.signs, gpu.unavailable) for gpu in inventory.gpus] == [((), "")]


def test_clock_reasons_by_their_older_name(tmp_path: Path) -> None:
    gpus = [FakeGpu(health=FakeHealth(clock_reasons=0x80))]
    inventory = played(tmp_path, gpus, without=["nvmlDeviceGetCurrentClocksEventReasons"])
    assert inventory.gpus[0].signs == (Sign.POWER_BRAKE,)


def test_each_return_code_costs_the_gpu_that_gave_it_alone(tmp_path: Path) -> None:
    """In a call without which a GPU cannot be described; 22 GPUs would not fit, so in two looks."""
    for codes in (CODES[:11], CODES[11:]):
        acts = [Act("nvmlDeviceGetCudaComputeCapability", "fail", code, gpu=at) for at, code in enumerate(codes)]
        gpus = played(tmp_path, [FakeGpu() for _ in range(len(codes) + 1)], acts).gpus
        for gpu, code in zip(gpus, codes, strict=False):
            assert gpu.unavailable.endswith(f"({code})")
            assert gpu.signs == ({15: Sign.LOST, 16: Sign.RESET_REQUIRED}.get(code, Sign.UNREADABLE),)
        assert (gpus[-1].unavailable, gpus[-1].signs) == ("", ())


@pytest.mark.parametrize("function", OPTIONAL[:3])
def test_an_optional_call_that_fails_says_nothing_unless_the_gpu_is_gone(tmp_path: Path, function: str) -> None:
    acts = [Act(function, "fail", code, gpu=at) for at, code in enumerate((3, 999, 15, 16))]
    gpus = played(tmp_path, [FakeGpu() for _ in range(5)], acts).gpus
    assert [gpu.signs for gpu in gpus] == [(), (), (Sign.LOST,), (Sign.RESET_REQUIRED,), ()]
