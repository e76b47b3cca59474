"""transformers configs `farskip_<base>`: the base's class, whose instances carry the
base's `model_type`.

So vLLM chooses MLA, mRoPE, chunked attention, quantisation and speculation as for the
base.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fcsd_vllm.families import FAMILIES, Family
from fcsd_vllm.field import FieldError, field_of, read_field


def check_config(config: Mapping[str, Any], family: Family) -> None:
    """Raise FieldError if the field, architecture and model type of a config.json do
    not match.
    """
    architectures = config.get("architectures") or []
    if architectures != [family.architecture]:
        raise FieldError(
            f"config.json: model_type '{family.farskip_type}' needs architectures"
            f" ['{family.architecture}'], got {architectures!r}; write the checkpoint"
            " again with `fcsd convert`"
        )
    text = config.get("text_config", {}) if family.text_config else config
    read_field(
        config.get("farskip"),
        text.get("num_hidden_layers") if isinstance(text, Mapping) else None,
    )


def check_class(config: Any, family: Family, architecture: str) -> None:
    """Raise FieldError for a config object that was not read (and so not checked) as a
    config of this family.
    """
    if (
        architecture == family.causal_lm
    ):  # AMD's config, of any class, or the regular one
        field_of(config, config.num_hidden_layers)
        for name, value in family.defaults:
            if not hasattr(config, name):
                setattr(config, name, value)
    elif type(config).model_type != family.farskip_type:
        raise FieldError(
            f"config.json: architecture '{family.architecture}' needs model_type"
            f" '{family.farskip_type}', got '{config.model_type}'; write the checkpoint"
            " again with `fcsd convert`"
        )


def make_config_class(
    family: Family,
    *,
    base: Any = None,
    complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    module: str = __name__,
    base_architecture: bool = False,
    regular: bool = False,
    check: Callable[[], None] | None = None,
) -> Any:
    """Return the config class of a family, as `AutoConfig` is to know it.

    Args:
        base: the class that the engine reads regular checkpoints with; None: that of
            transformers.
        complete: adds to a config's fields what `base` needs.
        module: the module in which pickle finds the class by name.
        base_architecture: whether instances also carry the base's `architectures`.
        regular: return the config class of the base, which transformers lacks, instead
            of the converted checkpoint's.
        check: called before a config is read.
    """
    import transformers

    is_own = base is not None
    base = base or getattr(transformers, family.config)

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if check is not None:
            check()
        if not regular:
            check_config(config_dict, family)
        unset = {
            name: value
            for name, value in family.defaults
            if config_dict.get(name) is None
        }
        fields = complete({**config_dict, **unset})
        made = super(new, cls).from_dict(fields, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        if not regular:
            config.farskip = config_dict["farskip"]
        if base_architecture:
            config.architectures = [family.causal_lm]
        config.__dict__["model_type"] = family.stock_type
        return made

    def __init__(self: Any, **kwargs: Any) -> None:
        # Else transformers would make one that skips those of the engine's classes.
        super(new, self).__init__(**kwargs)

    name = family.farskip_config.removeprefix("FarSkip" if regular else "")
    new: Any = type(
        name,
        (base,),
        {
            **({"gated_attention": True} if family.like else {}),
            **({"__init__": __init__} if is_own else {}),
            "model_type": family.model_type if regular else family.farskip_type,
            "from_dict": classmethod(from_dict),
            "__module__": module,
        },
    )
    return new


def __getattr__(name: str) -> Any:
    """Create a config class when it is first needed, also by pickle."""
    regular = not name.startswith("FarSkip")
    for family in FAMILIES.values():
        if family.farskip_config == f"FarSkip{name.removeprefix('FarSkip')}" and (
            family.like or not regular
        ):
            globals()[name] = made = make_config_class(family, regular=regular)
            return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
