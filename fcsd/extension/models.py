"""Models in memory: their folders, families, routers, and the ranks that hold them."""

from fcsd.base.memory import free_memory
from fcsd.model.connectivity.export import carry_over, write_code
from fcsd.model.connectivity.load import check_tensors, config_and_class
from fcsd.model.connectivity.modeling import MODELING_FILE
from fcsd.model.families import expert_counts, moe_mask, row_width
from fcsd.model.families.capacity import capacity, kept_pairs
from fcsd.model.families.choices import Routed, recording
from fcsd.model.families.routers import Router, find_routers
from fcsd.model.families.structure import unwrapped
from fcsd.model.load import ModelFolder, find_model, load_tokenizer
from fcsd.parallel.join import join_launch
from fcsd.parallel.launch import Launch
from fcsd.parallel.overlap.transport import AllToAll, SendReceive, Transport
from fcsd.parallel.place import check_device_map, load_for_evaluation
from fcsd.parallel.ranks import ALONE, Ranks, input_device
from fcsd.parallel.stages import begin_stage, finish_stage
from fcsd.training.calibration.shards import write_changed

__all__ = [
    "ALONE",
    "MODELING_FILE",
    "AllToAll",
    "Launch",
    "ModelFolder",
    "Ranks",
    "Routed",
    "Router",
    "SendReceive",
    "Transport",
    "begin_stage",
    "capacity",
    "carry_over",
    "check_device_map",
    "check_tensors",
    "config_and_class",
    "expert_counts",
    "find_model",
    "find_routers",
    "finish_stage",
    "free_memory",
    "input_device",
    "join_launch",
    "kept_pairs",
    "load_for_evaluation",
    "load_tokenizer",
    "moe_mask",
    "recording",
    "row_width",
    "unwrapped",
    "write_changed",
    "write_code",
]
