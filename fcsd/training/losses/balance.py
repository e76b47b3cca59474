"""Balance the loads of the experts during training: by a loss, or by the bias that some
routers add to their scores for the choice.

T tokens, E experts, c_e of whose K T choices are of expert e, p the softmax of the
router's logits:

    f_e = E c_e / (K T)        P_e = mean over tokens of p_e        L = sum_e f_e P_e, 1 when balanced

summed over the MoE layers (Switch Transformers, arXiv 2101.03961, Eq. 4; for K above 1
DeepSeek-V2, arXiv 2405.04434, Eq. 23 to 25). Gradients flow through P alone. The tokens
are those of one example (`sequence`, the mean over examples weighted by their tokens,
so that it does not depend on how a batch is cut) or of the whole step (`batch`): f is
then counted over all ranks and over the micro-batches of the step so far (Qiu et al.,
arXiv 2501.11873), and is that of the whole step where it has one micro-batch. With more
it depends on how the batch is cut, by rows of a forward pass and by ranks: all choices
are known only after the last pass, and knowing them before the first gradient would
take one more forward pass of the student. Padding, and text after a row's last token
with loss, do not count.

Without a loss (DeepSeek-V3, arXiv 2412.19437, 2.1.2): after each step the bias of an
expert that had more than the mean of its layer falls by the rate, and that of one that
had less rises.

Not covered: routers that choose by other scores than logits get the loss of the softmax
of their logits, as in transformers; text between examples is none.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcsd.base.errors import UserError
from fcsd.data.batches import Batch, counted_tokens
from fcsd.model.families.choices import Recording, Routed, recording
from fcsd.model.families.routers import Router, find_routers
from fcsd.model.families.structure import unwrapped
from fcsd.training.config import UpdateConfig
from fcsd.training.meters import Meters


def balance_loss(
    probabilities: Tensor,
    experts: Tensor,
    share: Tensor | None,
    examples: Tensor,
    num_examples: int,
) -> Tensor:
    """Return T times the loss of one layer: the sum over examples of their loss times
    their tokens; 0 without tokens.

    probabilities: (T, E) of the router. experts: (T, K), those that each token goes to.
    share: (E,), f of the whole step; None: f is taken for each example. examples: (T,),
    the number of each token's example.
    """
    num_experts, top_k = probabilities.shape[-1], experts.shape[-1]
    if share is not None:
        return (probabilities.sum(0) * share).sum()
    # Each example has its own f: one bin for each pair of example and expert.
    pair_indices = examples[:, None] * num_experts + experts
    counts = torch.bincount(
        pair_indices.flatten(), minlength=num_examples * num_experts
    )
    lengths = torch.bincount(examples, minlength=num_examples).clamp(min=1)
    example_shares = (
        counts.view(num_examples, num_experts)
        * num_experts
        / (top_k * lengths[:, None])
    )
    return (probabilities * example_shares[examples]).sum()


class Balance:
    """The balance of one training's student.

    Raises:
        UserError: routers that are not known; `balance_bias_rate` for a family that
            chooses without a bias.
    """

    def __init__(self, train: UpdateConfig, student: nn.Module, accelerator: Any):
        self.coefficient = train.balance_loss_coefficient
        self.over = train.balance_loss_over
        self.bias_rate, self.accelerator = train.balance_bias_rate, accelerator
        self.routers = find_routers(student)
        self.biases = []
        if self.bias_rate is not None:
            self.biases = _biases(unwrapped(student), self.routers)
        # Choices of the present step, over all ranks, [layers, experts].
        self.loads: Tensor | None = None
        self.num_tokens = 1  # counted ones of that step, over all ranks

    def recorded(self, model: nn.Module) -> AbstractContextManager[Recording]:
        """Record the routers' choices in a forward pass within the block."""
        return recording(unwrapped(model), with_gradient=self.coefficient is not None)

    def begin_step(self, num_tokens: int) -> None:
        """Start counting the loads of a step with this many counted tokens."""
        self.loads, self.num_tokens = None, max(num_tokens, 1)

    def add(self, routed: list[Routed], batch: Batch) -> Tensor:
        """Count a micro-batch's choices, and return the loss summed over its tokens and
        the layers.
        """
        counted = counted_tokens(batch)
        flat = counted.flatten()
        # Position 0 begins an example; the examples of a batch are numbered through.
        examples = (batch["position_ids"] == 0).flatten().cumsum(0)[flat] - 1
        counted_routes = [
            Routed(experts[flat], logits.view(len(flat), -1)[flat])
            for experts, logits in routed
        ]
        loads = torch.stack(
            [
                torch.bincount(route.experts.flatten(), minlength=router.num_experts)
                for route, router in zip(counted_routes, self.routers, strict=True)
            ]
        )
        loads = self.accelerator.reduce(loads, "sum")
        self.loads = loads if self.loads is None else self.loads + loads
        total = flat.new_zeros((), dtype=torch.float32)
        if self.coefficient is None:
            return total
        num_examples = int(examples.max()) + 1 if len(examples) else 0
        for layer, route in enumerate(counted_routes):
            dtype = torch.promote_types(route.logits.dtype, torch.float32)
            share = None
            # f of the step so far, this micro-batch included.
            if self.over == "batch":
                share = self.loads[layer].to(dtype)
                share = share * len(share) / share.sum().clamp(min=1)
            total = total + balance_loss(
                route.logits.to(dtype).softmax(-1),
                route.experts,
                share,
                examples,
                num_examples,
            )
        return total

    def share(self, routed: list[Routed], batch: Batch, meters: Meters) -> Tensor:
        """Return a micro-batch's contribution to the loss of its step."""
        # The engines average gradients over the ranks; the factor undoes that.
        value = (
            self.add(routed, batch) * self.accelerator.num_processes / self.num_tokens
        )
        if self.coefficient is None:
            return value
        meters.add("balance", value / len(self.routers))
        return self.coefficient * value

    @torch.no_grad()
    def end_step(self) -> Tensor | None:
        """Move the biases of the choice according to the step's loads; return the
        loads.
        """
        if self.loads is not None and self.bias_rate is not None:
            for bias, load in zip(self.biases, self.loads.float(), strict=True):
                bias += (self.bias_rate * (load.mean() - load).sign()).to(bias)
        return self.loads

    def state(self) -> list[list[float]]:
        """Return the biases of all layers: the optimiser does not have them."""
        return [bias.float().tolist() for bias in self.biases]

    @torch.no_grad()
    def load(self, state: list[list[float]]) -> None:
        for bias, values in zip(self.biases, state, strict=True):
            bias.copy_(torch.tensor(values))


def _biases(owner: Any, routers: list[Router]) -> list[Tensor]:
    """Return the bias of each MoE layer that is added to the scores for the choice
    alone.
    """
    tensors = []
    for router in routers:
        block = owner.get_submodule(router.name.rpartition(".")[0])
        named = [*block.named_buffers(), *block.named_parameters()]
        # A family names it one way or the other.
        biases = [
            tensor
            for name, tensor in named
            if name.endswith(("correction_bias", "expert_bias"))
        ]
        if (
            len(biases) != 1
            or biases[0].numel() != router.num_experts
            or isinstance(biases[0], DTensor)
        ):
            raise UserError(
                f"train.balance_bias_rate: {router.name} of model type"
                f" '{owner.config.model_type}' does not have a correction bias on every"
                " rank; use train.balance_loss_coefficient"
            )
        tensors.append(biases[0].view(-1))
    return tensors
