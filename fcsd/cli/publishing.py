"""Commands that talk to a model or to the Hub: chat, push."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.cli.options import (
    Command,
    check_model,
    field_options,
    model_argument,
    quiet_transformers,
)


def _chat(arguments: Namespace) -> None:
    if arguments.max_new_tokens is not None and arguments.max_new_tokens < 1:
        raise UserError(
            f"--max-new-tokens: must be at least 1, got {arguments.max_new_tokens}"
        )
    check_model(arguments)
    from transformers.utils import logging

    from fcsd.evaluation.chat.chat import chat, load_speaker

    quiet_transformers()
    # transformers' advice on generation settings would appear between the replies.
    logging.set_verbosity_error()
    options = {
        "trust_remote_code": arguments.trust_remote_code,
        "device_map": arguments.device_map,
        "thinking": not arguments.no_thinking,
    }
    speakers = [load_speaker(arguments.model, revision=arguments.revision, **options)]
    if arguments.beside is not None:
        speakers.append(load_speaker(arguments.beside, **options))
    # Text that is not UTF-8 must not end the conversation.
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    failures = chat(
        speakers,
        system=arguments.system,
        max_new_tokens=arguments.max_new_tokens,
        greedy=arguments.greedy,
    )
    # On a terminal the user has seen them; a script sees the status.
    if failures and not sys.stdin.isatty():
        number = f"{len(failures)} replies are" if failures[1:] else "a reply is"
        raise UserError(f"{number} missing: {failures[0]}")


def _push(arguments: Namespace) -> None:
    from fcsd.recipe.recipe import PublicationConfig
    from fcsd.report.publish.push import NewCard, push

    out = arguments.dry_run
    # --dry-run without a folder: beside the source, which does not change.
    if out == Path():
        folder = arguments.folder.resolve()
        out = folder.with_name(f"{folder.name}-hub")
    chosen = PublicationConfig.from_options(
        {name: getattr(arguments, name) for name in ("base_model", "license")}
    )
    card = NewCard(
        chosen.base_model,
        chosen.license,
        tuple(arguments.results) if arguments.results else None,
    )
    print(
        push(
            arguments.folder,
            arguments.repo_id,
            private=arguments.private,
            dry_run=out,
            card=card,
        )
    )


def _chat_options(parser: ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument(
        "--beside",
        metavar="ORIGINAL",
        help="hub id or folder of a second model that answers side by side",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help="longest reply (default: the model's own setting, or 2048)",
    )
    parser.add_argument(
        "--greedy",
        action="store_true",
        help=(
            "always take the likeliest token, so that sampling does not make two models"
            " differ"
        ),
    )
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help="ask a hybrid model not to think",
    )
    parser.add_argument(
        "--device-map",
        metavar="MAP",
        help='transformers\' device_map, for example "auto" for several GPUs',
    )


def _push_options(parser: ArgumentParser) -> None:
    from fcsd.recipe.recipe import PublicationConfig

    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        help="a run, its publish folder, or a converted checkpoint",
    )
    parser.add_argument(
        "repo_id",
        metavar="OWNER/NAME",
        help="model repository; created if it does not exist",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="make the repository private when it is created",
    )
    parser.add_argument(
        "--dry-run",
        metavar="OUT",
        type=Path,
        nargs="?",
        const=Path(),
        help=("only write the folder that would be uploaded (default: DIR-hub)"),
    )
    field_options(parser, PublicationConfig, "base_model", "license")
    parser.add_argument(
        "--results",
        nargs=2,
        type=Path,
        metavar=("ORIGINAL", "MODEL"),
        help=(
            "for a checkpoint without README.md: results of `fcsd evaluate` for the"
            " original and for this checkpoint"
        ),
    )


COMMANDS = {
    "chat": Command(
        "Talk to a model, or to a converted one and its original side by side (paper"
        " App. B).",
        _chat_options,
        _chat,
        "Replies stream with the model's own generation settings. Without a terminal,"
        " every line of stdin is a turn. MODEL runs on the accelerator if there is"
        " one.",
    ),
    "push": Command(
        "Upload a FarSkip checkpoint with its card and results to the Hub.",
        _push_options,
        _push,
        "After an interruption, the same command continues the upload. It uses the"
        " access token of `hf auth login`, or HF_TOKEN.",
    ),
}
