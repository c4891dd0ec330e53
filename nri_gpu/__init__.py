"""nri-gpu: gives containers NVIDIA GPUs through NRI, with no hook and no wrapper runtime."""

__version__ = "0.1.0"
