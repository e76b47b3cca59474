"""The `fcsd` command, with one thin function for each stage.

The modules of this folder import slow libraries, and modules that load them, inside
functions and after the checks of the options, so that help and mistakes appear
immediately.
"""

from collections.abc import Sequence

from fcsd.cli import (
    checkpoints,
    evaluation,
    planning,
    publishing,
    recipes,
)
from fcsd.cli.options import Command
from fcsd.cli.program import Parser, Program

COMMANDS: dict[str, Command] = {
    **checkpoints.COMMANDS,
    **recipes.COMMANDS,
    **planning.COMMANDS,
    **evaluation.COMMANDS,
    **publishing.COMMANDS,
}

# They will be removed in the next release.
MOVED_COMMANDS: dict[str, str] = {
    "recipe": "fcsd run RECIPE --show",
    "tokenize": "fcsd run RECIPE --only tokenize",
    "cache-teacher": "fcsd run RECIPE --only cache-teacher",
    "report": "fcsd run RECIPE --only report",
    "score": "fcsd evaluate --samples FILE",
    "export": "fcsd convert MODEL OUT --format amd",
    "routing": "fcsd-steer routing",
    "bias": "fcsd-steer bias",
    "profile-network": "fcsd-steer profile-network",
    "bench": "fcsd-bench serve",
}

FCSD = Program(
    name="fcsd",
    description=(
        "Convert a Hugging Face MoE checkpoint to FarSkip connectivity, distil it from"
        " the original, compare the two, and prepare the result for publication."
    ),
    epilog=(
        "First steps: `fcsd tiny-data runs/tiny-data && fcsd run tiny/demo` trains,"
        " converts and evaluates a small MoE on a CPU. `fcsd COMMAND --help`"
        " explains each command."
    ),
    commands=COMMANDS,
    moved=MOVED_COMMANDS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    A user's mistake is one line on stderr and status 2; Ctrl-C gives 130, SIGTERM 143.
    """
    return FCSD.run(argv)


def build_parser(command_name: str | None = None) -> Parser:
    """Build the parser of all commands; command_name: add only the options of this
    command.
    """
    return FCSD.parser(command_name)
