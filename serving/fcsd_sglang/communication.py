"""All-reduces between SGLang's ranks, with the backends of `fcsd_vllm`."""

from typing import Any

from fcsd_vllm.communication import Communication, make_communication
from fcsd_vllm.settings import Settings


def make(chosen: Settings, group: Any) -> Communication:
    """Return the backend that the settings name, over the ranks of a group coordinator
    of SGLang.
    """
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        eager_on_graph,
    )

    return make_communication(chosen, group, eager_on_graph)
