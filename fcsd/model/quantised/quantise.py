"""Write a checkpoint in FP8 with a scale for each block of 128 x 128, as DeepSeek and
Qwen publish theirs: vLLM, SGLang and transformers know it as `quant_method: fp8`.

Values and scales of a weight w are those of transformers' `Fp8Quantize`, in float32:

    scale = max |w| of its block / 448;   value = w / scale, rounded to E4M3

Activations are not in the files: engines quantise them as they come (`dynamic`).

Not covered: experts in one tensor for all (gpt-oss, Llama 4), for which engines read no
such scales; other formats; a run in an engine, which needs a GPU.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.base.files import read_checkpoint_json
from fcsd.base.weights import Stored
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    Checkpoint,
    find_folder,
    read_checkpoint,
)
from fcsd.model.connectivity.load import (
    check_tensors,
    config_and_class,
    shapes_in_files,
)
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.quantised.copy import (
    CHUNK_VALUES,
    Copy,
    Rows,
    Source,
    check_destination,
    check_rows,
    write_copy,
    write_rows,
)
from fcsd.model.quantised.methods import FIELD, without_quantisation

SIDE = 128  # of a block
_SCALE = "_scale_inv"


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    revision: str | None = None,
) -> None:
    """Write a checkpoint whose experts and linear layers are in FP8.

    Embeddings, head, norms, routers, gates, and layers of other sizes keep their dtype
    and bytes; the config names their modules.

    Raises:
        UserError: as in `quantised_names` and `write_copy`; it is already quantised; a
            value is NaN or infinite; `destination` exists and is not an empty folder.
    """
    destination = Path(destination)
    check_destination(destination)
    checkpoint = read_checkpoint(find_folder(source, revision))
    if checkpoint.quantisation is not None:
        raise UserError(
            f"{checkpoint.folder}: is quantised already, by"
            f" {checkpoint.quantisation.words}; `fcsd dequantize` writes it in bfloat16"
        )
    names = quantised_names(checkpoint)
    files, quantise = Source(checkpoint), _operation()
    tensors: dict[str, Stored] = {}
    for name, shape in checkpoint.shapes.items():
        # Bytes are copied for all that is not quantised.
        tensors[name] = files.stored(name)
        if name in names:
            blocks = shape[0] // SIDE, shape[1] // SIDE
            tensors[name] = Stored("F8_E4M3", shape, shape[0] * shape[1])
            tensors[name + _SCALE] = Stored("F32", blocks, 4 * blocks[0] * blocks[1])

    def write(name: str, target: BinaryIO) -> None:
        weight = name.removesuffix(_SCALE)
        if weight not in names:
            files.copy(name, target)
            return
        for values, scales in _quantised(files.rows(weight), weight, quantise):
            write_rows(values if name == weight else scales, target)

    config = without_quantisation(read_checkpoint_json(checkpoint.folder / CONFIG))
    config[FIELD] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
        # Engines quantise every linear layer that is not named here. A tensor of one
        # dimension belongs to none.
        "modules_to_not_convert": sorted(
            name.removesuffix(".weight")
            for name, shape in checkpoint.shapes.items()
            if name not in names and len(shape) > 1
        ),
    }
    copy = Copy("quantize", config, tensors, write)
    write_copy(source, checkpoint, destination, copy)


def quantised_names(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the weights that are quantised: of experts, and of linear
    layers in decoder layers.

    Sizes must be multiples of `SIDE`: for a last block with fewer rows, as in
    DeepSeek's files, transformers (5.23) computes other values without a GPU. Layers of
    a module with inputs of the same width are quantised together or not at all: engines
    make one matrix of some (q, k, v; gate, up).

    Raises:
        UserError: tensors that do not fit the config; experts that are not one tensor
            each, or whose sizes are not multiples of `SIDE`.
    """
    config, cls = config_and_class(checkpoint)
    check_tensors(checkpoint, config, cls)
    with torch.device("meta"):
        model = cls(config)
    linear, experts = _shapes_in_files(model, checkpoint.family)
    for name, shape in experts.items():
        if len(shape) != 2 or name not in checkpoint.shapes:
            raise UserError(
                f"{checkpoint.folder}: tensor '{name}': the experts of a layer share"
                " one tensor, and engines do not read block-scaled FP8 for it; serve it"
                " in bfloat16"
            )
        if not _fits(shape):
            raise UserError(
                f"{checkpoint.folder}: tensor '{name}' has shape {list(shape)}; engines"
                f" accept experts in block-scaled FP8 only in multiples of {SIDE};"
                " serve it in bfloat16"
            )
    if not experts:
        raise UserError(
            f"{checkpoint.folder}: no experts that transformers would quantise; serve"
            " it in bfloat16"
        )
    # Keyed by the module that holds them and the width of their inputs: q_proj, k_proj
    # and v_proj, but not o_proj.
    together = defaultdict(list)
    for name, shape in linear.items():
        together[name.rsplit(".", 2)[0], shape[1]].append(name)
    quantised = {*experts}
    for names in together.values():
        if all(name in checkpoint.shapes and _fits(linear[name]) for name in names):
            quantised.update(names)
    return quantised


def _fits(shape: tuple[int, ...]) -> bool:
    """Tell whether a weight is made up of whole blocks."""
    return shape[0] % SIDE == 0 and shape[1] % SIDE == 0


def _shapes_in_files(
    model: Any, family: Any
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return name -> shape in files of the weights of linear layers, and of experts, as
    transformers' own quantisation finds them.
    """
    inside = {id(module) for module in decoder_layers(model, family).modules()}
    linear: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if id(module) not in inside:
            continue
        # Exactly this class, as in transformers' own replacement (5.23).
        if type(module) is nn.Linear:
            linear[f"{name}.weight"] = module.weight
        elif name.endswith(".experts"):
            experts |= {
                f"{name}.{part}": tensor
                for part, tensor in module.named_parameters(recurse=False)
            }

    return shapes_in_files(model, linear), shapes_in_files(model, experts)


def _operation() -> Any:
    """Return the function with which transformers quantises a weight."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = FineGrainedFP8Config(weight_block_size=(SIDE, SIDE))
    return AutoHfQuantizer.from_config(settings, pre_quantized=False).get_quantize_ops()


def _quantised(
    weight: Rows, name: str, operation: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield values and scales of a weight, some rows of blocks at a time."""
    num_rows, width = weight.get_shape()
    # Whole blocks, each of which shares a scale.
    step = SIDE * max(1, CHUNK_VALUES // (SIDE * width))
    for begin in range(0, num_rows, step):
        rows = weight[begin : begin + step]
        # The scale is the largest value of a block: one infinity would spoil them all.
        check_rows(rows, weight.file, name)
        quantised: Mapping[str, Tensor] = operation.convert({"weight": rows})
        yield quantised["weight"], quantised["weight_scale_inv"]
