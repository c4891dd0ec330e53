"""A made-up libnvidia-ml.so.1 for machines without a driver."""

from tests.support.nvml.build import SWITCH, Act, FakeGpu, FakeMig, build_fake_nvml, configure, evidence, gpus_of

__all__ = ["SWITCH", "Act", "FakeGpu", "FakeMig", "build_fake_nvml", "configure", "evidence", "gpus_of"]
