"""Random routers and CAMoE's links, on which biases are compared at equal simulated time."""

from typing import Any

import numpy as np

from fcsd.planning.network.links import LinkModel
from fcsd.planning.network.simulate import Payload
from fcsd_steering.routing.bottleneck import Deployment, bottleneck
from fcsd_steering.routing.camoe import camoe
from fcsd_steering.routing.metrics import avg_layer_kl, routes_moved
from fcsd_steering.routing.placement import contiguous

# CAMoE, A.3: megabits a second, milliseconds
RATES = np.array(
    [
        [1, 1500, 1500, 1500],
        [1500, 1, 1e4, 1e4],
        [1500, 1e4, 1, 1e4],
        [1500, 1e4, 1e4, 1],
    ]
)
DELAYS = np.array(
    [
        [0, 0.65, 0.56, 0.55],
        [0.645, 0, 0.63, 0.65],
        [0.56, 0.63, 0, 0.07],
        [0.565, 0.65, 0.065, 0],
    ]
)


def links_of(
    alpha: Any,
    beta: Any,
    egress: list[float | None] | None = None,
    combine: tuple[Any, Any] | None = None,
) -> LinkModel:
    """Links of one latency and rate in all phases, or of others (alpha, beta) on the way back."""
    size = len(alpha)

    def phase(alpha: Any, beta: Any) -> dict[str, Any]:
        return {
            "alpha_s": np.asarray(alpha).tolist(), "beta_s_per_byte": np.asarray(beta).tolist(),
            "r2": [[None] * size] * size, "refined": [[False] * size] * size, "repeats": 1,
        }  # fmt: skip

    out = phase(alpha, beta)
    facts = {
        "endpoints": [f"node{k}" for k in range(size)],
        "collective": "p2p",
        "backend": "gloo",
        "world_size": size,
        "libraries": {},
        "ports": {
            "egress_s_per_byte": egress or [None] * size,
            "ingress_s_per_byte": [None] * size,
        },
    }
    back = out if combine is None else phase(*combine)
    return LinkModel.model_validate(
        facts | {"metadata": out, "dispatch": out, "combine": back}
    )


UNEQUAL = links_of(DELAYS * 1e-3, 8e-6 / RATES)
EQUAL = links_of(np.full((4, 4), 1e-4), np.full((4, 4), 8e-10))


class Routers:
    """Random routers: logits [L, N, T, E] of normal tokens around a popularity of the experts."""

    def __init__(
        self,
        seed: int,
        num_layers: int = 3,
        num_tokens: int = 1024,
        experts: int = 128,
        top_k: int = 8,
    ):
        rng = np.random.default_rng(seed)
        popularity = rng.normal(0, 1, (num_layers, 1, 1, experts))
        shape = num_layers, 4, num_tokens, experts
        self.top_k = top_k
        self.calibration, self.heldout = (
            popularity + rng.normal(0, 2.4, shape) for _ in range(2)
        )

    def choices(self, logits: np.ndarray, tables: np.ndarray | float) -> np.ndarray:
        biased = logits + (
            tables[:, :, None, :] if isinstance(tables, np.ndarray) else tables
        )
        return np.argpartition(-biased, self.top_k - 1, axis=-1)[..., : self.top_k]

    def counts(self, choices: np.ndarray) -> np.ndarray:
        experts = self.heldout.shape[-1]
        pairs = choices.reshape(*choices.shape[:2], -1)
        return np.stack(
            [[np.bincount(at, minlength=experts) for at in layer] for layer in pairs]
        )[None]

    def respond(self, tables: np.ndarray | float) -> np.ndarray:
        return self.counts(self.choices(self.calibration, tables))


def deployment_of(links: LinkModel, routers: Routers) -> Deployment:
    num_layers, _, _, experts = routers.heldout.shape
    return Deployment(
        links, Payload(2048, experts), np.tile(contiguous(experts, 4), (num_layers, 1))
    )


def measured(
    routers: Routers, deployment: Deployment, tables: np.ndarray | float
) -> dict[str, float]:
    """On held-out tokens: time, layer KL, moved routes, and probability of the chosen
    experts that is lost.
    """
    base, now = (routers.choices(routers.heldout, each) for each in (0.0, tables))
    loads = [routers.counts(each)[0].sum(1) for each in (base, now)]
    probabilities = np.exp(routers.heldout - routers.heldout.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    mass = [np.take_along_axis(probabilities, each, -1).sum() for each in (base, now)]
    return {
        "time": deployment.mean_time(routers.counts(now))
        / deployment.mean_time(routers.counts(base)),
        "layer_kl": avg_layer_kl(*loads),
        "moved": float(routes_moved(base, now).mean()),
        "lost": 1 - mass[1] / mass[0],
    }


def at_equal_time(
    links: LinkModel, seed: int, strength: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the effect of CAMoE's bias on held-out tokens, and of ours where it is at
    least as fast on them.
    """
    routers = Routers(seed)
    deployment = deployment_of(links, routers)
    placed = links, deployment.payload, deployment.placement
    tables = camoe(routers.respond(0.0)[0], *placed, strength)
    theirs = measured(routers, deployment, tables)
    goal = deployment.mean_time(routers.respond(tables))
    for _ in range(10):
        ours = measured(
            routers, deployment, bottleneck(routers.respond, deployment, goal).tables
        )
        if ours["time"] <= theirs["time"]:
            return theirs, ours
        goal *= 0.999 * theirs["time"] / ours["time"]
    raise AssertionError(
        "no goal on calibration tokens is fast enough on held-out ones"
    )
