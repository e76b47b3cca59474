"""Commands on a checkpoint: inspect it, or change its connectivity, weights or keys."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.cli.options import (
    Command,
    check_model,
    connectivity_arguments,
    device_map_argument,
    field_options,
    json_argument,
    model_argument,
    out_argument,
    print_result,
    quiet_transformers,
    task_arguments,
)


def _inspect(arguments: Namespace) -> None:
    from fcsd.model.inspect import inspect_model, report_table

    print_result(
        arguments, inspect_model(arguments.model, arguments.revision), report_table
    )


def _convert(arguments: Namespace) -> None:
    check_model(arguments, config_only=arguments.config_only)
    from fcsd.api.models import convert_checkpoint

    print(
        convert_checkpoint(
            arguments.model,
            arguments.out,
            layers=arguments.layers,
            attention=arguments.attention,
            mlp=arguments.mlp,
            revision=arguments.revision,
            config_only=arguments.config_only,
            format=arguments.format,
        )
    )
    if arguments.format is None and not arguments.config_only:
        _warn_uncalibrated(arguments.out)


def _warn_uncalibrated(out: str) -> None:
    """Say that a converted checkpoint needs calibration, where attention reads a stream
    without the whole output of the MoE block before it.
    """
    from fcsd.model.connectivity.checkpoint import read_config
    from fcsd.model.connectivity.load import load_config
    from fcsd.model.connectivity.spec import changed_by
    from fcsd.model.families import moe_mask

    checkpoint = read_config(Path(out))
    family, connectivity = checkpoint.family, checkpoint.connectivity
    # Weights that were calibrated or trained are no copies, and cannot be calibrated.
    if family is None or connectivity is None or changed_by(checkpoint.config):
        return
    has_shared = family.block_shared or family.layer_shared
    mask = moe_mask(load_config(checkpoint), family)
    if not has_shared and connectivity.attention_layers(mask):
        print(
            f"fcsd convert: {family.model_type} has no shared expert: with copied weights,"
            " a model whose attention does not wait for the experts may write rubbish;"
            " calibrate before use (`fcsd calibrate MODEL OUT --text FILE` instead)",
            file=sys.stderr,
        )


def _calibrate(arguments: Namespace) -> None:
    from fcsd.evaluation.config import EvaluationConfig
    from fcsd.evaluation.suites import named_tasks

    options, suite = vars(arguments), arguments.decontaminate
    if suite is None and not arguments.task and arguments.data_root is not None:
        raise UserError("--data-root has no meaning without --decontaminate or --task")
    default = EvaluationConfig.model_fields["suite"].default
    if not arguments.task and arguments.suite != default:
        raise UserError("--suite has no meaning without --task")
    check_model(arguments)
    from fcsd.data.config import RowsConfig, source_option
    from fcsd.model.config import ModelConfig
    from fcsd.recipe.recipe import Recipe
    from fcsd.training.config import CalibrationConfig

    source = source_option(arguments.text, "--text")
    recipe = Recipe.from_plain(
        {
            "name": "calibrate",
            "output_dir": f"{arguments.out}.partial",
            "model": ModelConfig.from_options(options, path=arguments.model),
            "connectivity": {
                key: options[key] for key in ("layers", "attention", "mlp")
            },
            "calibration": CalibrationConfig.from_options(options),
            "data": {
                "train": [source],
                "max_length": RowsConfig.from_options(options).max_length,
                "loss_on": "all",
                "decontaminate": {"suite": suite} if suite else None,
            },
            "evaluation": {"data_root": arguments.data_root},
        },
        "the calibration",
    )
    # A mistake shows before the calibration.
    measured = named_tasks(arguments.suite, arguments.task) if arguments.task else None
    quiet_transformers()
    from fcsd.parallel.launch import join_launch
    from fcsd.pipeline.calibrate import calibrate_folder, measure_calibrated
    from fcsd.report.table import score_table

    launch = join_launch()
    calibrate_folder(recipe, arguments.out, launch)
    if measured is not None:
        result = measure_calibrated(recipe, arguments.out, measured, launch)
        if launch.first:
            print(score_table(result), file=sys.stderr)
    if launch.first:
        print(arguments.out)


def _mtp(arguments: Namespace) -> None:
    check_model(arguments)
    from fcsd.data.config import RowsConfig, SourceConfig, source_option
    from fcsd.model.config import ModelConfig
    from fcsd.training.config import MtpConfig

    options = vars(arguments)
    source = source_option(arguments.text, "--text")
    original = ModelConfig(path=arguments.original) if arguments.original else None
    quiet_transformers()
    from fcsd.parallel.launch import join_launch
    from fcsd.pipeline.mtp import align_mtp

    align_mtp(
        ModelConfig.from_options(options, path=arguments.model),
        arguments.out,
        SourceConfig.from_plain(source, "--text"),
        RowsConfig.from_options(options),
        MtpConfig.from_options(options),
        join_launch(),
        original=original,
        device_map=arguments.device_map,
    )
    print(arguments.out)


def _dequantize(arguments: Namespace) -> None:
    check_model(arguments)
    from fcsd.model.quantised.dequantise import dequantize_checkpoint

    dequantize_checkpoint(arguments.model, arguments.out, revision=arguments.revision)
    print(arguments.out)


def _quantize(arguments: Namespace) -> None:
    check_model(arguments)
    from fcsd.model.quantised.quantise import quantize_checkpoint

    quantize_checkpoint(arguments.model, arguments.out, revision=arguments.revision)
    print(arguments.out)


def _unconvert(arguments: Namespace) -> None:
    check_model(arguments)
    from fcsd.model.connectivity.export import unconvert_checkpoint

    unconvert_checkpoint(arguments.model, arguments.out, revision=arguments.revision)
    print(arguments.out)


def _families(arguments: Namespace) -> None:
    from fcsd.model.families.table import families_facts, families_table

    print_result(arguments, families_facts(), families_table)


def _inspect_options(parser: ArgumentParser) -> None:
    model_argument(parser, config_only=True)
    json_argument(parser)


def _convert_options(parser: ArgumentParser) -> None:
    model_argument(parser)
    out_argument(parser, "new folder; written under another name, then renamed")
    connectivity_arguments(parser)
    parser.add_argument(
        "--config-only",
        action="store_true",
        help=(
            "write config, code and tokenizer but no weights: MODEL then needs no"
            " weights, and fcsd fetches none. Use it to time servers with dummy weights"
            " (`fcsd-bench serve OUT --against MODEL`)"
        ),
    )
    parser.add_argument(
        "--format",
        choices=("amd",),
        help=(
            "amd: write MODEL's connectivity with AMD's keys, for AMD's code for"
            " transformers 4.57 and AMD's SGLang (Instella-MoE, DeepSeek-V3 and -V2);"
            " transformers alone loads the result as a regular model"
        ),
    )


def _calibrate_options(parser: ArgumentParser) -> None:
    model_argument(parser)
    out_argument(parser, "new folder; OUT.partial holds unfinished work")
    connectivity_arguments(parser, "all")
    _text_argument(parser)
    from fcsd.data.config import DataConfig
    from fcsd.training.config import CalibrationConfig

    field_options(parser, CalibrationConfig, "tokens", "ridge")
    field_options(parser, DataConfig, "max_length")
    parser.add_argument(
        "--decontaminate",
        metavar="SUITE",
        help=(
            "leave out text that shares an n-gram of 13 words with an item of this"
            " suite"
        ),
    )
    task_arguments(parser, "then measure the calibrated model on this task")


def _text_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        required=True,
        help=(
            ".jsonl file, data set folder or hub id, or one source as in a recipe's"
            " data.train, in YAML: '{path: X, columns: {text: body}, split: train}'"
        ),
    )


def _mtp_options(parser: ArgumentParser) -> None:
    model_argument(parser)
    out_argument(parser, "new folder; written under another name, then renamed")
    _text_argument(parser)
    parser.add_argument(
        "--original",
        metavar="MODEL",
        help="measure the drafts of the model that MODEL was converted from, too",
    )
    from fcsd.data.config import RowsConfig
    from fcsd.training.config import MtpConfig

    field_options(parser, MtpConfig, "tokens", "learning_rate", "batch_size")
    field_options(parser, RowsConfig, "max_length", "loss_on")
    device_map_argument(parser)


def _copy_options(parser: ArgumentParser) -> None:
    model_argument(parser, remote_code=False)
    out_argument(parser, "new folder; OUT.partial holds unfinished work")


def _unconvert_options(parser: ArgumentParser) -> None:
    model_argument(parser)
    out_argument(parser)


COMMANDS = {
    "inspect": Command(
        "Show a checkpoint's family, the layers that conversion would rewire, and the"
        " memory that it needs. It loads no weights.",
        _inspect_options,
        _inspect,
        "It fetches only config.json from the Hub.",
    ),
    "convert": Command(
        "Rewire a checkpoint: same weights, same tensor names, FarSkip connectivity.",
        _convert_options,
        _convert,
        "The result loads with AutoModelForCausalLM.from_pretrained(OUT,"
        " trust_remote_code=True), without fcsd.",
    ),
    "calibrate": Command(
        "Rewire a checkpoint, and bring its outputs closer to the original's by folding"
        " closed-form maps into its weights, without gradients or new parameters.",
        _calibrate_options,
        _calibrate,
        "It holds one layer's weights in memory at a time. The same command continues"
        " an interrupted calibration. To share the text among several GPUs: accelerate"
        " launch -m fcsd calibrate …",
    ),
    "mtp": Command(
        "Train the layers for multi-token prediction (MTP) of a converted checkpoint on"
        " its own hidden states, so that an engine that drafts with them accepts more.",
        _mtp_options,
        _mtp,
        "Nothing else in the checkpoint changes. An eighth of the text is left out, to"
        " measure how many drafts are accepted, before and after. For DeepSeek-V3 and"
        " V3.2, GLM-4 to 5, Qwen3-Next and Qwen3.5 (docs/convert.md); one process.",
    ),
    "dequantize": Command(
        "Write a quantised checkpoint in bfloat16, so that it can be converted,"
        " calibrated and trained.",
        _copy_options,
        _dequantize,
        "It reads FP8 (block, row, tensor), INT8, packed integers, MXFP4 and NVFP4,"
        " from the methods fp8, mxfp4, compressed-tensors and modelopt. It holds a few"
        " rows of a weight in memory at a time. The same command continues an"
        " interrupted copy.",
    ),
    "quantize": Command(
        "Write a checkpoint, converted or not, in FP8 for vLLM, SGLang and"
        " transformers, with a scale per block of 128 x 128.",
        _copy_options,
        _quantize,
        "transformers quantises experts and linear layers; embeddings, head, norms,"
        " routers and gates keep their dtype. It holds a few rows of a weight in memory"
        " at a time. The same command continues an interrupted copy.",
    ),
    "unconvert": Command(
        "Undo a conversion: write a checkpoint of the original family with the same"
        " weights.",
        _unconvert_options,
        _unconvert,
    ),
    "families": Command(
        "List the model families that fcsd converts, and those that it refuses.",
        json_argument,
        _families,
    ),
}
