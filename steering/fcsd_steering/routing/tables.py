"""Make bias tables for a model: run it on text, simulate its exchanges, push its
routers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.base.writing import check_file_place
from fcsd.model.families import base_model_type
from fcsd.model.families.choices import Routed
from fcsd.model.load import find_model
from fcsd.parallel.launch import ALONE, Launch, Ranks
from fcsd.parallel.place import load_for_evaluation
from fcsd.planning.cost.windows import Windows, read_windows_file
from fcsd.planning.network.links import Array
from fcsd_steering.config import SIGMA_FLOOR, BiasSettings
from fcsd_steering.routing.bias import (
    BiasTables,
    Kind,
    read_tables,
    router_bias,
    steered_routers,
    tables_for,
    write_tables,
)
from fcsd_steering.routing.bottleneck import Deployment, bottleneck, fit_windows
from fcsd_steering.routing.camoe import camoe
from fcsd_steering.routing.counts import read_batches
from fcsd_steering.routing.exchanges import exchange_counts
from fcsd_steering.routing.placement import contiguous, placed
from fcsd_steering.routing.study import Rows, batches_of, network_of


class Calibration:
    """A model and the batches on which its traffic is counted; batch j is at endpoint j
    mod N.

    N consecutive batches make one exchange. Each of several ranks runs its share of the
    batches, and all get the counts of one process.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Tensor]],
        num_endpoints: int,
        *,
        selection: bool = False,
        ranks: Ranks = ALONE,
    ):
        self.model, self.num_endpoints, self.selection = model, num_endpoints, selection
        self._batches, self._ranks = batches, ranks
        runs = self._run(None)
        self.counts = self._exchanges(runs)
        """Pairs [X, L, N, E] without a bias."""
        self.logit_std: Array = np.nanmean([spread for _, spread in runs], 0)
        """Standard deviation over experts of a layer's logits, mean over tokens: [L]."""

    def respond(self, tables: BiasTables) -> NDArray[np.int64]:
        """Return the pairs [X, L, N, E] with a bias. All ranks call this."""
        return self._exchanges(self._run(tables))

    def _exchanges(
        self, runs: Sequence[tuple[NDArray[np.int64], Array]]
    ) -> NDArray[np.int64]:
        return exchange_counts(
            np.stack([counts for counts, _ in runs]), self.num_endpoints
        )

    def _run(self, tables: BiasTables | None) -> list[tuple[NDArray[np.int64], Array]]:
        if tables is None:
            tables = self._no_bias()
        # Without a bias the routers are steered by zeros, so that their logits are read
        # in the same way.
        with router_bias(self.model, tables) as steering:

            def begin(number: int) -> None:
                steering.endpoint, steering.heard = number % self.num_endpoints, []

            def read_choices(
                routed: Sequence[Routed], batch: Mapping[str, Tensor]
            ) -> tuple[NDArray[np.int64], Array]:
                return _summed(
                    routed, steering.heard or [], batch.get("attention_mask")
                )

            return read_batches(
                self.model,
                self._batches,
                read_choices,
                ranks=self._ranks,
                begin=begin,
                bar="routing",
            )

    def _no_bias(self) -> BiasTables:
        routers = steered_routers(self.model)
        shape = len(routers), self.num_endpoints, routers[0].num_experts
        placement = np.tile(contiguous(shape[2], self.num_endpoints), (shape[0], 1))
        return tables_for(self.model, "camoe", 0.0, np.zeros(shape), placement)


def _summed(
    routed: Sequence[Routed], logits: Sequence[Tensor], mask: Tensor | None
) -> tuple[NDArray[np.int64], Array]:
    """Return pairs [L, E], and the spread [L] of the logits at the point where the bias
    is added: some families scale them later.
    """
    counts = [
        torch.bincount(choice.experts.flatten(), minlength=choice.logits.shape[-1])
        for choice in routed
    ]
    spreads = []
    for layer_logits in logits:
        unpadded = layer_logits
        if mask is not None:
            is_token = mask.reshape(-1).bool().to(layer_logits.device)
            unpadded = layer_logits[is_token]
        # A batch without tokens has no spread, and drops out of the mean over batches.
        spreads.append(
            float(unpadded.double().std(-1).mean()) if len(unpadded) else np.nan
        )
    return torch.stack([pairs.cpu() for pairs in counts]).numpy(), np.array(spreads)


def make_tables(
    calibration: Calibration,
    deployment: Deployment,
    kind: Kind,
    strength: float = 1.0,
    *,
    scaled: bool = False,
    windows: Array | None = None,
    sigma_floor: float = SIGMA_FLOOR,
) -> tuple[BiasTables, dict[str, Any]]:
    """Return the tables of a kind, and their effect on the calibration text. All ranks
    call this.

    scaled: the strength is in standard deviations of a layer's logits. windows: [L, 2]
    seconds, for the kind `windows`. sigma_floor: see
    `fcsd_steering.routing.camoe.camoe`, for the other kinds.
    """
    logit_std = calibration.logit_std

    def wrapped(values: NDArray[Any]) -> BiasTables:
        return tables_for(
            calibration.model,
            kind,
            strength,
            values,
            deployment.placement,
            selection=calibration.selection,
        )

    def respond(values: NDArray[np.float32]) -> NDArray[np.int64]:
        return calibration.respond(wrapped(values))

    # The time without a bias, to compare the tables with.
    facts: dict[str, Any] = {"before_s": deployment.mean_time(calibration.counts)}
    # Windows need no strength: the search ends where the exchanges are hidden.
    if kind == "windows":
        assert windows is not None
        push = fit_windows(respond, deployment, windows, logit_std=logit_std)
        layers = [router.layer for router in steered_routers(calibration.model)]
        facts |= {"steps": push.steps, "left": [layers[k] for k in push.left]}
        tables = wrapped(push.tables)
    else:
        # CAMoE's tables are computed once from the mean exchange, without running the
        # model again.
        mean = calibration.counts.mean(0)
        placed = deployment.links, deployment.payload, deployment.placement
        unit = logit_std if scaled else None
        values = camoe(mean, *placed, strength, logit_std=unit, sigma_floor=sigma_floor)
        tables = wrapped(values)
        if kind == "bottleneck":
            # The goal of `bottleneck` is CAMoE's time at this strength, or no bias
            # where CAMoE makes it slower.
            goal = min(facts["before_s"], deployment.mean_time(respond(values)))
            push = bottleneck(respond, deployment, goal, logit_std=logit_std)
            facts["steps"], tables = push.steps, wrapped(push.tables)
    return tables, facts | {
        "after_s": deployment.mean_time(calibration.respond(tables))
    }


def read_windows(path: str | Path, config: Any, num_endpoints: int) -> Windows:
    """Read a file of `fcsd plan --windows`; raise UserError if it belongs to another
    model or other ranks.

    config: the model's config; its weights are not needed yet. num_endpoints: endpoints
    of the links.
    """
    windows = read_windows_file(path)
    advice = f"write them with `fcsd plan MODEL --ep {num_endpoints} --windows {path}`"
    planned_type = base_model_type(windows.model_type)
    model_type = base_model_type(config.model_type)
    num_layers = config.get_text_config().num_hidden_layers
    facts = [
        ("model type", planned_type, "the model has", model_type),
        ("decoder layers", windows.num_layers, "the model has", num_layers),
        (
            "expert-parallel ranks",
            windows.expert_parallel,
            "the links have",
            num_endpoints,
        ),
    ]
    for quantity, planned, having, actual in facts:
        # Two of these facts are optional in the file.
        if planned is not None and planned != actual:
            raise UserError(
                f"{path}: windows for {quantity} {planned}, but {having} {actual};"
                f" {advice}"
            )
    return windows


def windows_by_layer(windows: Windows, model: nn.Module) -> Array:
    """Return the windows [L, 2] of dispatch and combine, in seconds; raise UserError if
    the model has other MoE layers.
    """
    layers = [router.layer for router in steered_routers(model)]
    if windows.layers != layers:
        raise UserError(
            f"--windows: for the MoE layers {windows.layers}, but the model has"
            f" {layers}; write them with `fcsd plan MODEL --windows FILE`"
        )
    return np.array([windows.dispatch_s, windows.combine_s], dtype=np.float64).T


def write_bias(
    settings: BiasSettings,
    out: Path,
    launch: Launch,
    prompts: Callable[[Any], Rows] | None = None,
) -> dict[str, Any]:
    """Make tables and write them to a file; return their effect on the text. All ranks
    call this.

    prompts: given the tokenizer, returns the prompts of the settings' tasks. Raises the
    errors of `study_routing`.
    """
    # Everything that can be refused is refused before the model is loaded.
    launch.ranks.from_first(lambda: check_file_place(out, read_tables))
    folder = find_model(settings.model)
    network = network_of(settings, [folder])
    windows = None
    if settings.windows is not None:
        config = folder.load_config(any_family=settings.model.trust_remote_code)
        windows = read_windows(settings.windows, config, network.num_endpoints)
    batches = batches_of(settings, [folder], prompts, network.num_endpoints)
    model = load_for_evaluation(folder, launch)
    calibration = Calibration(
        model,
        batches,
        network.num_endpoints,
        selection=settings.selection,
        ranks=launch.ranks,
    )
    assert network.links is not None and network.payload is not None
    exchange = network.links, network.payload
    placement = placed(settings.placement, calibration.counts.mean(0), *exchange)
    deployment = Deployment(*exchange, placement)
    tables, facts = make_tables(
        calibration,
        deployment,
        settings.kind,
        1.0 if settings.strength is None else settings.strength,
        scaled=settings.scale is not None,
        windows=None if windows is None else windows_by_layer(windows, model),
        sigma_floor=settings.sigma_floor,
    )
    if launch.first:
        write_tables(out, tables)
    return facts
