"""Run the routing study: where a model sends the tokens of real text, what that costs,
and what changes against another model.

Each of several ranks runs its share of the batches; the counts are those of one
process.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcsd.base.artifact import Stage
from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.memory import free_memory
from fcsd.base.writing import write_json, write_text
from fcsd.data.batches import NO_LOSS
from fcsd.data.dataset import heldout_rows
from fcsd.model.families import expert_counts, row_width
from fcsd.model.load import ModelFolder, find_model, load_tokenizer
from fcsd.parallel.launch import Launch, begin_stage, finish_stage
from fcsd.parallel.place import check_device_map, load_for_evaluation
from fcsd.planning.network.links import read_links
from fcsd.planning.network.simulate import Payload
from fcsd_steering.config import RoutingStudy
from fcsd_steering.routing.analysis import Network, comparison, model_facts
from fcsd_steering.routing.metrics import EPSILON
from fcsd_steering.routing.placement import contiguous
from fcsd_steering.routing.report import report
from fcsd_steering.routing.routes import FACTORS, Routes, read_routes

SCHEMA_VERSION = 1
_ENDPOINTS = 8  # one machine, if neither links nor a number are given

Rows = list[list[int]]


def study_routing(
    study: RoutingStudy,
    folder: Path,
    launch: Launch,
    draw: Callable[[dict[str, Any], Path], None],
    *,
    prompts: Callable[[Any], Rows] | None = None,
    inputs: dict[str, str],
    device_map: str | None = None,
) -> dict[str, Any]:
    """Run the study, unless it is finished; return the contents of `routing.json`. All
    ranks call this.

    draw: draws the figures of the result into a folder
    (`fcsd.report.study_plots.plot_routing`). prompts: given the tokenizer, returns the
    prompts of the study's tasks (`fcsd.evaluation.items.suite_prompts`). inputs:
    fingerprints of the text. device_map: see `fcsd.parallel.place.load_for_evaluation`.

    Raises:
        UserError: endpoints that do not divide the experts, links between another
            number of endpoints, a model without routers, models that cannot be
            compared, too little text.
    """
    launch = launch.for_evaluation()
    check_device_map(device_map, launch)
    models = [
        find_model(config)
        for config in (study.model, study.against)
        if config is not None
    ]
    # Endpoints and links are part of the settings that identify a study.
    network = network_of(study, models)
    settings = study.model_dump(
        mode="json", exclude={"model", "against", "links", "data_root"}
    )
    settings |= {"dtype": study.model.dtype, "num_endpoints": network.num_endpoints}
    if network.links is not None:
        settings["links"] = network.links.model_dump(mode="json")

    def begun() -> Stage:
        fingerprints = dict[str, Any](inputs)
        for name, source in zip(("model", "against"), models, strict=False):
            fingerprints |= source.fingerprints(name)
        return Stage(folder, "routing", settings, fingerprints)

    stage = launch.ranks.from_first(begun)
    if begin_stage(stage, launch) == "finished":
        return dict(read_json(folder / "routing.json"))
    batches = batches_of(study, models, prompts, network.num_endpoints)
    by_model: list[Routes] = []
    for source in models:
        model = load_for_evaluation(source, launch, device_map=device_map)
        by_model.append(
            read_routes(
                model, batches, ranks=launch.ranks, bar=Path(source.config.path).name
            )
        )
        # One model at a time: two may not fit in memory together.
        del model
        free_memory()
        _check_comparable(by_model, models)
    result = _result(study, models, by_model, network, len(batches))
    if launch.first:
        write_json(folder / "routing.json", result)
        write_text(folder / "routing.md", report(result))
        draw(result, folder)
    finish_stage(stage, launch, {})
    return result


def network_of(study: RoutingStudy, models: Sequence[ModelFolder]) -> Network:
    """Check endpoints and links against the models' configs before weights are read."""
    links = read_links(study.links) if study.links is not None else None
    num_endpoints = study.endpoints or (
        _ENDPOINTS if links is None else len(links.endpoints)
    )
    if links is not None:
        links.require(num_endpoints)
    payloads = []
    for source in models:
        config = source.load_config(
            any_family=source.config.trust_remote_code
        ).get_text_config()
        num_experts, *_ = expert_counts(config)
        # a model without experts is refused with its routers
        if num_experts is not None:
            contiguous(num_experts, num_endpoints)
            payloads.append(Payload(row_width(config), num_experts))
    return Network(num_endpoints, links, next(iter(payloads), None))


def batches_of(
    study: RoutingStudy,
    models: Sequence[ModelFolder],
    prompts: Callable[[Any], Rows] | None,
    num_endpoints: int,
) -> list[dict[str, Tensor]]:
    """Tokenize text and prompts and batch the rows in order, padded on the right."""
    tokenizers = [
        load_tokenizer(m.folder, trust_remote_code=m.config.trust_remote_code)
        for m in models
    ]
    tokenizer = tokenizers[0]
    # The comparison is by token position, which needs equal ids.
    if any(against.get_vocab() != tokenizer.get_vocab() for against in tokenizers[1:]):
        raise UserError(
            f"{models[1].config.path}: its tokenizer differs from that of"
            f" {models[0].config.path}; routes are compared token by token, so the"
            " models must share a tokenizer"
        )
    # Text first, then prompts; the order decides which endpoint gets which rows.
    rows = _text_rows(study, tokenizer, models[0]) + (
        [] if prompts is None else prompts(tokenizer)
    )
    rows = [row[: study.max_length] for row in rows if row]
    batches = []
    for start in range(0, len(rows), study.batch_size):
        lists = rows[start : start + study.batch_size]
        ids = torch.zeros(len(lists), max(map(len, lists)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for line, row in enumerate(lists):
            ids[line, : len(row)], mask[line, : len(row)] = torch.tensor(row), 1
        batches.append({"input_ids": ids, "attention_mask": mask})
    # Each endpoint needs a batch for one whole exchange.
    if len(batches) < num_endpoints:
        raise UserError(
            f"{len(rows)} rows in batches of {study.batch_size} make {len(batches)}"
            f" batches, but each of the {num_endpoints} endpoints needs one; give more"
            " text, a smaller --batch-size, or fewer --endpoints"
        )
    return batches


def _text_rows(study: RoutingStudy, tokenizer: Any, model: ModelFolder) -> Rows:
    if study.text is None:
        return []
    # Without packing: a row is one example, whose tokens come from one endpoint.
    rows = heldout_rows(
        study.text,
        tokenizer,
        num_examples=study.text_examples,
        max_length=study.max_length,
        packing=False,
        loss_on="all",
        vocab_size=model.vocab_size,
    )
    # The last label is the last token of the example; padding follows.
    lengths = [int((row["labels"] != NO_LOSS).nonzero()[0].max()) + 1 for row in rows]
    return [
        row["input_ids"][:length].tolist()
        for row, length in zip(rows, lengths, strict=True)
    ]


def _check_comparable(
    by_model: Sequence[Routes], models: Sequence[ModelFolder]
) -> None:
    # Routes are compared by layer, expert index and number of choices.
    shapes = [(routes.layers, routes.num_experts, routes.top_k) for routes in by_model]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        words = [
            f"{len(layers)} MoE layers, top {k} of {experts} experts"
            for layers, experts, k in shapes
        ]
        raise UserError(
            f"{models[1].config.path} ({words[1]}) cannot be compared with"
            f" {models[0].config.path} ({words[0]}), route by route; both need the same"
            " MoE layers and experts"
        )


def _result(
    study: RoutingStudy,
    models: Sequence[ModelFolder],
    by_model: Sequence[Routes],
    network: Network,
    num_batches: int,
) -> dict[str, Any]:
    after_dropping = [
        [routes.keep(factor) for factor in FACTORS] for routes in by_model
    ]
    facts = [
        {"name": source.config.path, **model_facts(routes, dropped, network)}
        for source, routes, dropped in zip(
            models, by_model, after_dropping, strict=True
        )
    ]
    compared = None
    if len(by_model) == 2:
        # The model given by --against is the base of the KL.
        (routes, base), (kept, base_kept) = by_model, after_dropping
        compared = comparison(base, routes, base_kept, kept)
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.model_dump(mode="json"),
        "epsilon": EPSILON,
        "num_endpoints": network.num_endpoints,
        "endpoints": None if network.links is None else network.links.endpoints,
        "num_batches": num_batches,
        "models": facts,
        "comparison": compared,
    }
