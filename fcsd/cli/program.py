"""A program with several commands: its parser, its error messages, and its exit status."""

import contextlib
import errno
import io
import os
import sys
import traceback
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fcsd import __version__
from fcsd.base.errors import (
    CREDENTIALS,
    Interrupted,
    ScorerError,
    UserError,
    holds_credentials,
    is_out_of_memory,
    without_credentials,
)
from fcsd.base.writing import is_address, release_folders, sweep_scratch
from fcsd.cli.options import Command, Help
from fcsd.parallel import failure as rank_failure

# Variables of addresses and paths, which fcsd or a library prints in messages.
_ADDRESSES = (
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "TMPDIR",
    "XDG_",
)


class Parser(ArgumentParser):
    """The parser of a program or a command; commands: their parsers by name."""

    commands: Mapping[str, ArgumentParser] = {}

    def _check_value(self, action: Action, value: Any) -> None:
        # argparse lists all choices, in which a slip of the pen has to be looked for.
        if action.choices is not None and value not in action.choices:
            from fcsd.base.strict import did_you_mean

            near = did_you_mean(str(value), [*map(str, action.choices)])
            if "did you mean" in near:
                raise ArgumentError(action, f"invalid choice: {value!r}{near}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        super().error(without_credentials(message))


@dataclass(frozen=True)
class Program:
    """A program and its commands.

    moved: commands that were renamed since the last release -> what to type instead.
    """

    name: str
    description: str
    epilog: str
    commands: Mapping[str, Command]
    moved: Mapping[str, str] = field(default_factory=dict)

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Run one command and return its exit status.

        A user's mistake is one line on stderr and status 2; Ctrl-C gives 130, SIGTERM 143.
        """
        words = sys.argv[1:] if argv is None else list(argv)
        # The first word that is not an option names the command; only its options are
        # built.
        command = next((word for word in words if not word.startswith("-")), "")
        parser = self.parser(command)
        if words[:1] == [command] and command in self.moved:
            parser.error(f"'{command}' is now `{self.moved[command]}`")
        if words[:1] == [command] and command not in parser.commands:
            from fcsd.base.strict import did_you_mean

            parser.error(
                f"no command '{command}'{did_you_mean(command, list(parser.commands))}"
            )
        if (word := _word_with_credentials(words)) is not None:
            shown = without_credentials(word)
            print(
                f"{self.name} {command}: error: {shown}: {CREDENTIALS}", file=sys.stderr
            )
            return 2
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse_unknown(parser.commands.get(arguments.command, parser), unknown[0])
        if arguments.command is None:
            parser.print_help()
            return 2
        if (problem := _launcher_problem()) is not None:
            parser.error(problem)
        for name, value in vars(arguments).items():
            if isinstance(value, Path):
                # A shell leaves the `~` of --output=~/x as it is.
                setattr(arguments, name, Path(os.path.expanduser(value)))
        prefix = f"{self.name} {arguments.command}"
        first = os.environ.get("RANK", "0") == "0"
        _prepare_output(first=first)
        try:
            # Remove what killed commands left, even where this one needs no such folder.
            sweep_scratch()
            arguments.run(arguments)
            sys.stdout.flush()
            return 0
        except (UserError, ScorerError) as error:
            status = 2 if isinstance(error, UserError) else 1
            return _print_error(
                f"{prefix}: error: {' '.join(str(error).split())}",
                status,
                error,
            )
        except Interrupted as interruption:
            if first:
                print(
                    f"{prefix}: {interruption}{_launcher_note()}",
                    file=sys.stderr,
                )
            return interruption.status
        except KeyboardInterrupt:
            if first:
                text = (
                    f"\n{prefix}: interrupted; run the same command again to continue"
                )
                print(f"{text}{_launcher_note()}", file=sys.stderr)
            return 130
        except BrokenPipeError:
            return 0
        except Exception as error:
            is_memory = isinstance(error, RuntimeError | MemoryError)
            if is_memory and is_out_of_memory(error):
                reason = " ".join(str(error).split()) or "the host's memory is full"
                reason = reason[:200]
                text = (
                    f"{prefix}: error: out of memory: {reason}; run `fcsd estimate"
                    " RECIPE` to see the memory of a training, or `fcsd inspect MODEL`"
                    " to see the memory of its weights"
                )
                return _print_error(text, 2, error)
            if (problem := _file_problem(error)) is not None:
                return _print_error(f"{prefix}: error: {problem}", 2, error)
            # A bug keeps its traceback. Python prints it for a single process; of
            # several processes, only the first failure is printed.
            if _number_of_processes() == 1:
                raise
            return _print_error(
                f"{traceback.format_exc()}{prefix}: failed",
                1,
                error,
            )
        finally:
            # Other ranks and later commands of this process must not wait for this one.
            rank_failure.stop_watching()
            release_folders()

    def parser(self, command_name: str | None = None) -> Parser:
        """Build the parser of all commands.

        command_name: add the options of this command only, which saves the imports of
        the others; None: of every command.
        """
        parser = Parser(
            prog=self.name, description=self.description, epilog=self.epilog
        )
        parser.add_argument(
            "--version", action="version", version=f"{self.name} {__version__}"
        )
        commands = parser.add_subparsers(
            dest="command", metavar="COMMAND", parser_class=Parser
        )
        for name, (text, options, run, details) in self.commands.items():
            description = f"{text} {details}".strip()
            command = commands.add_parser(
                name, help=text, description=description, formatter_class=Help
            )
            command.set_defaults(run=run)
            command.register("type", Path, _path)
            # Adding options imports the records that they mirror.
            if command_name in (None, name):
                options(command)
        parser.commands = commands.choices
        return parser


def _prepare_output(*, first: bool) -> None:
    """Make standard output take any name, and keep progress bars off log files."""
    # A stream that the shell closed is None, which libraries do not expect, and the
    # next file would get its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Printing the name of a file that is not UTF-8 must not end the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():
        # A bar adds a line to a log file at each update: at most every 15 seconds.
        os.environ.setdefault("TQDM_MININTERVAL", "15")
    if not first:
        # The first rank's bars represent all ranks, including libraries' bars.
        os.environ.setdefault("TQDM_DISABLE", "1")


def _word_with_credentials(words: Sequence[str]) -> str | None:
    """Return the first word, or else variable, that holds credentials: refused before
    anything prints or records it. Proxies may need theirs.
    """
    variables = (
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_ADDRESSES)
    )
    return next(filter(holds_credentials, (*words, *variables)), None)


def _path(text: str) -> Path:
    """Read a path of the command line. An empty one, often a shell variable that is not
    set, would be the current folder.
    """
    if not text:
        raise ArgumentTypeError("a path is needed, got ''")
    if is_address(text):
        raise ArgumentTypeError(
            f"a path of this machine is needed, got the address {text}"
        )
    return Path(text)


def _refuse_unknown(parser: ArgumentParser, word: str) -> None:
    """End the program with an error for a word that a command does not accept."""
    from fcsd.base.strict import did_you_mean

    if not word.startswith("-"):
        parser.error(f"unexpected argument '{word}'; put a name with spaces in quotes")
    option = word.partition("=")[0]
    options = [name for action in parser._actions for name in action.option_strings]
    parser.error(f"no option '{option}'{did_you_mean(option, options)}")


def _print_error(text: str, status: int, error: Exception) -> int:
    """Print an error, only once in a launch of several processes, and return the exit
    status.
    """
    if _number_of_processes() > 1:
        text = (
            f"{text} (rank {os.environ.get('RANK', '?')} of {_number_of_processes()})"
        )
    to_print, status = rank_failure.first_failure(text, status, error)
    if to_print is not None:
        print(to_print, file=sys.stderr)
        rank_failure.wait_until_known()
    return status


def _file_problem(error: Exception) -> str | None:
    """Describe the fault of a path that no file can have or that may not be used, or
    of a full disk, whichever code tried to open or to write it; None for other errors.
    """
    if (
        isinstance(error, OSError)
        and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)
        and isinstance(error.filename, str | bytes)
    ):
        return (
            f"{os.fsdecode(error.filename)}: {error.strerror}; check its permissions"
            " and links, or give another path"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            sys.stdout.flush()
        except OSError:
            # What is buffered would be written again, and fail, when Python ends.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return (
            f"{error.filename or 'the output'} could not be written"
            f" ({error.strerror}); free some space and run the command again"
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename or "a path")
        return (
            f"{name if len(name) <= 200 else f'{name[:199]}…'}: {error.strerror};"
            " choose a shorter name"
        )
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return (
            f"{error.object[:200]!r}: holds an incomplete character, or is not UTF-8;"
            " choose another name"
        )
    return None


def _launcher_note() -> str:
    """Explain the output of torch's launcher after a signal; its status is not ours."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return (
        " (the launcher's status 1 and traceback below come from this signal, not from"
        " another error)"
    )


def _launcher_problem() -> str | None:
    """Describe a variable of a launcher that holds no number; None if all are right."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name, "0")
        if not value.removeprefix("-").isdecimal():
            return (
                f"the environment variable {name} is {value!r}; a launcher sets it to a"
                f" number; without one, `unset {name}`"
            )
    return None


def _number_of_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
