"""Where a command runs: the device, the engine and the rank of a process.

launch = join_launch()        # `fcsd.parallel.join`; once, in the command, which passes it on
launch.device, launch.engine, launch.ranks
"""

import contextlib
import os
import platform
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from fcsd.parallel.engine import Engine
from fcsd.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Launch:
    """The processes that run a command, as one of them sees it.

    device: of this rank. engine: shards the weights, if they are sharded. ranks: this
    rank among all, in lockstep where the engine shards.
    """

    device: torch.device
    engine: Engine
    ranks: Ranks = ALONE

    @cached_property
    def first(self) -> bool:
        """Whether this rank prints, writes and runs programs."""
        return self.ranks.first

    @property
    def loads_weights(self) -> bool:
        """Whether this rank reads weights; with FSDP2 and ZeRO-3 only the first one
        does, and sends the others their shards.
        """
        return not self.engine.shards_when_placed or self.first

    def hardware(self) -> dict[str, Any]:
        """Describe what computes: the `device` of a rank by its name, and the number of
        `processes`; of a CPU also its `threads`.
        """
        facts = {"processes": self.ranks.size}
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            return {"device": str(module.get_device_name(self.device))} | facts
        name = platform.processor() or platform.machine()
        with contextlib.suppress(OSError):  # only Linux has it
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE):
                name = found[1]
        threads = min(torch.get_num_threads(), os.cpu_count() or 1)
        return {"device": f"CPU {name}".strip()} | facts | {"threads": threads}

    def wait(self) -> None:
        """Wait until all ranks have made this call."""
        if self.ranks.size > 1:
            PartialState().wait_for_everyone()

    def for_evaluation(self) -> "Launch":
        """Return this launch with FSDP2 in place of ZeRO-3: the scores are the same,
        and generation works.
        """
        fsdp2 = replace(self.engine, name="fsdp2", reshard=True)
        return self._with_engine(fsdp2) if self.engine.uses_deepspeed else self

    def with_copies(self) -> "Launch":
        """Return this launch with a whole model on every rank in place of expert
        parallelism.
        """
        copies = Engine("ddp" if self.ranks.size > 1 else "one")
        return self._with_engine(copies) if self.engine.spreads_experts else self

    def _with_engine(self, engine: Engine) -> "Launch":
        return replace(
            self, engine=engine, ranks=replace(self.ranks, lockstep=engine.shards)
        )
