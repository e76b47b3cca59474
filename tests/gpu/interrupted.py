"""Run fcsd with deterministic kernels, and interrupt it in the step after step N (0:
never): interrupted.py N COMMAND…
"""

import sys
from typing import Any

import torch


def main(step: int, command: list[str]) -> int:
    from fcsd.cli.main import main as fcsd
    from fcsd.training.trainer import DistillTrainer

    torch.use_deterministic_algorithms(True, warn_only=True)
    compute = DistillTrainer.compute_loss

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    if step:
        DistillTrainer.compute_loss = interrupted  # type: ignore[method-assign]
    status = fcsd(command)
    return 0 if step and status == 130 else status


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
