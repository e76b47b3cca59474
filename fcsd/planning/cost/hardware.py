"""Published figures of GPUs: dense matmuls without sparsity, in decimal units, for one
device.
"""

from dataclasses import dataclass

from fcsd.base.errors import UserError
from fcsd.base.strict import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """The published figures of one device.

    link_gb_s: in one direction, to all other devices of its node together; peer_gb_s:
    to one of them, where a mesh gives each peer its own link; None: a switch, through
    which one peer gets all of it. payload: share of a link's published rate that can
    carry data. nic_gb_s: of a device's interface to other nodes in the vendor's
    reference systems. fp8_tflops: None for a device without FP8 units.
    """

    name: str
    bf16_tflops: float
    float32_tflops: float
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    source: str
    fp8_tflops: float | None = None
    peer_gb_s: float | None = None
    payload: float = 1.0
    nic_gb_s: float = 50.0

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory."""
        return int(self.memory_gb * 1e9)

    @property
    def amd(self) -> bool:
        """Whether AMD makes it."""
        return self.name.startswith("AMD ")


_XGMI = (
    "; links: rocm.blogs.amd.com, mi300x-rccl-xgmi (2025): 64 GB/s per peer, 48 after"
    " CRC and protocol"
)
_MESH = {"peer_gb_s": 64, "payload": 0.75}

GPUS = {
    "a100-40gb": Gpu(
        "NVIDIA A100 40GB SXM", 312, 19.5, 40, 1555, 300, "NVIDIA A100 datasheet; NIC: DGX A100", nic_gb_s=25
    ),
    "a100": Gpu(
        "NVIDIA A100 80GB SXM", 312, 19.5, 80, 2039, 300, "NVIDIA A100 datasheet; NIC: DGX A100", nic_gb_s=25
    ),
    "h100": Gpu(
        "NVIDIA H100 SXM5", 989.4, 66.9, 80, 3350, 450, "NVIDIA H100 datasheet and white paper; NIC: DGX H100",
        1978.9,
    ),
    "h200": Gpu("NVIDIA H200 SXM", 989.4, 66.9, 141, 4800, 450, "NVIDIA H200 datasheet; NIC: DGX H200", 1978.9),
    "b200": Gpu(
        "NVIDIA B200 (HGX)", 2250, 75, 180, 7700, 900, "NVIDIA HGX B200 datasheet, an eighth of it; NIC: DGX B200",
        4500,
    ),
    "l40s": Gpu("NVIDIA L40S", 362, 91.6, 48, 864, 32, "NVIDIA L40S datasheet; PCIe 4.0 x16", 733, nic_gb_s=25),
    "rtx4090": Gpu(
        "NVIDIA RTX 4090", 165.2, 82.6, 24, 1008, 32, "NVIDIA Ada white paper; PCIe 4.0 x16", 330.3, nic_gb_s=12.5
    ),
    "mi250x": Gpu(
        "AMD Instinct MI250X", 383, 47.9, 128, 3277, 250, "AMD MI250X datasheet; both dies as one", nic_gb_s=25
    ),
    "mi300x": Gpu(
        "AMD Instinct MI300X", 1307.4, 163.4, 192, 5300, 448, "AMD MI300X datasheet" + _XGMI, 2614.9, **_MESH
    ),
    "mi325x": Gpu(
        "AMD Instinct MI325X", 1307.4, 163.4, 256, 6000, 448, "AMD MI325X datasheet" + _XGMI, 2614.9, **_MESH
    ),
    "mi355x": Gpu(
        "AMD Instinct MI355X", 2516.6, 157.3, 288, 8000, 538, "AMD MI355X datasheet; links as MI300X", 5033.2,
        peer_gb_s=76.8, payload=0.75,
    ),
}  # fmt: skip


def find_gpu(name: str, where: str = "--gpu") -> Gpu:
    """Return the figures of a GPU; raises UserError for a name that is not in the table."""
    if name not in GPUS:
        allowed = f"; allowed: {', '.join(sorted(GPUS))}"
        near = did_you_mean(name, list(GPUS)).removeprefix(allowed)
        raise UserError(f"{where} {name}: unknown GPU{allowed}{near}")
    return GPUS[name]
