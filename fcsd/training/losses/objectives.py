"""The objectives that a training minimises, in nats per kept token.

docs/architecture.md ("Add an objective") names all the places of a new one.

    y = logits of the model, scaled and capped as its family does (`fcsd.training.losses.fused`)
    p = softmax(y / temperature)        of the student p_s, of the teacher p_t; m = (1-b) p_s + b p_t

    kl          sum_v p_t log(p_t / p_s)                    d/d(y/T) = p_s - p_t            paper Eq. 4
    reverse_kl  sum_v p_s log(p_s / p_t)                    p_s (log(p_s / p_t) - reverse_kl)
    jsd         b KL(p_t || m) + (1-b) KL(p_s || m)         (1-b) p_s (log(p_s / m) - KL(p_s || m))
    ce          -log p_s(label)                             p_s - one-hot                   paper Eq. 3

The definitions are those of TRL (`generalized_jsd_loss`, GKD,
https://huggingface.co/papers/2306.13649) for beta = 0, 1 and b. As there, the loss is
the divergence at the temperature itself, in nats: it is not multiplied by T^2, as
Hinton et al. do.

A `Measure` is the arithmetic of one loss. A config class has the keys of a recipe's
`objective` section, which are arguments of `fcsd.FCSDConfig` as well. Only the
arithmetic imports torch, so that a recipe is read without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fcsd.base.strict import Rule, Strict, one_of

if TYPE_CHECKING:
    from torch import Tensor

    Compared = tuple[Tensor, Tensor, Tensor | None]
    Compare = Callable[[Any, Tensor, Tensor, list[Tensor], bool], Compared]


@dataclass(frozen=True)
class Measure:
    """One loss: its title in a figure, and its arithmetic on a chunk of n tokens. It
    sees labels or a teacher, never both: for a mix such as CE + alpha KL, `compare` and
    `fused_linear_loss` would have to take both.

    compare(objective, s, target, work, wants_entropy): s is (n, V) log p_s, target (n,
    V) log p_t or (n, 1) labels, and work holds the other tiles (n, V), the first of
    which is p_t; all but the labels are overwritten. Returns: the gradient of the
    logits (n, V), and for each token the loss and, if wanted, the teacher's entropy.
    num_tiles: the number of (n, V) tiles that this takes, s and log p_t included.

    A log-sum-exp has a rounding error, which moves all log-probabilities of a row by
    the same small number, and the sum of the row's probabilities with them. Adding
    sum(p_s - p_t), which is 0 except for these errors, removes them from both KLs:
    without it the KL of a converged student is rounding noise.
    """

    title: str
    num_tiles: int
    compare: Compare


def _kl(
    by: Any, s: Tensor, t: Tensor, work: list[Tensor], wants_entropy: bool
) -> Compared:
    p, entropy = work[0], None
    if wants_entropy:
        t.mul_(p)
        entropy = -t.sum(-1)
        value = t.addcmul_(p, s, value=-1.0).sum(-1)
    else:
        value = t.sub_(s).mul_(p).sum(-1)
    # The gradient of the logits is p_s - p_t.
    gradient = s.exp_().sub_(p)
    value += gradient.sum(-1)  # sum(p_s - p_t), see `Measure`
    return gradient, value, entropy


def _reverse_kl(
    by: Any, s: Tensor, t: Tensor, work: list[Tensor], wants_entropy: bool
) -> Compared:
    import torch

    p = work[0]
    teacher_sum = p.sum(-1)
    entropy = -p.mul_(t).sum(-1) if wants_entropy else None
    # With KL = sum p_s (s - t), the gradient of the logits is p_s (s - t - KL). Results
    # replace tiles that are not read again.
    gradient = torch.sub(s, t, out=t)
    p_s = s.exp_()
    raw = torch.mul(p_s, gradient, out=p).sum(-1)
    value = raw + (teacher_sum - p_s.sum(-1))
    gradient.sub_(raw.unsqueeze(1)).mul_(p_s)
    return gradient, value, entropy


def _jsd(
    by: Any, s: Tensor, t: Tensor, work: list[Tensor], wants_entropy: bool
) -> Compared:
    import torch

    # With u = log(p_t / p_s): log(m / p_s) = log(1 + b (e^u - 1)), which is exact for
    # small u, too. Above 80 the exponential would overflow; p_s is negligible there.
    b, p, r = by.jsd_beta, work[0], work[1]
    entropy = -torch.mul(p, t, out=r).sum(-1) if wants_entropy else None
    u = t.sub_(s).clamp_(max=80.0)
    p_s = s.exp_()
    torch.expm1(u, out=r).mul_(b).log1p_()
    student_part = u.sub_(r).mul_(p).mul_(b)  # summands of b KL(p_t || m)
    value = student_part.addcmul_(p_s, r, value=b - 1.0).sum(-1)
    mean = torch.mul(p_s, r, out=p).sum(-1, keepdim=True)
    return r.sub_(mean).mul_(p_s).mul_(b - 1.0), value, entropy


def _cross_entropy(
    by: Any, s: Tensor, labels: Tensor, work: list[Tensor], wants_entropy: bool
) -> Compared:
    value = -s.gather(1, labels).squeeze(1)
    # The gradient of the logits is p_s, less 1 at the label.
    gradient = s.exp_()
    return (
        gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, -1)),
        value,
        None,
    )


MEASURES = {
    "kl": Measure("KL to the teacher", 3, _kl),
    "reverse_kl": Measure("reverse KL to the teacher", 3, _reverse_kl),
    "jsd": Measure("JSD to the teacher", 4, _jsd),
    "ce": Measure("cross-entropy", 2, _cross_entropy),
}
"""The measures, by the name under which a training logs them."""


class ObjectiveBase(Strict):
    """The keys that all objectives have.

    A subclass has the keys that its objective understands. Keys of other objectives
    that the code reads from every objective are class variables with the neutral value.
    """

    name: str
    vocab_size: int | None = Field(
        None, description="rows of a padded head that are tokens", gt=0
    )
    freeze_embeddings_and_head: bool = Field(
        False, description="keep input embeddings and head as they are"
    )
    freeze_routers: bool = Field(
        False, description="keep the routers' weights as they are"
    )

    # the student is compared with a teacher, and not with the data alone
    has_teacher: ClassVar[bool]
    # The first words of a model card, by name; with a teacher the card has its own.
    trained: ClassVar[dict[str, str]] = {}

    @property
    def logged(self) -> str:
        """The name of its measure."""
        return self.name


class _WithoutL2:
    l2_coefficient: ClassVar[None] = None
    l2_relative: ClassVar[bool] = False
    l2_until: ClassVar[None] = None


class DivergenceObjectiveConfig(ObjectiveBase):
    """A divergence between the distributions of teacher and student."""

    temperature: float = Field(
        1.0, description="of both softmaxes", gt=0, allow_inf_nan=False
    )
    # `fcsd.training.own_text`; TRL's lmbda
    own_text: float | None = Field(
        None,
        description="share of rows whose answers the student writes itself",
        ge=0,
        le=1,
    )
    own_text_tokens: int | None = Field(
        None,
        description="tokens of an answer of its own, if its row has room for more",
        gt=0,
    )
    own_text_batch_size: int = Field(
        32, description="answers that it writes at once on a rank", gt=0
    )
    own_text_sample_steps: int = Field(
        100, description="steps between two samples of them in the log", gt=0
    )

    has_teacher = True

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda objective: objective.own_text == 0,
            "own_text: a share above 0 is needed; leave it out to train on the text of"
            " the data alone",
        ),
    )

    @model_validator(mode="after")
    def _settings_have_own_text(self) -> Self:
        # A record that is read again has every key: those with other values were set.
        if self.own_text is None:
            for name, key in type(self).model_fields.items():
                if name.startswith("own_text_") and getattr(self, name) != key.default:
                    raise ValueError(
                        f"{name} has no effect without own_text, the share of rows"
                        " whose answers the student writes; set that, or leave"
                        f" {name} out"
                    )
        return self


class KLObjectiveConfig(_WithoutL2, DivergenceObjectiveConfig):
    """A KL divergence: kl is forward KL(teacher || student), paper Eq. 4, reverse_kl is
    KL(student || teacher).
    """

    name: Literal["kl", "reverse_kl"] = "kl"


class JSDObjectiveConfig(_WithoutL2, DivergenceObjectiveConfig):
    """A divergence of both from their mixture m, which has jsd_beta of the teacher:
    jsd_beta KL(teacher || m) + (1 - jsd_beta) KL(student || m).
    """

    name: Literal["jsd"]
    # The limits 0 and 1 are the objectives kl and reverse_kl.
    jsd_beta: float = Field(
        0.5, description="share of the teacher in the mixture", gt=0, lt=1
    )


class KLWithL2ObjectiveConfig(DivergenceObjectiveConfig):
    """Forward KL plus l2_coefficient times a distance between the outputs of all decoder
    layers; by default paper Eq. 5 (`fcsd.training.losses.hidden_terms`).
    """

    name: Literal["kl+l2"]
    l2_coefficient: float = Field(
        ..., description="of the distance between the hidden states", gt=0
    )
    l2_relative: bool = Field(
        False,
        description=(
            "average over layers each token's squared distance, divided by the teacher's"
            " square"
        ),
    )
    l2_until: float | None = Field(
        None,
        description="the coefficient falls to 0 over this share of max_steps",
        gt=0,
        le=1,
    )

    @property
    def logged(self) -> str:
        return "kl"


class LabelObjectiveConfig(_WithoutL2, ObjectiveBase):
    """A loss on the tokens of the data, without a teacher."""

    has_teacher = False
    own_text: ClassVar[None] = None  # no teacher would score it
    temperature: ClassVar[float] = 1.0


class CrossEntropyObjectiveConfig(LabelObjectiveConfig):
    """Cross-entropy on the data: sft is the baseline (paper Eq. 3), ce the same under
    its pre-training name.
    """

    name: Literal["sft", "ce"]

    trained: ClassVar[dict[str, str]] = {
        "sft": "Fine-tuned on the answers of the data (SFT)",
        "ce": "Trained from scratch with cross-entropy",
    }

    @property
    def logged(self) -> str:
        return "ce"


_CHOICE = one_of(
    "name",
    KLObjectiveConfig,
    JSDObjectiveConfig,
    KLWithL2ObjectiveConfig,
    CrossEntropyObjectiveConfig,
    default="kl",
    name="objective",
)
ObjectiveConfig = Annotated[
    KLObjectiveConfig
    | JSDObjectiveConfig
    | KLWithL2ObjectiveConfig
    | CrossEntropyObjectiveConfig,
    _CHOICE,
]
OBJECTIVES: dict[str, Any] = _CHOICE.members
"""The config classes, by the name in a recipe."""
