"""Build a Megatron-Core model of a checkpoint: local layers with the checkpoint's
sizes, router and connectivity.
"""

from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from fcsd.base.errors import UserError
from fcsd_megatron.refusals import check_options
from fcsd_megatron.settings import rotary_of
from fcsd_megatron.source import Source, read_source
from fcsd_megatron.spec import local_block, with_farskip
from fcsd_megatron.versions import check_version


def transformer_config(source: Source, **options: Any) -> TransformerConfig:
    """Return Megatron's config of a checkpoint, for the parallel groups that Megatron
    has initialised.

    Args:
        options: further fields of TransformerConfig (`params_dtype`,
            `moe_token_dispatcher_type`, …).

    Raises:
        UserError: an option that the checkpoint determines, or that FarSkip layers do
            not support.
    """
    if decided := sorted(options.keys() & source.settings.keys() - _FREE):
        raise UserError(
            f"{source.checkpoint.folder}: {decided[0]} comes from the checkpoint"
            f" ({source.settings[decided[0]]!r}); leave it out"
        )
    groups = {
        "tensor_model_parallel_size": (
            parallel_state.get_tensor_model_parallel_world_size()
        ),
        "pipeline_model_parallel_size": (
            parallel_state.get_pipeline_model_parallel_world_size()
        ),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": (
            parallel_state.get_expert_model_parallel_world_size()
        ),
    }
    latent = source.settings.get("multi_latent_attention")
    cls = MLATransformerConfig if latent else TransformerConfig
    fields: dict[str, Any] = {**source.settings, **groups, **options}
    if fields["pipeline_model_parallel_size"] > 1:
        # or Megatron complains first
        fields.setdefault("pipeline_dtype", fields.get("params_dtype"))
    config: TransformerConfig = cls(**fields)
    check_options(config)
    return config


_FREE = {
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
}
"""Fields that a training may choose: they do not change the model's outputs in
evaluation.
"""


def build_model(path: str | Path, **options: Any) -> GPTModel:
    """Build the model of a checkpoint with Megatron's own initial weights;
    `load_weights` fills in the checkpoint's.

    Args:
        path: local folder, or `owner/name` of a Hub repository; the model gets its
            connectivity.
        options: further fields of TransformerConfig.

    Raises:
        UserError: an unsupported release of megatron-core; as in `read_source` and
            `transformer_config`.
    """
    check_version()
    source = read_source(path)
    config = transformer_config(source, **options)
    return GPTModel(
        config,
        with_farskip(local_block(config), source.plans),
        vocab_size=source.config.vocab_size,
        max_sequence_length=source.config.max_position_embeddings,
        share_embeddings_and_output_weights=False,
        **rotary_of(source.config),
    )
