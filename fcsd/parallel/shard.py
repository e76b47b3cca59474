"""Shard a model over the ranks with FSDP2 or DeepSpeed ZeRO-3, and put it together
again.

Unit by unit (a decoder layer, the embedding, the head, what is left): the first rank
has the weights on its CPU, the others a model without storage; a unit is sent to all
devices and every rank keeps its shard. So no device ever holds more than its shard and
one unit, and no host but the first rank's holds a whole model.

This is done here, and not by accelerate, because
- accelerate shards the layers of the first class that has a decoder layer's name; a
  model of which some layers are rewired has several classes of that name, and all
  layers of the others would be gathered at once;
- it shards no frozen model: `prepare_model(evaluation_mode=True)` would leave the
  teacher whole on every rank;
- between the micro-batches of a step it leaves FSDP2's gradients whole on every rank.

Routers that a family keeps in float32 are units of their own, which stay in float32.

Not covered: other parameters that transformers keeps in float32 in a bfloat16 model
(convolutions, decays) are computed with in bfloat16 where train.bf16 is set, and all of
them under ZeRO-3, whose parts have one dtype; the vision tower of a multimodal model is
one unit with the final norm.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.base.memory import available_memory
from fcsd.model.connectivity.rewire import decoder_layers, is_one_of
from fcsd.model.dtypes import kept_in_float32, kept_routers
from fcsd.model.families import family_of
from fcsd.model.families.structure import head_and_body
from fcsd.model.load import free_memory
from fcsd.parallel.engine import Engine, Precision
from fcsd.parallel.launch import Launch
from fcsd.parallel.ranks import Ranks
from fcsd.parallel.sender import Sender


def own_part(parameter: Any) -> Any:
    """Return this rank's shard of a parameter: FSDP2's is in a DTensor, ZeRO-3's beside
    an empty parameter.
    """
    local = getattr(parameter, "ds_tensor", parameter)
    return local.to_local() if hasattr(local, "to_local") else local


def shard_student(model: PreTrainedModel, launch: Launch, train: Precision) -> None:
    """Leave on every rank its part of a model that is to be trained. It carries its
    loss head already.

    FSDP2: parameters in train.dtype; with train.bf16 they are gathered as bfloat16 and
    gradients are reduced in float32. ZeRO-3: parameters in bfloat16 with train.bf16,
    else float32; DeepSpeed adds its float32 copy of the part.
    """
    engine = launch.engine
    if engine.spreads_experts:
        return  # it was loaded so
    layers = _decoder_layers(model, engine)
    embedding, head = model.get_input_embeddings(), head_and_body(model)[0]
    tied = embedding.weight is head.weight
    units = [
        *([layer] for layer in layers),
        *([[embedding, head]] if tied else [[embedding], [head]]),
    ]
    sender = Sender(model, launch)
    if engine.uses_deepspeed:
        moe_leaves(model)
        if train.bf16:
            sender.kept_names = kept_in_float32(model)
        model.__dict__[KEPT] = sender.float32
        _partition(
            model, units, sender, torch.bfloat16 if train.bf16 else torch.float32
        )
        return
    policy = MixedPrecisionPolicy()
    if train.bf16:
        # What a layer is given stays as it is: a bfloat16 model has rotary embeddings
        # in float32.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
    dtype = torch.float32 if train.dtype == "float32" else torch.bfloat16
    apart = kept_routers(model) if torch.bfloat16 in (dtype, policy.param_dtype) else []
    _fully_shard(model, units, sender, launch, dtype, policy, trained=True, apart=apart)


KEPT = "_kept_in_float32"
"""Attribute of a model under ZeRO-3: the parameters that its family keeps in float32,
as they were, by name.
"""


def shard_teacher(model: PreTrainedModel, launch: Launch) -> nn.Module:
    """Leave on every rank its part of a frozen model's body, in the dtype that it was
    loaded in.

    Returns:
        The head, whole on every rank: V x D numbers (0.6 GB for Qwen3-30B-A3B in
        bfloat16), which every micro-batch reads whole; a gather for each would cost
        more time than the memory is worth.
    """
    model.eval().requires_grad_(False)
    head, body = head_and_body(model)
    if "_sharded" in model.__dict__:  # the runs of a sweep share it
        return model.__dict__.get("_whole_head", head)
    model.__dict__["_sharded"] = True
    engine = launch.engine
    if engine.spreads_experts:
        mesh: Any = head.weight
        # it was loaded as a part of the model, and runs alone here
        fully_shard(body, mesh=mesh.device_mesh)
        model.__dict__["_whole_head"] = whole_head(model, launch.device)
        return model.__dict__["_whole_head"]
    layers = _decoder_layers(model, engine)
    embedding: Any = model.get_input_embeddings()
    sender = Sender(model, launch)
    if embedding.weight is head.weight:
        sender.send(embedding, None)
        head.weight = nn.Parameter(
            embedding.weight.detach().clone(), requires_grad=False
        )
    else:
        sender.send(head, None)
    units = [*([layer] for layer in layers), [embedding]]
    if engine.uses_deepspeed:
        _partition(body, units, sender, None)
        _serve(body)
    else:
        _fully_shard(
            body, units, sender, launch, None, MixedPrecisionPolicy(), trained=False
        )
    return head


def whole_head(model: PreTrainedModel, device: torch.device) -> nn.Linear:
    """Return a copy of a model's head, whole on every rank, however the model is
    sharded; all ranks call this.
    """
    head, _ = head_and_body(model)
    whole = nn.Linear(1, 1, bias=False, device="meta")
    for name, parameter in head.named_parameters():
        with _gathered(parameter, device) as tensor:
            whole.register_parameter(
                name, nn.Parameter(tensor.detach().clone(), requires_grad=False)
            )
    whole.out_features, whole.in_features = whole.weight.shape
    return whole


def whole_model(
    model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], launch: Launch
) -> PreTrainedModel | None:
    """Gather a sharded model into a whole one on the CPU of the first rank; return None
    on the others.

    All ranks call this; one parameter at a time is whole on their devices.

    dtypes: of the gathered tensors, by name, the same on all ranks; those without one
    stay as they are.
    """
    reshard(model)
    first = launch.first
    tensors: dict[str, Tensor] = {}
    kept = model.__dict__.get(KEPT, {})
    for name, parameter in model.named_parameters():
        with _gathered(parameter, launch.device, dtypes.get(name)) as gathered:
            if first:
                tensor = (
                    gathered if parameter.requires_grad else kept.get(name, gathered)
                )
                tensors[name] = (
                    tensor.detach().to(dtypes.get(name)).to("cpu", copy=True)
                )
    if not first:
        return None
    for name, buffer in model.named_buffers():
        tensors[name] = buffer.detach().to(dtypes.get(name)).to("cpu", copy=True)
    config = copy.deepcopy(model.config)
    config.__dict__.pop("distributed_config", None)
    own: Any = next(
        cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)
    )
    with torch.device("meta"):
        whole = own(config)
    names = whole.state_dict().keys()
    whole.load_state_dict(
        {n: t for n, t in tensors.items() if n in names}, strict=False, assign=True
    )
    whole.tie_weights()
    if lost := [name for name, tensor in whole.state_dict().items() if tensor.is_meta]:
        raise RuntimeError(
            f"{type(model).__name__}: no weights for {lost[0]} and {len(lost) - 1}"
            " others"
        )
    whole.generation_config = model.generation_config
    if "_weight_conversions" in model.__dict__:
        whole._weight_conversions = model._weight_conversions
    return whole.eval()


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered (generation leaves the head whole); nothing for other models."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_WHOLE_AND_REST = 1.1
"""Free memory over gathered weights from which on these are kept: a tenth is for caches
and activations.
"""


def fits_whole(num_bytes: int, free_bytes: int) -> bool:
    """Return whether weights of so many bytes are kept whole while a model is scored."""
    return _WHOLE_AND_REST * num_bytes <= free_bytes


@contextlib.contextmanager
def gathered_once(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Keep what FSDP2 gathers in the block's first forward pass until its end, where
    all ranks have room for it.

    Generation makes a pass for every token, and each would gather all weights. All
    ranks enter the block, and change no weights in it. Expert parallelism gathers as
    before.
    """
    shards: list[_Shards] = [
        each.__dict__["_shards"]
        for each in model.modules()
        if "_shards" in each.__dict__
    ]
    num_bytes = sum(each.num_bytes for each in shards)
    kept = (
        all(ranks.share(lambda: fits_whole(num_bytes, _free_bytes(shards[0].device))))
        if shards
        else False
    )
    units = [unit for each in shards for unit in each.units] if kept else []
    for unit, _ in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit, frees in units:
            unit.set_reshard_after_forward(frees, recurse=False)
        if units:
            reshard(model)


def _free_bytes(device: torch.device) -> int:
    """Return what this rank may take of its device's memory."""
    if device.type == "cpu":
        return available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free_memory()
    return int(torch.cuda.mem_get_info(device)[0])


def _decoder_layers(model: PreTrainedModel, engine: Engine) -> list[nn.Module]:
    family = family_of(model.config)
    own = family.decoder_layer
    names = (own,) if isinstance(own, str) else own
    if wrong := set(engine.layer_classes) - set(names):
        raise UserError(
            "accelerate's configuration: fsdp_transformer_layer_cls_to_wrap"
            f" {', '.join(sorted(wrong))}: the decoder layers of {type(model).__name__}"
            f" are {' and '.join(names)}; leave the key out"
        )
    return list(decoder_layers(model, family))


@contextlib.contextmanager
def _gathered(
    parameter: Any, device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[Tensor]:
    """Give a parameter's whole value; all ranks enter the context.

    dtype: in which it is wanted. ZeRO-3 computes in bfloat16, and trains a copy in
    float32.
    """
    if (
        dtype == torch.float32
        and parameter.requires_grad
        and hasattr(parameter, "_z3_optimizer")
    ):
        from deepspeed.utils import safe_get_full_fp32_param

        yield safe_get_full_fp32_param(parameter)
    elif hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.data
    elif hasattr(parameter, "full_tensor"):
        yield parameter.detach().to(device).full_tensor()
    else:
        yield parameter.data


@dataclass(frozen=True)
class _Shards:
    """What FSDP2 gathers on a rank: units, each with whether a forward pass frees it,
    and the bytes of all of them.
    """

    units: list[tuple[Any, bool]]
    num_bytes: int
    device: torch.device


def _fully_shard(
    root: nn.Module,
    units: list[list[nn.Module]],
    sender: Sender,
    launch: Launch,
    dtype: torch.dtype | None,
    policy: Any,
    *,
    trained: bool,
    apart: Sequence[nn.Module] = (),
) -> None:
    """Shard a model.

    units: what is gathered as one, the head last in a model that is trained. apart:
    modules in them that are gathered alone, in float32.
    """
    engine, world, kind = launch.engine, launch.ranks.size, launch.device.type
    if engine.replicas > 1:
        shape, names = (
            (engine.replicas, world // engine.replicas),
            ("replicate", "shard"),
        )
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
    else:
        mesh = init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if engine.offload else OffloadPolicy(),
    }
    gathered: list[tuple[Any, bool]] = []
    for module in apart:
        sender.send(module, torch.float32)
        fully_shard(
            module,
            reshard_after_forward=True,
            **(options | {"mp_policy": MixedPrecisionPolicy()}),
        )
        gathered.append((module, True))
    for unit in units:
        for module in unit:
            sender.send(module, dtype)
        # The backward pass begins with the head and the root's own, which the forward
        # pass has just gathered.
        frees = (
            engine.reshard if trained and unit[-1] is not units[-1][-1] else not trained
        )
        fully_shard(
            unit if len(unit) > 1 else unit[0], reshard_after_forward=frees, **options
        )
        gathered.append((unit[0], frees))
    sender.send(root, dtype)
    fully_shard(root, reshard_after_forward=not trained, **options)
    gathered.append((root, not trained))
    num_bytes = sum(
        p.numel() * (policy.param_dtype or p.dtype).itemsize for p in root.parameters()
    )
    root.__dict__["_shards"] = _Shards(gathered, num_bytes, launch.device)
    root._is_fsdp_managed_module = True  # type: ignore[assignment]  # transformers: generate in lock-step


# ---- DeepSpeed


def _partition(
    root: nn.Module,
    units: list[list[nn.Module]],
    sender: Sender,
    dtype: torch.dtype | None,
) -> None:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero_settings(),
    }
    for unit in [*units, [root]]:
        for module in unit:
            sender.send(module, dtype)
            own = next(module.parameters()).dtype
            deepspeed.zero.Init(module=module, config_dict_or_path=settings, dtype=own)


def zero_settings() -> dict[str, Any]:
    """Return `zero_optimization` of accelerate's configuration, without what is to be
    filled in later.
    """
    from accelerate.utils import DeepSpeedPlugin

    settings = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
    return {key: value for key, value in settings.items() if value != "auto"}


def _serve(body: nn.Module) -> None:
    """Give a partitioned, frozen module the hooks that gather its parameters."""
    import deepspeed

    own = next(body.parameters()).dtype
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero_settings(),
        "bf16": {"enabled": own == torch.bfloat16},
        "steps_per_print": float("inf"),
    }
    engine, *_ = deepspeed.initialize(model=body, config=settings)
    body.__dict__["_zero_engine"] = engine.eval()


def moe_leaves(model: PreTrainedModel) -> None:
    """Make ZeRO-3 gather an MoE block as one: which of its experts run differs between
    ranks, gathers must not.
    """
    from deepspeed.utils import set_z3_leaf_modules

    family = family_of(model.config)
    blocks = [getattr(layer, family.moe) for layer in decoder_layers(model, family)]
    set_z3_leaf_modules(
        model,
        list({type(block) for block in blocks if is_one_of(block, family.moe_block)}),
    )
