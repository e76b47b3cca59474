"""Check that a server serves a model: log-probabilities of 8 prompts, against one
forward of the model in memory.

A stock engine serves the weights of a FarSkip checkpoint with regular connectivity, and
a served name says nothing.

Not covered: two models whose answers are equal within float noise, unless the server
loaded a folder of this machine, whose weights are then compared.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.memory import free_memory
from fcsd.base.weights import weight_files, weights_fingerprint
from fcsd.evaluation.results import Journal
from fcsd.evaluation.server import Server
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import input_device

# Two forwards of one model differ by float noise, stock connectivity by 0.5 nats and
# more.
_ALLOWED = {"float32": 1e-4, "float64": 1e-4}
_ALLOWED_OTHERWISE = 0.05
_CHECK_TOKENS = 64
_PROMPTS = (
    (
        "The capital of France is Paris, and the capital of Italy is Rome. The capital"
        " of Spain is"
    ),
    (
        "Water boils at 100 degrees Celsius at sea level, because there its vapour"
        " pressure equals that of the air."
    ),
    (
        "def mean(values):\n    if not values:\n        return 0.0\n    return"
        " sum(values) / len(values)\n"
    ),
    (
        "Question: Tom has 12 apples and gives away 5 of them. How many apples are"
        " left?\nAnswer: 12 - 5 = 7"
    ),
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377",
    (
        "She opened the letter, read it twice, and put it back into the drawer without"
        " saying a word."
    ),
    (
        "Der Zug nach Hamburg fährt heute um neun Uhr von Gleis vier ab; in Hannover"
        " muss man umsteigen."
    ),
    (
        '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "alive":'
        " false}"
    ),
)


def difference_from_server(
    backend: Any, load: Callable[[], PreTrainedModel]
) -> dict[str, Any]:
    """Return how far the log-probabilities of 8 prompts differ, in nats per token, and
    how far they may.

    backend: a `fcsd.evaluation.served.ServedBackend`. load: loads the model, which is
    freed at the end.

    Raises:
        UserError: another model, connectivity, vocabulary or precision; no
            `prompt_logprobs`.
    """
    server, model = backend.server, backend.model
    path = model.config.path
    _check_folder(server, model)
    if not server.prompt_logprobs:
        raise server.error(
            "returns no prompt_logprobs, which fcsd needs to check that it serves this"
            " model; --no-server-check skips the check"
        )
    length = min(_CHECK_TOKENS, (server.context or _CHECK_TOKENS + 1) - 1)
    # A row of one token has no log-probability to compare.
    rows = [
        row
        for text in _PROMPTS
        if len(row := backend.tokenizer(text)["input_ids"][:length]) > 1
    ]
    bodies = [{"prompt": row, "answer_tokens": len(row) - 1} for row in rows]
    try:
        # A separate journal: these answers belong to no task.
        answers = backend.responses("likelihood", bodies, Journal(), quietly=True)
    except UserError as error:
        raise UserError(
            f"{error} (asked for 8 prompts in tokens of {path}: is it this model?)"
        ) from None
    difference, dtype = _difference(rows, [logprobs for logprobs, _ in answers], load)
    allowed = _ALLOWED.get(dtype, _ALLOWED_OTHERWISE)
    # Not `>`: a NaN must also be refused.
    if not difference <= allowed:
        raise server.error(
            f"serves {server.model}, which is not {path} in {dtype}:"
            f" log-probabilities of 8 prompts differ by {difference:.2g} nats per token"
            f" (at most {allowed:g}); other weights, another precision, or regular"
            " connectivity (a FarSkip checkpoint needs the plugin fcsd-serving). Serve"
            f" it: vllm serve {model.folder}"
        )
    return {
        "prompts": len(rows),
        "mean_difference": difference,
        "allowed": allowed,
        "dtype": dtype,
    }


def _check_folder(server: Server, model: ModelFolder) -> None:
    """Refuse a server that was started with another folder of this machine: two
    trainings may answer alike.

    A relative path is resolved from here, where a server is usually started as well.
    """
    root = Path(server.root).resolve()
    if not server.root or root == model.folder.resolve() or not weight_files(root):
        return
    # A converted checkpoint has the weights of its original: the connectivity counts,
    # too.
    served = weights_fingerprint(root), read_json(root / "config.json").get("farskip")
    if served != (
        model.weights,
        read_json(model.folder / "config.json").get("farskip"),
    ):
        raise server.error(
            f"serves {server.root} (here {root}), which is not the model in"
            f" {model.config.path}. Serve that one: vllm serve"
            f" {model.folder.resolve()}"
        )


def _difference(
    rows: Sequence[Sequence[int]],
    server_logprobs: Sequence[Sequence[float]],
    load: Callable[[], PreTrainedModel],
) -> tuple[float, str]:
    """Return by how much a server's log-probabilities differ from those of the model,
    in nats per token, and the model's dtype.
    """
    loaded = load()
    model_logprobs = _logprobs(loaded, rows)
    dtype = str(loaded.dtype).removeprefix("torch.")
    del loaded
    free_memory()
    differences = [
        abs(a - b)
        for of_server, of_model in zip(server_logprobs, model_logprobs, strict=True)
        for a, b in zip(of_server, of_model, strict=True)
    ]
    return sum(differences) / len(differences), dtype


def _logprobs(
    model: PreTrainedModel, rows: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the log-probability of each token but the first, from one forward of all
    rows.
    """
    device = input_device(model)
    width = max(map(len, rows))
    # Rows are padded on the right with their last token; the mask hides it.
    padded = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    ids, shown = torch.tensor([padded, mask], device=device)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=shown).logits[:, :-1].float()
    targets = ids[:, 1:, None].to(logits.device)
    logprobs = logits.log_softmax(-1).gather(2, targets)[..., 0].tolist()
    return [values[: len(row) - 1] for values, row in zip(logprobs, rows, strict=True)]
