"""A made-up libnvidia-ml.so.1 for machines without a driver."""

from tests.support.nvml.build import (
    SWITCH,
    Act,
    FakeFabric,
    FakeFacts,
    FakeGpu,
    FakeHealth,
    FakeMig,
    FakeProcess,
    FakeUse,
    build_fake_nvml,
    configure,
    evidence,
    gpus_of,
    happen,
    use,
)

__all__ = [
    "SWITCH",
    "Act",
    "FakeFabric",
    "FakeFacts",
    "FakeGpu",
    "FakeHealth",
    "FakeMig",
    "FakeProcess",
    "FakeUse",
    "build_fake_nvml",
    "configure",
    "evidence",
    "gpus_of",
    "happen",
    "use",
]
