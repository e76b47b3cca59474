"""Shard a model over the ranks with FSDP2 or DeepSpeed ZeRO-3, and put it together
again.

A model is sharded unit by unit (a decoder layer, the embedding, the head, the rest).
The first rank has the weights on its CPU, the others a model without storage; each unit
is sent to all devices, and every rank keeps its shard. So no device ever holds more
than its shard and one unit, and only the first rank's host holds a whole model.

This is done here, and not by accelerate, because
- accelerate shards the layers of the first class that has a decoder layer's name; a
  model in which some layers are rewired has several classes of that name, and all
  layers of the others would be gathered at once;
- it does not shard frozen models: `prepare_model(evaluation_mode=True)` would leave the
  teacher whole on every rank;
- it leaves FSDP2's gradients whole on every rank between the micro-batches of a step.

Routers that a family keeps in float32 are separate units, which stay in float32.

Not covered: other parameters that transformers keeps in float32 in a bfloat16 model
(convolutions, decays), which take part in bfloat16 computation under train.bf16, as all
of them do under ZeRO-3, whose shards have one dtype; the vision tower of a multimodal
model, which is one unit with the final norm.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from fcsd.model.connectivity.stack import decoder_layers, is_one_of
from fcsd.model.dtypes import kept_in_float32, kept_routers
from fcsd.model.families import family_of
from fcsd.model.families.structure import head_and_body
from fcsd.parallel.engine import Engine, Precision
from fcsd.parallel.launch import Launch, Shards, reshard

if TYPE_CHECKING:
    from fcsd.parallel.sender import Sender


def own_part(parameter: Any) -> Any:
    """Return this rank's shard of a parameter: FSDP2 has it in a DTensor, ZeRO-3 beside
    an empty parameter.
    """
    local = getattr(parameter, "ds_tensor", parameter)
    return local.to_local() if hasattr(local, "to_local") else local


def shard_student(model: PreTrainedModel, launch: Launch, train: Precision) -> None:
    """Leave on every rank its shard of a model that will be trained and has its loss
    head already.

    FSDP2: parameters in train.dtype; with train.bf16 they are gathered as bfloat16 and
    gradients are reduced in float32. ZeRO-3: parameters in bfloat16 with train.bf16,
    else float32; DeepSpeed adds a float32 copy of the shard.
    """
    engine = launch.engine
    if engine.spreads_experts:
        return  # transformers sharded it while loading
    layers = _decoder_layers(model, engine)
    embedding, head = model.get_input_embeddings(), head_and_body(model)[0]
    tied = embedding.weight is head.weight
    # Tied weights must be gathered together, so they are one unit.
    units = [
        *([layer] for layer in layers),
        *([[embedding, head]] if tied else [[embedding], [head]]),
    ]
    from fcsd.parallel.sender import Sender

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
        # A layer's inputs keep their dtypes: a bfloat16 model has rotary embeddings in
        # float32.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
    dtype = torch.float32 if train.dtype == "float32" else torch.bfloat16
    apart = kept_routers(model) if torch.bfloat16 in (dtype, policy.param_dtype) else []
    _fully_shard(model, units, sender, launch, dtype, policy, trained=True, apart=apart)


KEPT = "_kept_in_float32"
"""Attribute of a model under ZeRO-3: the original values, by name, of the parameters
that its family keeps in float32.
"""


def shard_teacher(model: PreTrainedModel, launch: Launch) -> nn.Module:
    """Leave on every rank its shard of a frozen model's body, in the dtype that it was
    loaded in.

    Returns:
        The head, whole on every rank: V x D numbers (0.6 GB for Qwen3-30B-A3B in
        bfloat16). Every micro-batch reads all of it; gathering it each time would cost
        more time than the memory is worth.
    """
    model.eval().requires_grad_(False)
    head, body = head_and_body(model)
    if "_sharded" in model.__dict__:  # the runs of a sweep share a teacher
        return model.__dict__.get("_whole_head", head)
    model.__dict__["_sharded"] = True
    engine = launch.engine
    if engine.spreads_experts:
        mesh: Any = head.weight
        # The body was loaded as part of the model, and runs without it here.
        fully_shard(body, mesh=mesh.device_mesh)
        model.__dict__["_whole_head"] = whole_head(model, launch.device)
        return model.__dict__["_whole_head"]
    layers = _decoder_layers(model, engine)
    embedding: Any = model.get_input_embeddings()
    from fcsd.parallel.sender import Sender

    sender = Sender(model, launch)
    if embedding.weight is head.weight:
        # The embedding will be sharded and the head not, so the tie is cut.
        sender.send(embedding, None)
        head.weight = nn.Parameter(
            embedding.weight.detach().clone(), requires_grad=False
        )
    else:
        sender.send(head, None)
    units = [*([layer] for layer in layers), [embedding]]
    if engine.uses_deepspeed:
        _partition(body, units, sender, None)
        _gather_when_called(body)
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
    # A new module, without the hooks that gather the sharded one.
    full_head = nn.Linear(1, 1, bias=False, device="meta")
    for name, parameter in head.named_parameters():
        with _gathered(parameter, device) as tensor:
            full_head.register_parameter(
                name, nn.Parameter(tensor.detach().clone(), requires_grad=False)
            )
    full_head.out_features, full_head.in_features = full_head.weight.shape
    return full_head


def whole_model(
    model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], launch: Launch
) -> PreTrainedModel | None:
    """Gather a sharded model into a whole one on the first rank's CPU; return None on
    the others.

    All ranks call this; only one parameter at a time is whole on their devices.

    dtypes: of the gathered tensors, by name, the same on all ranks; a tensor without an
    entry keeps its dtype.
    """
    reshard(model)
    first = launch.first
    tensors: dict[str, Tensor] = {}
    float32_values = model.__dict__.get(KEPT, {})
    for name, parameter in model.named_parameters():
        with _gathered(parameter, launch.device, dtypes.get(name)) as gathered:
            if first:
                if parameter.requires_grad:
                    tensor = gathered
                else:
                    tensor = float32_values.get(name, gathered)
                tensors[name] = (
                    tensor.detach().to(dtypes.get(name)).to("cpu", copy=True)
                )
    if not first:
        return None
    # Buffers are whole on every rank.
    for name, buffer in model.named_buffers():
        tensors[name] = buffer.detach().to(dtypes.get(name)).to("cpu", copy=True)
    config = copy.deepcopy(model.config)
    config.__dict__.pop("distributed_config", None)
    # FSDP2 has swapped the model's class; the gathered model has the original one.
    plain_class: Any = next(
        cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)
    )
    with torch.device("meta"):
        full_model = plain_class(config)
    stored_names = full_model.state_dict().keys()
    full_model.load_state_dict(
        {n: t for n, t in tensors.items() if n in stored_names},
        strict=False,
        assign=True,
    )
    # Tied weights are stored once, under the first of their names.
    full_model.tie_weights()
    if lost := [
        name for name, tensor in full_model.state_dict().items() if tensor.is_meta
    ]:
        raise RuntimeError(
            f"{type(model).__name__}: no weights for {lost[0]} and {len(lost) - 1}"
            " others"
        )
    full_model.generation_config = model.generation_config
    if "_weight_conversions" in model.__dict__:
        full_model._weight_conversions = model._weight_conversions
    return full_model.eval()


def _decoder_layers(model: PreTrainedModel, engine: Engine) -> list[nn.Module]:
    family = family_of(model.config)
    expected = family.decoder_layer
    expected_names = (expected,) if isinstance(expected, str) else expected
    if wrong := set(engine.layer_classes) - set(expected_names):
        raise UserError(
            "accelerate's configuration: fsdp_transformer_layer_cls_to_wrap"
            f" {', '.join(sorted(wrong))}: the decoder layers of {type(model).__name__}"
            f" are {' and '.join(expected_names)}; leave the key out"
        )
    return list(decoder_layers(model, family))


@contextlib.contextmanager
def _gathered(
    parameter: Any, device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[Tensor]:
    """Yield a parameter's whole value; all ranks enter the context.

    dtype: float32 asks ZeRO-3, which computes in bfloat16, for the float32 copy that it
    trains.
    """
    if (
        dtype == torch.float32
        and parameter.requires_grad
        and hasattr(parameter, "_z3_optimizer")
    ):
        from deepspeed.utils import safe_get_full_fp32_param

        # The optimiser's float32 copy is exact; the parameter is its bfloat16 rounding.
        yield safe_get_full_fp32_param(parameter)
    elif hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.data
    elif hasattr(parameter, "full_tensor"):
        yield parameter.detach().to(device).full_tensor()
    else:
        yield parameter.data


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

    units: modules that are gathered together, the head last if the model is trained.
    apart: modules within them that are gathered alone, in float32.
    """
    engine, world, device_type = launch.engine, launch.ranks.size, launch.device.type
    # Hybrid sharding: shards within a replica, copies across replicas.
    if engine.replicas > 1:
        shape = (engine.replicas, world // engine.replicas)
        dim_names = ("replicate", "shard")
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=dim_names)
    else:
        mesh = init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    offload = CPUOffloadPolicy() if engine.offload else OffloadPolicy()
    gathered: list[tuple[Any, bool]] = []

    def shard(
        unit: list[nn.Module], dtype: torch.dtype | None, frees: bool, policy: Any
    ) -> None:
        for module in unit:
            sender.send(module, dtype)
        fully_shard(
            unit if len(unit) > 1 else unit[0],
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=frees,
        )
        gathered.append((unit[0], frees))

    # Inner units before the units that contain them, as fully_shard requires.
    for module in apart:
        shard([module], torch.float32, True, MixedPrecisionPolicy())
    for unit in units:
        # The backward pass begins with the head and the root's own weights, which the
        # forward pass has just gathered: freeing them would gather them twice.
        is_last = unit[-1] is units[-1][-1]
        shard(unit, dtype, not trained or (engine.reshard and not is_last), policy)
    shard([root], dtype, not trained, policy)
    num_bytes = sum(
        p.numel() * (policy.param_dtype or p.dtype).itemsize for p in root.parameters()
    )
    root.__dict__["_shards"] = Shards(gathered, num_bytes, launch.device)
    root._is_fsdp_managed_module = True  # type: ignore[assignment]  # transformers: generate in lock-step


# ---- DeepSpeed


def _partition(
    root: nn.Module,
    units: list[list[nn.Module]],
    sender: Sender,
    dtype: torch.dtype | None,
) -> None:
    import deepspeed

    # DeepSpeed asks for a batch size, which partitioning does not use.
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero_settings(),
    }
    for unit in [*units, [root]]:
        for module in unit:
            sender.send(module, dtype)
            dtype_of_module = next(module.parameters()).dtype
            deepspeed.zero.Init(
                module=module, config_dict_or_path=settings, dtype=dtype_of_module
            )


def zero_settings() -> dict[str, Any]:
    """Return `zero_optimization` of accelerate's configuration, without the "auto"
    values that are filled in later.
    """
    from accelerate.utils import DeepSpeedPlugin

    settings = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
    return {key: value for key, value in settings.items() if value != "auto"}


def _gather_when_called(body: nn.Module) -> None:
    """Give a partitioned, frozen module the hooks that gather its parameters."""
    import deepspeed

    # An engine of its own: DeepSpeed's hooks come with one, and the student's has other
    # parameters.
    dtype = next(body.parameters()).dtype
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero_settings(),
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": float("inf"),
    }
    engine, *_ = deepspeed.initialize(model=body, config=settings)
    body.__dict__["_zero_engine"] = engine.eval()


def moe_leaves(model: PreTrainedModel) -> None:
    """Make ZeRO-3 gather an MoE block as a whole: ranks run different experts, but must
    make the same gathers.
    """
    from deepspeed.utils import set_z3_leaf_modules

    family = family_of(model.config)
    blocks = [getattr(layer, family.moe) for layer in decoder_layers(model, family)]
    set_z3_leaf_modules(
        model,
        list({type(block) for block in blocks if is_one_of(block, family.moe_block)}),
    )
