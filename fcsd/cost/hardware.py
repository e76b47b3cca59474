"""Published figures of GPUs: dense matmuls without sparsity, decimal units, one device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The published figures of one device.

    link_gb_s: to the other devices of its node, one direction, all of them together.
    """

    name: str
    bf16_tflops: float
    float32_tflops: float
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    source: str


GPUS = {
    "a100-40gb": Gpu("NVIDIA A100 40GB SXM", 312, 19.5, 40, 1555, 300, "NVIDIA A100 datasheet"),
    "a100": Gpu("NVIDIA A100 80GB SXM", 312, 19.5, 80, 2039, 300, "NVIDIA A100 datasheet"),
    "h100": Gpu("NVIDIA H100 SXM5", 989.4, 66.9, 80, 3350, 450, "NVIDIA H100 datasheet and white paper"),
    "h200": Gpu("NVIDIA H200 SXM", 989.4, 66.9, 141, 4800, 450, "NVIDIA H200 datasheet"),
    "b200": Gpu("NVIDIA B200 (HGX)", 2250, 75, 180, 7700, 900, "NVIDIA HGX B200 datasheet, an eighth of it"),
    "l40s": Gpu("NVIDIA L40S", 362, 91.6, 48, 864, 32, "NVIDIA L40S datasheet; PCIe 4.0 x16"),
    "rtx4090": Gpu("NVIDIA RTX 4090", 165.2, 82.6, 24, 1008, 32, "NVIDIA Ada white paper; PCIe 4.0 x16"),
    "mi250x": Gpu("AMD Instinct MI250X", 383, 47.9, 128, 3277, 250, "AMD MI250X datasheet; both dies as one"),
    "mi300x": Gpu("AMD Instinct MI300X", 1307.4, 163.4, 192, 5300, 448, "AMD MI300X datasheet"),
    "mi325x": Gpu("AMD Instinct MI325X", 1307.4, 163.4, 256, 6000, 448, "AMD MI325X datasheet"),
    "mi355x": Gpu("AMD Instinct MI355X", 2516.6, 157.3, 288, 8000, 538, "AMD MI355X datasheet"),
}
