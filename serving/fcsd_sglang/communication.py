"""The all-reduces of SGLang's ranks, by the back ends of `fcsd_vllm`, and where the user chooses one: `FCSD_SERVING`.

`c10d`, the default, runs on the stream of torch's own process group on GPUs, and in its thread with gloo.
"""

import json
import os
from dataclasses import replace
from typing import Any

import torch

from fcsd_vllm.communication import Alone, Blocking, Communication, make_communication
from fcsd_vllm.settings import Settings, SettingsError, read_settings

VARIABLE = "FCSD_SERVING"
BACK_ENDS = ("c10d", "blocking", "timed")


def settings() -> Settings:
    """Return the settings in `FCSD_SERVING`, JSON such as `{"comm": "blocking"}`.

    Raises:
        SettingsError: no JSON, an unknown key, or a back end that SGLang does not have.
    """
    text = os.environ.get(VARIABLE, "{}")
    try:
        chosen = read_settings({"fcsd": json.loads(text)})
    except json.JSONDecodeError as error:
        raise SettingsError(
            f'{VARIABLE}: must be JSON such as {{"comm": "blocking"}}, got {text!r}'
        ) from error
    except SettingsError as error:
        raise SettingsError(str(error).replace("additional_config: fcsd", VARIABLE)) from error
    if chosen.comm and chosen.comm not in BACK_ENDS:
        raise SettingsError(
            f"{VARIABLE}.comm: must be one of {', '.join(BACK_ENDS)} with SGLang, got {chosen.comm!r}"
        )
    if chosen.looked_at:
        raise SettingsError(
            f"{VARIABLE}.looked_at: of vLLM; with SGLang one version alone is served, leave it out"
        )
    return chosen if chosen.comm else replace(chosen, comm=BACK_ENDS[0])


class BlockingInBreakableGraphs:
    """Another back end, but the engine's own all-reduce in a graph of pieces, whose end no collective may outlive."""

    def __init__(self, overlapped: Communication, blocking: Communication) -> None:
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
            is_in_breakable_cuda_graph,
        )

        self.overlapped, self.blocking = overlapped, blocking
        self.in_pieces = is_in_breakable_cuda_graph

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Choose by what is captured or run."""
        return (self.blocking if self.in_pieces() else self.overlapped).start(x, tag)

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Choose as `start` did."""
        return (self.blocking if self.in_pieces() else self.overlapped).wait(x, tag)


def make(chosen: Settings, group: Any) -> Communication:
    """Return the back end that the settings name, over the ranks of a group coordinator of SGLang."""
    made = make_communication(chosen, group)
    return made if isinstance(made, Alone | Blocking) else BlockingInBreakableGraphs(made, Blocking(group))
