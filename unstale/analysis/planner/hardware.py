"""Data sheets of accelerators, and the shares of their figures that real programs reach."""

from dataclasses import dataclass, replace
from typing import Annotated

from unstale.analysis.planner.assignments import parse_assignments, value_kinds
from unstale.config.checks import Range, Section

_Reached = Annotated[float, Range(1e-6, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares(Section):
    """The shares of a data sheet's figures that programs reach, and overheads. Defaults are
    assumptions.

    >>> Shares.parse("matmul=0.5,step_s=0.002").step_s
    0.002
    """

    matmul: _Reached = 0.40
    """Share of peak FLOP/s reached in training, scoring and prefill. Llama 3 was trained at 38% to
    43% (arXiv 2407.21783, table 4).
    """
    decode: _Reached = 0.40
    """Share of peak FLOP/s reached in decoding with large batches. Assumed equal to `matmul`."""
    bandwidth: _Reached = 0.70
    """Share of the memory's bandwidth reached in decoding and other reads of weights. Assumed."""
    link: _Reached = 0.80
    """Share reached of the bandwidth of links between devices, to main memory and to other nodes.
    Assumed.
    """
    memory: _Reached = 0.90
    """Share of a device's memory that may be used: vLLM's default `gpu_memory_utilization`."""
    step_s: Annotated[float, Range(0, 1e3)] = 0.001
    """Overhead of a decoding step in seconds, for launches, sampling and scheduling. Assumed."""
    cores: Annotated[float, Range(1e-6, 1e3)] = 4
    """Processor cores per device that encode, apply and check deltas (differences between versions
    of the weights). Assumed: half of a node's cores do, and nodes have at least 8 per device.
    """
    loader_gb_s: Annotated[float, Range(1e-3, 1e4)] = 5
    """GB per second at which a vLLM server reads new weights from main memory into one device.
    Assumed: copies from pageable memory reach 2.5 to 10 (`python -m benchmarks.gpu_check` measures
    it).
    """

    @classmethod
    def parse(cls, text: str) -> "Shares":
        """Return the default shares, changed by the values in `text`, such as
        `matmul=0.5,step_s=0.002`.
        """
        words = filter(None, text.split(","))
        return replace(cls(), **parse_assignments("--shares", words, value_kinds(cls)))


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or processor core, with the figures of its data sheet."""

    name: str
    flops: float
    """Peak of dense bfloat16 matrix products, in operations per second."""
    bandwidth: float
    """Bandwidth of its memory, in bytes per second."""
    memory: float
    """Size of the device's memory in bytes."""
    link: float
    """Bytes per second in one direction between this device and the others of its node."""
    host_link: float
    """Bytes per second in one direction between this device and main memory."""
    network: float
    """Bytes per second in one direction between this device and other nodes."""
    node: int = 8
    """Number of devices in a node."""

    @property
    def is_core(self) -> bool:
        """True for a processor core, which `measured.core_of_run` describes."""
        return self.name.startswith("core")

    @property
    def unit(self) -> str:
        """The word for a device: `core` or `GPU`."""
        return "core" if self.is_core else "GPU"

    def number(self, count: int) -> str:
        """Return `count` devices in words, such as `8 H100` or `4 cores of this machine`."""
        plural = self.is_core and count > 1
        return f"{count} {self.name.replace('core', 'cores', 1) if plural else self.name}"


_DATA_SHEETS = (
    # name, TFLOP/s, TB/s and GB of memory, then GB/s of link, host link and network
    ("A100", 312, 2.039, 80, 300, 32, 25),
    ("H100", 989.4, 3.35, 80, 450, 64, 50),
    ("H20", 148, 4.0, 96, 450, 64, 50),
    ("H800", 989.4, 3.35, 80, 200, 64, 50),
    ("H200", 989.4, 4.8, 141, 450, 64, 50),
    ("B200", 2250, 8.0, 180, 900, 64, 50),
)
"""SXM variants without sparsity, from NVIDIA's data sheets (A100 80GB, H100, H200, DGX B200). The
H800 is an H100 with 400 GB/s of NVLink. For the H20, public figures are used. NVLink and PCIe (x16
of generation 4 or 5) are given for one direction. Networks are those of DGX systems with one port
per device: 200 Gbit/s for the A100, 400 Gbit/s for the others.
"""
DEVICES = {
    name: Device(
        name, tflops * 1e12, tb_s * 1e12, gb * 1e9, link * 1e9, host_link * 1e9, network * 1e9
    )
    for name, tflops, tb_s, gb, link, host_link, network in _DATA_SHEETS
}
