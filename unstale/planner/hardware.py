"""Devices by their data sheets, and the shares of these figures that programs are assumed to reach."""

from dataclasses import dataclass, fields, replace

from unstale.config.checks import within
from unstale.planner.assignments import parse_assignments


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What is reached of a device's figures. Assumptions until they are measured: give your own.

    >>> Shares.parse("matmul=0.5,step_s=0.002").step_s
    0.002
    """

    matmul: float = 0.40
    """Of the peak, in training, scoring and prefill. Llama 3 trained at 38% to 43% (arXiv 2407.21783, table 4)."""
    decode: float = 0.40
    """Of the peak, where so many replies are decoded that computing takes longer than reading. As `matmul`."""
    bandwidth: float = 0.70
    """Of the memory's, in decoding and wherever weights are only read. Assumed."""
    link: float = 0.80
    """Of every link's. Assumed."""
    memory: float = 0.90
    """Of the memory that may be planned for: what vLLM takes unless it is told (`gpu_memory_utilization`)."""
    step_s: float = 0.001
    """Seconds of a decoding step beside reading and computing: launches, sampling, scheduling. Assumed."""
    cores: float = 1
    """Processor cores that a device has for forming and applying deltas: one, as the version store has it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0.0 if field.name == "step_s" else 1e-6
            within(
                "--shares",
                least,
                1e3 if field.name in ("step_s", "cores") else 1,
                **{field.name: value},
            )

    @classmethod
    def parse(cls, text: str) -> "Shares":
        """`name=value,...` in place of the assumptions."""
        return replace(
            cls(),
            **parse_assignments("--shares", filter(None, text.split(",")), cls.__annotations__),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator; links in bytes a second in one direction."""

    name: str
    flops: float
    """Peak of dense bfloat16 matrix products, operations a second."""
    bandwidth: float
    """Of its memory, bytes a second."""
    memory: float
    """Bytes."""
    link: float
    """To the others of its node."""
    host_link: float
    """To the main memory."""
    network: float
    """To other nodes."""
    node: int = 8
    """Devices joined by `link`."""


def _sxm(
    name: str, flops: float, bandwidth: float, memory: float, links: tuple[float, float, float]
) -> Device:
    """In TFLOP/s, TB/s, GB, GB/s."""
    link, host, network = (1e9 * each for each in links)
    return Device(
        name=name, flops=flops * 1e12, bandwidth=bandwidth * 1e12, memory=memory * 1e9,
        link=link, host_link=host, network=network,
    )  # fmt: skip


DEVICES = {
    "A100": _sxm("A100", 312, 2.039, 80, (300, 32, 25)),
    "H100": _sxm("H100", 989.4, 3.35, 80, (450, 64, 50)),
    "H20": _sxm("H20", 148, 4.0, 96, (450, 64, 50)),
    "H800": _sxm("H800", 989.4, 3.35, 80, (200, 64, 50)),
    "H200": _sxm("H200", 989.4, 4.8, 141, (450, 64, 50)),
    "B200": _sxm("B200", 2250, 8.0, 180, (900, 64, 50)),
}
"""SXM variants, from NVIDIA's data sheets (A100 80GB, H100, H200, DGX B200; the H800 is an H100 whose NVLink has
400 GB/s, the H20 has the figures that are public of it), without sparsity. NVLink and PCIe (x16 of generation 4 or 5)
at half of what both directions have together; networks as DGX systems have them, one port a device: 200 Gbit/s of the
A100's, 400 Gbit/s of the others'."""
