"""Train the layers for multi-token prediction (MTP) of a converted model, with which
engines draft tokens: they were trained on the original's hidden states, and the
converted model's are others.

An MTP layer k (from 0) reads the final hidden state at position t and the tokens up to
t+1+k, and predicts token t+2+k. An engine accepts its draft where the model itself would
have chosen that token, so that its target is the model's own distribution at t+1+k:

    loss = sum over k of the mean of KL(p_model || q_k) per token

The model, its embeddings and head are frozen, as are the routers and routed experts of
the MTP layers, most of their weights. What is left (two norms, the projection, attention,
the shared expert, the last norm) decides how the new states are read.

Not covered: families that are not in `MTP_KINDS`; several processes; deeper MTP layers, or
one layer that drafts several tokens, on drafts of their own (they are trained and measured
on the text's tokens).
"""

import contextlib
import copy
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.hooks import remove_hook_from_module
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, get_scheduler
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel

from fcsd.base.errors import UserError
from fcsd.base.text import progress_bar
from fcsd.data.batches import NO_LOSS, Batch, in_batches, trim_padding
from fcsd.model.connectivity.checkpoint import read_header
from fcsd.model.connectivity.extra_tensors import (
    INDEXED,
    MTP_KINDS,
    MtpTensors,
    mtp_tensors,
)
from fcsd.model.families import base_model_type
from fcsd.model.families.structure import output_head
from fcsd.parallel.launch import input_device
from fcsd.training.losses.head import final_hidden, head_logits
from fcsd.training.losses.heldout_kl import kl_sum

_FROZEN = re.compile(r"\.(experts|gate|router)\.")
"""Parameters of an MTP layer's routed experts and router, by name."""
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of an expert in the files, by the tensor of all experts in transformers."""
_OF_MODEL = re.compile(
    r"(embed_tokens|shared_head\.head|lm_head)\.weight$|rotary_emb\.inv_freq$"
)
"""What an MTP layer in the files has of the model, or of what that computes."""
_CHUNK_TOKENS = 256
_LIKE_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}
"""Parts of transformers' MTP layer, by their names in the files of Qwen3-Next and after,
where they stand beside the one layer.
"""


class StoredLayers(NamedTuple):
    """The MTP layers of a checkpoint, and the file of each of their tensors."""

    tensors: MtpTensors
    files: dict[str, str]

    def name_of(self, key: str) -> str:
        """Return the name in the files of a parameter of transformers' MTP layers."""
        number, _, rest = key.partition(".")
        in_block = rest.startswith("mtp_block.")
        rest = rest.removeprefix("mtp_block.")
        if self.tensors.begin is None:
            if in_block:
                return f"mtp.layers.{number}.{rest}"
            part, _, end = rest.partition(".")
            return f"mtp.{_LIKE_QWEN[part]}.{end}"
        prefix = next(iter(self.files)).partition("layers.")[0]
        rest = re.sub(r"^post_norm\.", "shared_head.norm.", rest)
        return f"{prefix}layers.{self.tensors.begin + int(number)}.{rest}"


class _Layers(MtpModel):
    """transformers' MTP layers, also with attention to positions that an indexer chose."""

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        with _described(model.config.get_text_config(), count):
            super().__init__(model, count)
        for layer in self.layers:
            block: Any = layer.mtp_block
            # Layers that reuse the positions of the one before return them, too.
            block.register_forward_hook(_states_alone)

    def create_masks_for_mtp_layer(
        self,
        layer_idx: int,
        inputs_embeds: Tensor,
        mtp_cache: Any,
        position_ids: Tensor,
    ) -> dict[str, Any]:
        """Return the masks of a layer, as transformers' decoders make them."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None or kinds[layer_idx] != INDEXED:
            masks: dict[str, Any] = super().create_masks_for_mtp_layer(
                layer_idx, inputs_embeds, mtp_cache, position_ids
            )
            return masks
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            past_key_values=mtp_cache,
            position_ids=position_ids,
            allow_is_causal_skip=False,
        )
        return {"attention_mask": mask}


def _states_alone(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def _described(config: Any, count: int) -> Iterator[None]:
    """Give a text config, within the block, what transformers reads about its MTP layers,
    where its class has no place for that.
    """
    values: dict[str, Any] = {"num_mtp_layers": count}
    for name, value in MTP_KINDS.get(base_model_type(config.model_type), {}).items():
        values[name] = value * count if isinstance(value, list) else value
    before = {name: getattr(config, name) for name in values if hasattr(config, name)}
    for name, value in values.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(config, name, before[name])
            else:
                delattr(config, name)


@dataclass(frozen=True)
class Acceptance:
    """How often drafts are accepted, over `tokens` positions with loss.

    greedy: for each MTP layer, the share of positions at which its likeliest token is
    the model's. sampled: the mean of sum(min(p, q)), the share that rejection sampling
    accepts at temperature 1. length: tokens of an engine's step, 1 + the drafts that are
    accepted one after another (greedy).
    """

    tokens: int
    greedy: list[float]
    sampled: list[float]
    length: float


class MtpLayers:
    """The MTP layers of a model, as transformers runs them.

    Raises:
        UserError: the model has none, transformers cannot run them, or they are stored
            in another form than DeepSeek-V3's or Qwen3-Next's.
    """

    def __init__(
        self, model: PreTrainedModel, folder: Path, files: Sequence[str]
    ) -> None:
        self.model: Any = model
        found = stored_layers(model.config.get_text_config(), folder, files)
        self.count = found.tensors.layers
        self.mtp = _Layers(model, self.count)
        # Embeddings and head are the model's own, and stay where they are.
        self.device = output_head(model).weight.device
        self.mtp.layers.to(self.device, model.dtype)
        # Spread over several devices, the model's own module computes on another one.
        if self.mtp.rotary_emb is not None:
            rotary = copy.deepcopy(self.mtp.rotary_emb)
            self.mtp.rotary_emb = remove_hook_from_module(rotary).to(self.device)
        stored = _fill(self.mtp.layers, folder, found)
        self.stored = {
            stored[key]: parameter
            for key, parameter in self.mtp.layers.named_parameters()
            if key in stored and not _FROZEN.search(f".{key}")
        }
        model.requires_grad_(False)
        self.mtp.requires_grad_(False)
        # Trained in float32; engines read what the files had.
        self.mtp.layers.float()
        for parameter in self.stored.values():
            parameter.requires_grad_(True)

    def states(
        self, batch: Batch, hidden: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each MTP layer its states, the model's states of the same tokens, and
        their ids: (N, D), (N, D), (N,), for the N tokens with loss that it predicts.

        hidden: (B, T, D) final states of the model.
        """
        ids = batch["input_ids"]
        positions = batch["position_ids"].to(self.device)
        labels = batch["labels"].to(self.device)
        length = ids.shape[1]
        hidden = hidden.to(self.device)
        previous = hidden.float()
        for k in range(self.count):
            seen = length - 1 - k
            embedded = self.model.get_input_embeddings()(ids[:, k + 1 :])
            previous = self.mtp.forward_layer(
                k,
                previous[:, :seen],
                positions[:, k + 1 :],
                None,
                inputs_embeds=embedded.to(self.device, torch.float32),
            )
            target = labels[:, k + 2 :]
            keep = target != NO_LOSS
            yield previous[:, :-1][keep], hidden[:, k + 1 : -1][keep], target[keep]

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """Return the sum over layers of their mean KL, and the number of tokens that the
        first one predicts.
        """
        head = output_head(self.model)
        total, count = zero_of(self.mtp), 0
        for states, targets, _ in self.states(batch, self.hidden(batch)):
            config = self.model.config
            kl = kl_sum((targets, head, config), (states, head, config))
            total = total + kl / max(1, len(states))
            count = count or len(states)
        return total, count

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor:
        """Return the model's final hidden states (B, T, D)."""
        ids = batch["input_ids"]
        flat = final_hidden(self.model, ids, batch["position_ids"], None)
        return flat.reshape(*ids.shape, -1)

    @torch.no_grad()
    def acceptance(self, batches: Sequence[Batch]) -> Acceptance:
        """Measure how often drafts of these layers are accepted."""
        device = input_device(self.model)
        greedy, sampled, counts = torch.zeros(3, self.count, dtype=torch.float64)
        accepted = 0.0
        for batch in progress_bar(batches, desc="acceptance", unit="batch"):
            batch = {name: value.to(device) for name, value in batch.items()}
            # A layer further on predicts the tokens behind; the first positions of a row
            # are those that all layers draft from.
            chain: Tensor | None = None
            for k, (states, targets, _) in enumerate(
                self.states(batch, self.hidden(batch))
            ):
                equal, overlap = self._agreement(states, targets)
                greedy[k] += equal.sum().item()
                sampled[k] += overlap.sum().item()
                counts[k] += len(equal)
                drawn = _by_draft(equal, batch["labels"].to(self.device), k)
                chain = drawn if chain is None else chain[:, : drawn.shape[1]] * drawn
                accepted += chain.sum().item()
        if not counts.all():
            raise UserError(
                "--text: what is left out to measure drafts has no answer of"
                f" {self.count + 1} tokens; give longer texts, or --loss-on all"
            )
        return Acceptance(
            int(counts[0].item()),
            (greedy / counts).tolist(),
            (sampled / counts).tolist(),
            1 + accepted / counts[0].item(),
        )

    def _agreement(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the likeliest tokens are equal, and sum(min(p, q)): (N,), (N,)."""
        equal, overlap = [], []
        dtype = output_head(self.model).weight.dtype
        for own, model in zip(
            states.split(_CHUNK_TOKENS), targets.split(_CHUNK_TOKENS), strict=True
        ):
            q, p = (
                head_logits(self.model, each.to(dtype)).float() for each in (own, model)
            )
            equal.append(q.argmax(-1) == p.argmax(-1))
            overlap.append(torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1))
        if not equal:
            return states.new_zeros(0), states.new_zeros(0)
        return torch.cat(equal), torch.cat(overlap)

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained tensors by their names in the files, in float32."""
        return {name: p.detach().cpu() for name, p in self.stored.items()}


def stored_layers(config: Any, folder: Path, files: Sequence[str]) -> StoredLayers:
    """Find the MTP layers of a checkpoint. config: its text config.

    Raises:
        UserError: `mtp_tensors` knows none.
    """
    file_of = {name: file for file in files for name in read_header(folder / file)}
    tensors = mtp_tensors(file_of, config, folder)
    return StoredLayers(tensors, {name: file_of[name] for name in tensors.names})


def zero_of(module: nn.Module) -> Tensor:
    """Return a zero that depends on all trained parameters, so that a batch without
    targets has gradients, too.
    """
    parts = [p.sum() * 0 for p in module.parameters() if p.requires_grad]
    return torch.stack(parts).sum()


def _by_draft(equal: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return (B, T-2-k): 1 where layer k's draft from this position is accepted."""
    keep = labels[:, k + 2 :] != NO_LOSS
    found = torch.zeros(keep.shape, device=keep.device)
    found[keep] = equal.to(found.dtype)
    return found


def train_mtp(
    layers: MtpLayers,
    rows: Sequence[Mapping[str, Any]],
    *,
    batch_rows: int,
    learning_rate: float,
) -> dict[str, Any]:
    """Train on rows once, with AdamW and a cosine schedule; return what happened."""
    batches = in_batches(rows, batch_rows)
    optimizer = torch.optim.AdamW(
        layers.stored.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    scheduler = get_scheduler(
        "cosine", optimizer, max(1, len(batches) // 20), len(batches)
    )
    device, losses, tokens = input_device(layers.model), [], 0
    begin = time.perf_counter()
    with progress_bar(batches, desc="MTP layers", unit="step") as bar:
        for batch in bar:
            batch = {
                name: value.to(device) for name, value in trim_padding(batch).items()
            }
            with _autocast(layers.model, device):
                loss, count = layers.loss(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(layers.stored.values(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            tokens += count
            if not torch.isfinite(loss):
                raise UserError(
                    f"MTP layers: the loss is {loss.item()} after {len(losses)} steps;"
                    " use a lower --learning-rate"
                )
            bar.set_postfix_str(f"KL {losses[-1]:.3f}")
    return {
        "steps": len(losses),
        "tokens": tokens,
        "first_loss": losses[0],
        "last_loss": sum(losses[-10:]) / len(losses[-10:]),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _autocast(model: PreTrainedModel, device: torch.device) -> Any:
    low = model.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, model.dtype if low else None, enabled=low)


# ---- names in the files


def _fill(layers: nn.Module, folder: Path, stored: StoredLayers) -> dict[str, str]:
    """Copy the files' tensors into transformers' MTP layers, and return the names of those
    that are a single tensor in the files.

    Raises:
        UserError: a tensor is missing, one too many, quantised or of another shape.
    """

    unused = {name for name in stored.files if not _OF_MODEL.search(name)}

    def tensor(name: str) -> Tensor:
        if name not in stored.files:
            raise UserError(
                f"{folder}: its MTP layers lack '{name}', which transformers' layer has;"
                f" fcsd knows those of {', '.join(MTP_KINDS)}"
            )
        unused.discard(name)
        with safe_open(folder / stored.files[name], framework="pt") as file:
            return file.get_tensor(name)

    single = {}
    for key, value in layers.state_dict().items():
        name = stored.name_of(key)
        experts, _, part = name.rpartition(".experts.")
        if part in _EXPERTS and name not in stored.files:
            found = torch.stack([
                torch.cat([
                    tensor(f"{experts}.experts.{number}.{each}.weight")
                    for each in _EXPERTS[part]
                ])
                for number in range(len(value))
            ])  # fmt: skip
        else:
            found, single[key] = tensor(name), name
        if (
            found.shape != value.shape
            or not found.is_floating_point()
            or found.element_size() < 2
        ):
            raise UserError(
                f"{folder}: '{name}' is {found.dtype} {tuple(found.shape)}; a floating"
                f" tensor {tuple(value.shape)} is needed (`fcsd dequantize` writes"
                " quantised weights in bfloat16)"
            )
        value.copy_(found)
    if unused:
        raise UserError(
            f"{folder}: its MTP layers have '{min(unused)}', which transformers' layer"
            " lacks, so that its drafts would be others than an engine's"
        )
    return single
