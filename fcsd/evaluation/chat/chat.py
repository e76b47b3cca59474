"""`fcsd chat`: talk to a model, or to a converted one and its original side by side
(paper App. B).

Replies stream, with the model's own generation settings. Side by side, each model has a
separate conversation with its own replies. Thoughts are neither shown nor kept. Without
a terminal every line of stdin is a turn, and is shown before its reply.

Not covered: images, tools; beam search, which cannot stream (beams are switched off).
"""

import contextlib
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.errors import UserError, is_out_of_memory, one_line
from fcsd.data.rendering import dated_options, template_errors
from fcsd.data.thoughts import END_OF_PROMPT, Thoughts, thinking_options
from fcsd.evaluation.chat.terminal import GAP, ending, printable, side_by_side
from fcsd.model.config import ModelConfig
from fcsd.model.load import find_model, load_tokenizer, num_positions
from fcsd.parallel.launch import join_launch
from fcsd.parallel.place import load_for_evaluation
from fcsd.training.generation import TOKEN_BY_TOKEN

_HELP = """\
/reset   forget the conversation
/again   answer the last message once more
/exit    leave (Ctrl-D does too)
/help    this text
Ctrl-C ends a reply. To send a message that begins with /, put a space before it. Pasted lines are one
message."""
_NARROWEST = 24
"""Cells of a column; on a narrower terminal replies are printed one below the other."""
_STREAMED: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    **dict.fromkeys(
        ("num_beam_groups", "diversity_penalty", "constraints", "force_words_ids")
    ),
    **dict.fromkeys(("penalty_alpha", "dola_layers")),
}
"""Generation settings of a model with which a reply cannot stream, or that transformers
has no code for, at the values that switch them off."""
_MAX_NEW_TOKENS = 2048
"""Limit of a reply where neither the user nor the model's generation settings have one.
"""


@dataclass
class Speaker:
    """A model, its tokenizer, and the conversation with it.

    thinking: False asks the template of a hybrid for answers without thoughts; other
    templates ignore it. today: the date that the template writes, fixed for the whole
    conversation.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    messages: list[dict[str, str]] = field(default_factory=list)
    thinking: bool = True
    today: datetime = field(default_factory=datetime.now)

    def prompt(self) -> Any:
        """Return the token ids and mask of the conversation and the beginning of a
        reply; UserError where it does not fit.
        """
        options: dict[str, Any] = {
            "add_generation_prompt": True,
            "return_dict": True,
            "return_tensors": "pt",
        }
        options |= dated_options(self.tokenizer, self.today)
        if not self.thinking:
            options |= thinking_options(self.tokenizer, thinking=False)
        with template_errors(self.name, "the conversation"):
            inputs: Any = self.tokenizer.apply_chat_template(self.messages, **options)
        # Most models compute on beyond their positions, without an error and without
        # sense.
        length, positions = inputs["input_ids"].shape[1], self.positions
        if positions is not None and length >= positions:
            raise UserError(
                f"{self.name}: the conversation has {length} tokens, the model"
                f" {positions} positions; /reset starts a new conversation"
            )
        return inputs.to(self.model.device)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model's config says it takes."""
        return num_positions(self.model.config)

    def samples(self, greedy: bool) -> bool:
        """Return whether tokens are drawn; at temperature 0 they are the likeliest."""
        generation: Any = self.model.generation_config
        return not greedy and bool(generation.do_sample) and generation.temperature != 0

    def settings(self, greedy: bool) -> str:
        """Describe how the model chooses tokens and where it computes: `temperature
        0.3, top_p 0.95; bfloat16 on cuda:0`.
        """
        generation: Any = self.model.generation_config
        description = "greedy"
        if self.samples(greedy):
            names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            values = {name: getattr(generation, name, None) for name in names}
            if values["repetition_penalty"] == 1:  # which changes nothing
                del values["repetition_penalty"]
            parts = [f"{k} {v:g}" for k, v in values.items() if v is not None]
            description = ", ".join(parts) or "sampling"
        return (
            f"{description}; {str(self.model.dtype).removeprefix('torch.')} on"
            f" {self.model.device}"
        )


def load_speaker(
    path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    thinking: bool = True,
) -> Speaker:
    """Load a checkpoint to talk to, on the accelerator if there is one, or as
    transformers' `device_map` says.

    Raises:
        UserError: as `load_for_evaluation`; no tokenizer; a tokenizer without chat
            template.
    """
    checkpoint = find_model(
        ModelConfig(path=path, revision=revision, trust_remote_code=trust_remote_code)
    )
    tokenizer = load_tokenizer(checkpoint.folder, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise UserError(
            f"{path}: its tokenizer has no chat template, so the model was not trained"
            " to converse; give a chat model, or put its chat_template.jinja beside"
            " the tokenizer"
        )
    try:
        model = load_for_evaluation(checkpoint, join_launch(), device_map=device_map)
    except (ValueError, RuntimeError, AssertionError) as error:
        # Without a map the mistake is not the user's, and keeps its traceback. torch
        # asserts that it was built for a device.
        if device_map is None or is_out_of_memory(error):
            raise
        raise UserError(f"--device-map {device_map}: {one_line(error)}") from None
    return Speaker(path, model, tokenizer, thinking=thinking)


def chat(
    speakers: Sequence[Speaker],
    *,
    system: str | None = None,
    max_new_tokens: int | None = None,
    greedy: bool = False,
) -> list[str]:
    """Read turns from stdin until its end or /exit; one or two speakers. Return the
    errors that were shown in place of replies. Without a terminal every turn is
    repeated before its reply.

    greedy: always the likeliest token, whatever the models' settings.

    Raises:
        KeyboardInterrupt: Ctrl-C without a terminal; on one it ends a reply.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  editing of the line; input() uses it
        for speaker in speakers:
            print(f"{speaker.name}: {speaker.settings(greedy)}")
        print("Type a message; /help explains, /exit leaves.")
    opening = [{"role": "system", "content": system}] if system else []

    def begin() -> None:
        for speaker in speakers:
            speaker.messages = [*opening]

    answer = partial(_turn, speakers, max_new_tokens, greedy)
    begin()
    # The last message is remembered for /again.
    last = between = ""
    failures: list[str] = []
    for line in _lines(terminal):
        text = line.strip()
        if not terminal and text:
            print(f"{between}> {printable(text)}")
            between = "\n"
        if line.startswith("/"):
            if text in ("/exit", "/quit"):
                break
            if text == "/reset":
                begin()
                print("The conversation starts again.")
            elif text == "/again":
                if not last:
                    print("There is no message yet.")
                    continue
                for speaker in speakers:
                    if speaker.messages[-2:-1] == [{"role": "user", "content": last}]:
                        del speaker.messages[-2:]
                failures += answer(last)
            elif text == "/help":
                print(_HELP)
            else:
                print(f"{text.split()[0]}: no such command.\n{_HELP}")
        elif text:
            last = text
            failures += answer(text)
        sys.stdout.flush()
    return failures


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the turns of the user; on a terminal Ctrl-C empties the line, Ctrl-D ends."""
    if not terminal:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit leaves)")


def _turn(
    speakers: Sequence[Speaker],
    max_new_tokens: int | None,
    greedy: bool,
    text: str,
) -> list[str]:
    """Send one message to all models and write their replies to stdout; take back a
    message that cannot be answered, and return the errors.
    """
    for speaker in speakers:
        speaker.messages.append({"role": "user", "content": text})
    replies: list[Reply] = []
    failures: list[str] = []
    try:
        # All prompts are built before any model starts, so a message that does not fit
        # one model is taken back from all.
        replies = [Reply(speaker, max_new_tokens, greedy) for speaker in speakers]
        for reply in replies:
            reply.start()
        _show([speaker.name for speaker in speakers], replies)
    except UserError as error:
        failures.append(str(error))
        print(f"error: {error}")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print("\n(interrupted)")
    finally:
        for reply in replies:
            reply.stop()
        if not replies:
            for speaker in speakers:
                speaker.messages.pop()
    if not replies:
        return failures
    for speaker, reply in zip(speakers, replies, strict=True):
        whose = f"{speaker.name}: " if len(speakers) > 1 else ""
        if reply.error is not None:
            speaker.messages.pop()
            failures.append(f"{whose}{reply.error}")
            print(f"error: {failures[-1]}")
            continue
        speaker.messages.append({"role": "assistant", "content": reply.text})
        if reply.cut:
            print(f"({whose}{reply.cut})")
    return failures


def _show(names: Sequence[str], replies: Sequence["Reply"]) -> None:
    """Print one reply as it comes; two in columns, or one below the other where there
    is no room.
    """
    # Two columns share the terminal's width, less the gap between them.
    width = (shutil.get_terminal_size((120, 40)).columns - len(GAP)) // 2
    if len(replies) == 1 or width < _NARROWEST:
        for name, reply in zip(names, replies, strict=True):
            if len(replies) > 1:
                print(f"── {name}")
            for piece in reply:
                print(piece, end="", flush=True)
            print()
        return
    heads = [[f"{ending(name, width)}\n", "─" * width + "\n"] for name in names]
    for row in side_by_side([iter(head) for head in heads], width):
        print(row)
    for row in side_by_side(replies, width):
        print(row, flush=True)


def _streamer(thoughts: Thoughts) -> Any:
    """Return a queue of the text that is generated, without special tokens other than
    those that mark thoughts.
    """
    from transformers import TextIteratorStreamer

    # transformers either shows all special tokens or none.
    class Streamer(TextIteratorStreamer):
        def put(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                visible = [
                    token not in thoughts.hidden for token in value.flatten().tolist()
                ]
                value = value.flatten()[visible]
                if not len(value):
                    return
            super().put(value)

    return Streamer(
        thoughts.tokenizer, skip_prompt=True, skip_special_tokens=not thoughts.marks
    )


class Reply:
    """A reply that is generated in a thread; iterate to get its text, without thoughts,
    in pieces.

    cut: why the reply was cut off, and how to continue; "" otherwise.
    error: why there is no reply.
    """

    def __init__(
        self, speaker: Speaker, max_new_tokens: int | None, greedy: bool = False
    ) -> None:
        from transformers import StoppingCriteriaList

        self._written = ""
        self.cut = ""
        self.error: str | None = None
        self._stopped = threading.Event()
        tokenizer: Any = speaker.tokenizer
        self._thoughts = Thoughts(tokenizer)
        self._streamer = _streamer(self._thoughts)
        self._model: Any = speaker.model
        inputs = speaker.prompt()
        self._prompt = str(tokenizer.decode(inputs["input_ids"][0, -END_OF_PROMPT:]))
        generation: Any = speaker.model.generation_config
        limit = max_new_tokens or generation.max_new_tokens or _MAX_NEW_TOKENS
        self._at_limit = f"cut after {limit} tokens; --max-new-tokens allows more"
        # The positions that the prompt leaves may be fewer than the limit.
        if (
            speaker.positions is not None
            and speaker.positions - inputs["input_ids"].shape[1] < limit
        ):
            limit = speaker.positions - inputs["input_ids"].shape[1]
            self._at_limit = (
                f"cut: the model's {speaker.positions} positions are full; /reset"
                " starts a new conversation"
            )
        self._options: dict[str, Any] = {
            **inputs,
            **TOKEN_BY_TOKEN,
            **_STREAMED,
            "tokenizer": tokenizer,  # for the model's own stop strings
            "max_new_tokens": limit,
            "streamer": self._streamer,
            "stopping_criteria": StoppingCriteriaList([self._criterion]),  # type: ignore[list-item]
        }
        # transformers warns of sampling settings with greedy decoding, so they are
        # cleared.
        if not speaker.samples(greedy):
            self._options |= {
                "do_sample": False,
                "temperature": None,
                "top_p": None,
                "top_k": None,
            }
        if generation.pad_token_id is None:
            self._options["pad_token_id"] = (
                tokenizer.pad_token_id or tokenizer.eos_token_id
            )
        self._thread = threading.Thread(target=self._generate, daemon=True)

    @property
    def text(self) -> str:
        """The reply so far."""
        return self._thoughts.answer(self._written, self._prompt)

    def _criterion(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        import torch

        return torch.full(
            (input_ids.shape[0],), self._stopped.is_set(), device=input_ids.device
        )

    def start(self) -> None:
        self._thread.start()

    def _generate(self) -> None:
        try:
            ids = self._model.generate(**self._options)[
                0, self._options["input_ids"].shape[1] :
            ]
            ends = self._model.generation_config.eos_token_id
            ends = ends if isinstance(ends, list) else [ends]
            # An end token at the limit is the model's own end.
            if len(ids) >= self._options["max_new_tokens"] and int(ids[-1]) not in ends:
                self.cut = self._at_limit
                full_text = self._thoughts.decode(ids.tolist())
                if full_text and not self._thoughts.answer(full_text, self._prompt):
                    self.cut = (
                        f"no answer, because the thoughts did not end: {self.cut}"
                    )
        except Exception as error:  # shown in one line; the chat continues
            self.error = f"{type(error).__name__}: {one_line(error)[:300]}"
        finally:
            self._streamer.end()

    def __iter__(self) -> Iterator[str]:
        for piece in self._thoughts.streamed(self._pieces(), self._prompt):
            if visible := printable(piece):
                yield visible

    def _pieces(self) -> Iterator[str]:
        for piece in self._streamer:
            self._written += piece
            yield piece

    def stop(self) -> None:
        """End the generation after its present token, and wait for that, ignoring keys."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt:
                continue
