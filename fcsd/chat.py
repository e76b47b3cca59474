"""`fcsd chat`: talk to a model, or to a converted one and its original side by side (paper App. B).

    chat([load_speaker("OUT"), load_speaker("path/original")], system="Be brief.")

Replies stream, with the model's own generation settings. Side by side each model has a conversation of its own, with
its own replies. Without a terminal every line of stdin is a turn.

Not covered: images, tools, several GPUs (a model is on one device).
"""

import contextlib
import shutil
import sys
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from fcsd.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HELP = """\
/reset   forget the conversation
/exit    leave (Ctrl-D does too)
/help    this text
Ctrl-C ends a reply. A message that begins with / is sent when a space stands before it."""
_GAP = " │ "
_DIRECTIONS = frozenset(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
_MAX_NEW_TOKENS = 2048
"""Where neither the user nor the model's generation settings limit a reply."""


@dataclass
class Speaker:
    """A model, its tokenizer, and the conversation with it."""

    name: str
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    messages: list[dict[str, str]] = field(default_factory=list)

    def prompt(self) -> Any:
        """Token ids and mask of the conversation and the beginning of a reply.

        Raises:
            UserError: the template does not take the messages, or they are longer than the model's positions.
        """
        from jinja2 import TemplateError

        try:
            inputs: Any = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise UserError(f"{self.name}: its chat template refuses the conversation: {error}") from None
        length, positions = inputs["input_ids"].shape[1], self.positions
        if positions is not None and length >= positions:
            raise UserError(
                f"{self.name}: the conversation has {length} tokens, the model {positions} positions;"
                " /reset begins anew"
            )
        return inputs.to(self.model.device)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model's config says it takes."""
        config = self.model.config.get_text_config()
        found: int | None = getattr(config, "max_position_embeddings", None)
        return found


def load_speaker(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Speaker:
    """Load a checkpoint to talk to, on the accelerator if there is one.

    Raises:
        UserError: as `load_model`; no tokenizer; a tokenizer without chat template.
    """
    from fcsd.connectivity import load_model
    from fcsd.connectivity.checkpoint import find_folder
    from fcsd.loading import load_tokenizer, to_accelerator

    folder = find_folder(path, revision)
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise UserError(
            f"{path}: its tokenizer has no chat template, so the model was not trained to converse; give a chat model,"
            " or put its chat_template.jinja beside the tokenizer"
        )
    model: Any = to_accelerator(load_model(folder, dtype="auto", trust_remote_code=trust_remote_code), path)
    return Speaker(path, model, tokenizer)


def chat(
    speakers: Sequence[Speaker],
    *,
    system: str | None = None,
    max_new_tokens: int | None = None,
    source: TextIO | None = None,
    sink: TextIO | None = None,
) -> None:
    """Read turns until the end of the input or /exit; one or two speakers.

    source, sink: stdin and stdout; prompts and notes are shown on a terminal only.
    """
    source, sink = source or sys.stdin, sink or sys.stdout
    terminal = source.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  editing of the line; input() uses it
        print("Type a message; /help explains, /exit leaves.", file=sink)
    for speaker in speakers:
        speaker.messages = _opening(system)
    for line in _lines(source, terminal):
        text = line.strip()
        if line.startswith("/"):
            if text == "/exit":
                return
            if text == "/reset":
                for speaker in speakers:
                    speaker.messages = _opening(system)
                print("The conversation begins anew.", file=sink)
            elif text == "/help":
                print(_HELP, file=sink)
            else:
                print(f"{text.split()[0]}: no such command. {_HELP}", file=sink)
        elif text:
            _turn(speakers, text, max_new_tokens, sink)
        sink.flush()


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _lines(source: TextIO, terminal: bool) -> Iterator[str]:
    """Turns of the user; on a terminal Ctrl-C empties the line, Ctrl-D ends."""
    if not terminal:
        yield from (line.rstrip("\n") for line in source)
        return
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit leaves)")


def _turn(speakers: Sequence[Speaker], text: str, max_new_tokens: int | None, sink: TextIO) -> None:
    """One message to all, their replies to `sink`; a message that cannot be answered is taken back."""
    for speaker in speakers:
        speaker.messages.append({"role": "user", "content": text})
    try:
        replies = [Reply(speaker, max_new_tokens) for speaker in speakers]
    except (UserError, KeyboardInterrupt) as error:
        print(f"error: {error}" if isinstance(error, UserError) else "\n(interrupted)", file=sink)
        for speaker in speakers:
            speaker.messages.pop()
        return
    for reply in replies:
        reply.start()
    try:
        if len(replies) == 1:
            for piece in replies[0]:
                sink.write(piece)
                sink.flush()
            sink.write("\n")
        else:
            width = (shutil.get_terminal_size((120, 40)).columns - len(_GAP)) // 2
            names = [[speaker.name, "─" * width] for speaker in speakers]
            for row in side_by_side([iter(f"{part}\n" for part in name) for name in names], width):
                print(row, file=sink)
            for row in side_by_side(replies, width):
                print(row, file=sink, flush=True)
    except KeyboardInterrupt:
        print("\n(interrupted)", file=sink)
    finally:
        for reply in replies:
            reply.stop()
    for speaker, reply in zip(speakers, replies, strict=True):
        speaker.messages.append({"role": "assistant", "content": reply.text})
        if reply.error is not None:
            print(f"error: {speaker.name}: {reply.error}", file=sink)


class Reply:
    """A reply that is generated in a thread; iterate to get its text in pieces."""

    def __init__(self, speaker: Speaker, max_new_tokens: int | None) -> None:
        from transformers import StoppingCriteriaList, TextIteratorStreamer

        self.text = ""
        self.error: str | None = None
        self._stopped = threading.Event()
        self._streamer: Any = TextIteratorStreamer(
            speaker.tokenizer,  # type: ignore[arg-type]
            skip_prompt=True,
            skip_special_tokens=True,
        )
        self._model: Any = speaker.model
        inputs = speaker.prompt()
        own = speaker.model.generation_config
        limit = max_new_tokens or (own.max_new_tokens if own is not None else None) or _MAX_NEW_TOKENS
        if speaker.positions is not None:
            limit = min(limit, speaker.positions - inputs["input_ids"].shape[1])
        self._options: dict[str, Any] = {
            **inputs,
            "max_new_tokens": limit,
            "streamer": self._streamer,
            "stopping_criteria": StoppingCriteriaList([self._criterion]),  # type: ignore[list-item]
        }
        if own is None or own.pad_token_id is None:
            self._options["pad_token_id"] = speaker.tokenizer.pad_token_id or speaker.tokenizer.eos_token_id
        self._thread = threading.Thread(target=self._generate, daemon=True)

    def _criterion(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        import torch

        return torch.full((input_ids.shape[0],), self._stopped.is_set(), device=input_ids.device)

    def start(self) -> None:
        self._thread.start()

    def _generate(self) -> None:
        try:
            self._model.generate(**self._options)
        except Exception as error:  # said in one line; the chat goes on
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            self._streamer.end()

    def __iter__(self) -> Iterator[str]:
        for piece in self._streamer:
            self.text += piece
            if shown := printable(piece):
                yield shown

    def stop(self) -> None:
        """End the generation after its present token, and wait for that, whatever keys are pressed meanwhile."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt:
                continue


def printable(text: str) -> str:
    """Without control characters and changes of direction, with which a model could write over the terminal."""
    return "".join(
        c for c in text if c in "\n\t" or (unicodedata.category(c) != "Cc" and c not in _DIRECTIONS)
    )


def side_by_side(columns: Sequence[Any], width: int) -> Iterator[str]:
    """Rows of two texts that arrive in pieces, each wrapped to `width` cells.

    A row is given as soon as both columns have theirs, or one has ended. The columns are read in turns, a piece each.
    """
    width = max(width, 10)
    sources = [iter(column) for column in columns]
    rest, ended = [""] * len(sources), [False] * len(sources)
    while True:
        for index, source in enumerate(sources):
            if not ended[index] and not complete(rest[index], width):
                piece = next(source, None)
                ended[index] = piece is None
                rest[index] += (piece or "").expandtabs(4)
        while all(over or complete(text, width) for text, over in zip(rest, ended, strict=True)):
            if not any(rest):
                break
            cells = []
            for index, text in enumerate(rest):
                row, rest[index] = first_row(text, width)
                cells.append(row)
            yield _GAP.join(_padded(cell, width) for cell in cells).rstrip()
        if all(ended) and not any(rest):
            return


def complete(text: str, width: int) -> bool:
    """Whether the first row of a text that still grows cannot change any more."""
    return "\n" in text or _cells(text) > width


def first_row(text: str, width: int) -> tuple[str, str]:
    """The first wrapped row of `text`, broken at a space where there is one, and what follows it."""
    line, newline, more = text.partition("\n")
    if _cells(line) <= width:
        return line, more
    end = 0
    used = 0
    while used + _cells(line[end]) <= width:
        used += _cells(line[end])
        end += 1
    if line[end] == " ":
        return line[:end], line[end + 1 :] + newline + more
    space = line.rfind(" ", 0, end)
    if space > 0:
        return line[:space], line[space + 1 :] + newline + more
    return line[:end], line[end:] + newline + more


def _cells(text: str) -> int:
    """Cells of a terminal: 2 for wide characters, 0 for combining ones."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _cells(text))


__all__ = ["Reply", "Speaker", "chat", "load_speaker"]
