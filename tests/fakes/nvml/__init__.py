"""A fake NVML: machine.c and nvml.c make a libnvidia-ml.so.1 that answers from a description (machines/README.md)."""

from tests.fakes.nvml.build import FakeNvml, NoCompiler, fake_nvml

__all__ = ["FakeNvml", "NoCompiler", "fake_nvml"]
