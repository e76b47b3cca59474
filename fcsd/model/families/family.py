"""Describe one MoE family by its upstream names. Standard library only, so that recipes
and `--help` can read it without torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from fcsd.base.errors import UserError, one_line

READS = (
    "q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj", "in_proj",
    "gate_proj", "up_proj", "gate_up_proj", "gate", "router", "shared_expert_gate",
)  # fmt: skip
"""Weights that multiply the input of their branch, in every family that has them."""

WRITES = ("o_proj", "out_proj", "down_proj")
"""Weights whose product is the output of their branch, in every family that has them."""

INDEXER = ("indexer.wk", "indexer.weights_proj")
"""Weights with which the indexers of sparse attention read, besides their queries."""


@dataclass(frozen=True)
class Folding:
    """The weights of a layer that multiply the input of a branch, and those that write
    its output to the stream: those of one family that are not in `READS` and `WRITES`,
    and exceptions.

    A weight is given by the end of its name, without `.weight` or `.bias`: `q_proj` is
    `self_attn.q_proj.weight`. Calibration folds its maps into these weights
    (`fcsd.training.calibration`). `tests/training/calibration/test_fold.py` verifies the
    rows of all families: it finds the weights by tracing tensors through a layer.
    """

    reads: tuple[str, ...] = ()
    """Further weights that multiply the input of their branch, and nothing else."""
    writes: tuple[str, ...] = ()
    """Further weights, or biases, that write the output of their branch."""
    transposed: tuple[str, ...] = ()
    """Weights with inputs before outputs, (E, D, I); by default those of a linear are
    (I, D), those of experts (E, I, D).
    """
    left_out: tuple[str, ...] = ()
    """Modules in a branch whose weights do neither, although their names say so."""
    latent: str | None = None
    """Projection into a space of the experts' own. In a model that has one, and no
    identity there, the experts are left out."""
    unread: tuple[str, ...] = ()
    """Children of the layer with weights whose input is not the output of a norm."""
    apart: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(class of a layer, modules in it that read another input than their branch)."""
    other_uses: tuple[tuple[str, str], ...] = ()
    """(module, operation in it) that also reads the input of the branch, and before
    which no map can be put.
    """
    closed: tuple[str, ...] = ()
    """Branches that are followed by a norm, a convolution or a gate per channel. In a
    family that is not additive, the MoE blocks are closed as well; with
    hyper-connections, all branches."""
    mlp_factor: str | None = None
    """Attribute of the layer: factor on the MLP's output, unless it is
    `residual_multiplier`."""
    routed_factor: str | None = None
    """Attribute of the MoE block: factor on the output of its experts."""


@dataclass(frozen=True)
class Family:
    """Names of one family, in the spelling of its upstream modeling file.

    These are the layers of all families, with A for attention, M for the MLP or MoE
    block, N for norms (including those after a branch), and c for the residual
    multiplier or 1:

        pre_norm    h = r(o) + c·A(N(o));   o' = r(h) + c·M(N(h))
        post_norm   x = N(o);  h = N(r(x) + A(x));   o' = r(h) + M(h)      a norm may be missing
        parallel    o' = o + A(N(o)) + M(N(o))
        streams     H = r(O) + w·A(N(O)); O' = r(H) + w·M(N(H))            hyper-connections
        blocks      o' = o + B(N(o))                                       B is one of A, M
        sources     h = r(o) + A(N(S, o));  o' = h + M(N(S', h))           block attention residuals

    In streams, O is several streams. N is a mix of them and a norm; w, a number for each
    stream, spreads the branch's output over them; r is O, or a mix of its streams. Mixes
    and numbers are computed for each token by a module before each branch.

    r is the part of the stream that a residual connection keeps: all of it (sum), a
    factor times it (factor), sqrt((i-1)/i) times it for the i-th sum of the model
    (depth), a learned factor per channel (gate), or learned factors and biases per
    channel, those of the branch's output too (scale). A rewired layer computes the same
    with two changes. Attention's branch reads o without the routed output of the
    previous layer: r(h) plus the shared output. The MLP's branch reads h without A:
    r(o), in post_norm N(r(x)); in parallel it reads that anyway. In streams, N and w of a
    branch are computed from what the branch reads, r from all of the streams that it
    keeps: in flight are one vector and w. In blocks, a layer reads another stream than o
    only if it and the layer before it are both rewired: o without the routed output of
    that layer, or, if B is an MoE block behind another branch, o without all of that
    branch. In sources, S are the streams with which earlier blocks of layers ended, and
    N mixes them with the stream and norms the mix. Where a block begins, r(o) is 0, and
    S' and the S of later layers have o as well; elsewhere S' is S. Attention's branch
    reads S and h of the previous layer, the MLP's S and o.
    """

    model_type: str
    """Key in Hugging Face's Auto mappings."""
    config: str
    """Class of the configuration, NAMEConfig; the other classes that a row leaves out
    begin with NAME, or with `classes_of`.
    """
    moe_block: str = ""
    """Class of the MoE block, or its base; a layer whose `moe` is no such block is dense.
    By default NAMESparseMoeBlock."""
    mlp_block: str | None = None
    """Class of a dense MLP, if `moe` may also be attention or another mixer (layout
    blocks)."""
    classes_of: str = ""
    """Beginning of the names of the classes, which are in `upstream`, if transformers
    gives a configuration of its own the models of another family."""
    upstream: str = ""
    """File in the transformers package from which the other names come; by default
    models/TYPE/modeling_TYPE.py, where TYPE is the model type (or `like`) without
    "_text"."""
    causal_lm: str = ""
    """Class of the model with its LM head; by default NAMEForCausalLM, with NAME without
    "Text"."""
    base_model: str = ""
    """Class of the model without head; by default NAMEModel."""
    decoder_layer: str | tuple[str, ...] = ""
    """Class of a decoder layer, MoE or dense, or several if each kind of layer in a
    hybrid has its own; by default NAMEDecoderLayer."""
    layout: Literal[
        "pre_norm", "post_norm", "parallel", "streams", "blocks", "sources"
    ] = "pre_norm"
    """Where the branches read the stream; the equations are above."""
    connections: tuple[str, str] | tuple[()] = ()
    """Attributes of the layer: hyper-connections before attention and before the MLP, if
    `layout` is streams; if it is sources, the mixes, of which the first layer has no
    first."""
    connection_returns: tuple[Literal["read", "write", "mix", "streams"], ...] = ()
    """The values that a hyper-connection returns, in their order: the vector that the
    branch reads; the numbers that spread its output over the streams; the matrix whose
    transpose mixes the streams that are kept; these streams themselves."""
    block_begins: str | None = None
    """Attribute of the layer: whether a block of layers begins with it, if `layout` is
    sources."""
    stream_branch: str | None = None
    """Attribute of the layer: branch without communication that reads all streams before
    attention, and is added to them; may be None in a given layer."""
    in_norm: str | None = "input_layernorm"
    """Attribute of the layer: norm before attention."""
    mlp_norm: str | tuple[str, ...] | None = "post_attention_layernorm"
    """Attribute of the layer: norm before the MoE block; several attributes if several
    modules read the stream after attention, and the first of them reads all of it."""
    norms: str | None = None
    """Attribute of the layer: module that holds both norms (and attention), if the layer
    itself does not.
    """
    attention: str = "self_attn"
    """Attribute of the layer: attention; read only if `layout` is not pre_norm."""
    moe: str = "mlp"
    """Attribute of the layer: MoE block, or the dense MLP of a dense layer."""
    moe_argument: str | None = None
    """Argument of the layer that is passed on to its MoE block, if the layer checks the
    block's class. A stand-in of another class is called like a dense MLP and has to
    return a tensor."""
    block_argument: str | None = None
    """Argument of the layer that it passes on to its MoE block by name."""
    block_shared: str | None = None
    """Attribute of the MoE block: its shared expert, if it has one."""
    block_gate: str | None = None
    """Attribute of the MoE block: linear whose sigmoid multiplies the shared expert's output."""
    shared_in_place: bool = False
    """The MoE block adds the routed output into the shared expert's output in place."""
    layer_shared: str | None = None
    """Attribute of the layer: shared expert beside the MoE block; may be None in a given model."""
    shared_average: str | None = None
    """Attribute of the MoE block: "average" if its output is (shared + routed) / 2."""
    additive: bool = True
    """The stream gets shared + routed. False: a norm or a convolution follows the sum, so
    that no part of it can be separated, and all of it counts as routed."""
    residual_multiplier: str | None = None
    """Attribute of the layer: factor on both residual branches."""
    residual: Literal["sum", "factor", "depth", "gate", "scale"] = "sum"
    """The part of the stream that residual connections keep: r above."""
    residual_names: tuple[str | None, str | None] = (None, None)
    """Attributes of the layer, at attention and at the MLP: the factor, the index of a
    depth-scaled sum, the gate module (stream, branch), or the scale module (branch,
    stream). None keeps all of the stream."""
    side_output: str | None = None
    """Argument as which the model's loop passes a second value that a layer returns to
    the next layer: by name, or in the first place after the stream.
    """
    stream_edit: str | None = None
    """Method of the model that edits the stream between layers; it is applied to what
    is in flight as well.
    """
    requires: tuple[tuple[str, Any, str], ...] = ()
    """(config field, the one value that is supported, why no other is)."""
    moe_layers: str = "all"
    """Which layers are MoE: a key of `MOE_LAYERS`."""
    packing: Literal["position_ids", "given_masks", "leaks"] = "position_ids"
    """How the examples of a packed row are kept apart: by masks that the family makes
    from the position ids; by masks that it is given, because its own ignore the position
    ids; or not at all (leaks): a state or a convolution runs through the row, or the
    forward makes its own positions. Such a model trains on padded rows."""
    padding: Literal["masked", "counts"] = "masked"
    """Whether padding on the left of a prompt leaves the answer as it is, or counts as
    a part of it, whatever the mask says. Prompts of such a model are batched by length.
    """
    folding: Folding = Folding()
    """The weights that read the input of a branch and those that write its output, if
    their names are not the usual ones.
    """
    like: str | None = None
    """Model type from whose transformers classes the family's own are derived, if
    transformers has none: they are in `fcsd/model/connectivity/classes`. Weights are
    converted and tokenizers found as for that type. `upstream` follows from it.
    `decoder_layer` and `moe_block` name that type's classes; a block or layer of the
    file's own may have any name if it is a subclass of the one that the row names, and
    keeps the attributes that the row names."""
    reference: Literal["written", "generic"] = "written"
    """The reference of the contract tests: forward passes written by hand down to the
    routing, or the layer equations on the family's own modules."""
    auto_model: str = ""
    """Auto class of `causal_lm`: AutoModelForCausalLM; AutoModelForImageTextToText for
    a wrapper of a text stack and towers, and for Mistral 4's text model, which
    transformers lists there."""

    fuses_rows: str | None = None
    """Tensor that transformers (5.23) concatenates from several tensors of the
    checkpoint. If it shards while loading, each rank takes its rows of each of them:
    the rows of the concatenation are mixed up, and the model is silently wrong. Or
    (5.24) a tensor of the checkpoint that it splits into several, which fails on a
    rank's rows."""
    overwritten: str | None = None
    """End of the names of buffers of which transformers (5.23, 5.24) overwrites a part after
    it has loaded them in the original's class; `load_model` reads them again."""
    spread_refused: str | None = None
    """Why a rank cannot hold only some of the experts: a clause that follows
    "--expert-parallel: "; None: it can.
    """
    scaled_experts: str | None = None
    """Pattern of the modules that hold the experts, if these take rows that are scaled
    already (so that transformers has no plan for them): one dense matmul over all
    experts, where only the rows of a token's own experts are not zero."""
    overlap_refused: str | None = None
    """Why the exchanges of its experts cannot run beside computation, as a clause; None: they can."""
    since: str = "5.23"
    """Lowest transformers with which a FarSkip checkpoint has been loaded and followed
    the original's equations; older ones may lack the family or compute something else.
    With an older one installed, the family is in `UNAVAILABLE` instead of `FAMILIES`."""

    def __post_init__(self) -> None:
        name = self.classes_of or self.config.removesuffix("Config")
        causal_lm = self.causal_lm or f"{name.removesuffix('Text')}ForCausalLM"
        text = causal_lm.endswith("ForCausalLM")
        kind = (self.like or self.model_type).removesuffix("_text")
        usual = {
            "upstream": f"models/{kind}/modeling_{kind}.py",
            "causal_lm": causal_lm,
            "base_model": f"{name}Model",
            "decoder_layer": f"{name}DecoderLayer",
            "moe_block": f"{name}SparseMoeBlock",
            "auto_model": (
                "AutoModelForCausalLM" if text else "AutoModelForImageTextToText"
            ),
        }
        # The class is frozen; `__setattr__` of a dataclass would refuse.
        for field, value in usual.items():
            object.__setattr__(self, field, getattr(self, field) or value)

    @cached_property
    def multimodal(self) -> bool:
        """Whether it is a wrapper: its text stack is rewired, whose fields are in the
        text config.
        """
        return not self.causal_lm.endswith("ForCausalLM")


def wrapper(
    text: Family,
    model_type: str,
    name: str,
    *,
    causal_lm: str = "",
    base_model: str = "",
) -> Family:
    """Return the row of the wrapper around a text stack. Its classes begin with `name`,
    except those that are given.
    """
    return replace(
        text,
        model_type=model_type,
        config=f"{name}Config",
        causal_lm=causal_lm or f"{name}ForConditionalGeneration",
        base_model=base_model,
        auto_model="",
        # Facts about the text stack do not hold for the wrapper: these three begin at
        # their defaults.
        reference="written",
        since=Family.since,
    )


def _from_layer(field: str) -> Callable[[Any], list[bool]]:
    return lambda config: [
        k >= getattr(config, field) for k in range(config.num_hidden_layers)
    ]


def _sparse_step(config: Any) -> list[bool]:
    dense = set(config.mlp_only_layers or ())
    step = config.decoder_sparse_step
    has_experts = config.num_experts > 0
    return [
        has_experts and k not in dense and (k + 1) % step == 0
        for k in range(config.num_hidden_layers)
    ]


def _mlp_layer_types(config: Any) -> list[bool]:
    if config.mlp_layer_types is None:  # upstream has no default for DeepSeek-OCR-2
        raise UserError(
            f"model type '{config.model_type}': mlp_layer_types is missing; a list says"
            " which layers are 'dense' and which 'sparse'"
        )
    return [
        kind == "sparse" for kind in config.mlp_layer_types[: config.num_hidden_layers]
    ]


def _moe_layer_interval(config: Any) -> list[bool]:
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    interval = config.moe_layer_interval
    return [
        first <= k <= last and (k + 1) % interval == 0
        for k in range(config.num_hidden_layers)
    ]


MOE_LAYERS: dict[str, tuple[tuple[str, ...], Callable[[Any], list[bool]]]] = {
    "all": (("num_hidden_layers",), lambda config: [True] * config.num_hidden_layers),
    "first_k_dense_replace": (
        ("first_k_dense_replace",),
        _from_layer("first_k_dense_replace"),
    ),
    "decoder_sparse_step": (
        ("num_experts", "decoder_sparse_step", "mlp_only_layers"),
        _sparse_step,
    ),
    "moe_layers": (
        ("moe_layers", "interleave_moe_layer_step"),
        lambda config: [
            k in set(config.moe_layers) for k in range(config.num_hidden_layers)
        ],
    ),
    "mlp_layer_types": (("mlp_layer_types",), _mlp_layer_types),
    "moe_layer_interval": (
        ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
        _moe_layer_interval,
    ),
    "expert_layer_period": (
        ("expert_layer_period", "expert_layer_offset"),
        lambda config: [count > 1 for count in config.layers_num_experts],
    ),
    "num_dense_layers": (("num_dense_layers",), _from_layer("num_dense_layers")),
    "num_local_experts": (
        ("num_local_experts",),
        lambda config: [config.num_local_experts > 0] * config.num_hidden_layers,
    ),
    "layers_block_type": (
        ("layers_block_type",),
        lambda config: [kind == "moe" for kind in config.layers_block_type],
    ),
    "enable_moe_block": (
        ("enable_moe_block",),
        lambda config: [bool(config.enable_moe_block)] * config.num_hidden_layers,
    ),
}
"""Rule name -> (config fields that decide, upstream's own condition as a function of the
config that returns the mask of MoE layers).
"""


def moe_mask(config: Any, family: Family) -> list[bool]:
    """Return which decoder layers are MoE layers.

    config: a config object, with upstream's defaults filled in.

    Raises:
        UserError: its fields say nothing that a model can have (an interval of 0).
    """
    fields, layers_of = MOE_LAYERS[family.moe_layers]
    decoder_config = text_config(config, family)
    try:
        return layers_of(decoder_config)
    except (ArithmeticError, TypeError, ValueError) as error:
        values = ", ".join(
            f"{name}: {getattr(decoder_config, name, None)!r:.80}" for name in fields
        )
        raise UserError(
            f"model type '{config.model_type}': {values} do not say which layers are"
            f" MoE layers ({one_line(error)}); fetch the config again"
        ) from None


def text_config(config: Any, family: Family) -> Any:
    """Return the config object that describes the decoder layers: `config` itself, or a
    wrapper's text config.
    """
    return config.get_text_config() if family.multimodal else config
