"""Prepare the input of `examples/real/smollm2.yaml`: a pre-trained language model as
two MoEs, and text.

    python examples/real/prepare.py runs/real --model FOLDER_OR_HUB_ID

    runs/real/dense        SmolLM2-135M-Instruct, in safetensors
    runs/real/partitioned  qwen2_moe: a shared expert and 8 routed ones, 2 of them active
    runs/real/upcycled     mixtral: 4 copies of each MLP, 2 of them active; it computes what the dense model computes
    runs/real/data         train.jsonl, heldout.jsonl (conversations) and text.jsonl
    runs/real/suite.yaml   suite.yaml on this held-out text; tasks whose packages are not installed are left out

The routed experts differ from each other from the start, without any training. The
neurons of an MLP that add the most to its output become the shared expert. The inputs
of the others are clustered; the router points at the clusters, and each expert keeps
the neurons that matter most in its own cluster, with an output projection that is
fitted by least squares to what all of them would add there. As many neurons are active
as in the dense model.

Weights are bfloat16, as published, where this machine multiplies faster in that than in
float32 (with the instructions for it five times, without them far slower), and float32
elsewhere. What exists is not made again. Not covered: training, which the recipe does.
"""

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from fcsd.base.errors import UserError, one_line
from fcsd.base.text import progress_bar
from fcsd.base.writing import new_folder, write_text
from fcsd.evaluation.lm_eval.packages import provide_packages
from fcsd.evaluation.lm_eval.tasks import task_folder
from fcsd.evaluation.suites import load_suite
from fcsd.recipe.recipe import to_yaml

NUM_EXPERTS, NUM_ACTIVE = 8, 2
EXPERT_SIZE = 192
ROW = 256  # tokens
SHARPNESS = 8.0  # of the router: logits of a token at the centre of a cluster
RIDGE = 0.02  # of the mean of the squared activations
_KMEANS_STEPS, _BALANCE_STEPS = 12, 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder for models and data")
    source_arguments(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        default=24576,
        help="tokens on which the routed experts are fitted",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the routed experts are fitted (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        help="cut the model to its first layers, for a test of the whole path",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of the weights (default: that in which this machine multiplies faster)",
    )
    options = parser.parse_args()
    prepare(
        options.output,
        options.model,
        options.data,
        num_tokens=options.tokens,
        num_layers=options.layers,
        device=options.device,
        dtype=options.dtype,
    )


def source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="hub id or folder, also of GGUF files",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with `hub/` and `corpora/` (default: data come from the Hub)",
    )


def prepare(
    output: Path,
    model: str,
    data: Path | None,
    *,
    num_tokens: int,
    num_layers: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
) -> None:
    """Make those of the folders, and the suite, that do not exist; the MoEs have the
    dtype of the dense model.
    """
    if not (output / "data").is_dir():
        with new_folder(output / "data") as folder:
            write_data(folder, data)
    if not (output / "dense").is_dir():
        with new_folder(output / "dense") as folder:
            stored = faster_dtype() if dtype == "auto" else getattr(torch, dtype)
            write_dense(folder, model, num_layers, stored)
    if not (output / "upcycled").is_dir():
        with new_folder(output / "upcycled") as folder:
            dense, tokenizer, stored = load(output / "dense")
            save(upcycled(dense), tokenizer, folder, stored)
    if not (output / "partitioned").is_dir():
        with new_folder(output / "partitioned") as folder:
            dense, tokenizer, stored = load(output / "dense")
            rows = rows_of_text(output / "data", tokenizer, num_tokens)
            moe = partitioned(dense.to(device), rows.to(device))
            save(moe, tokenizer, folder, stored)
    if not (output / "suite.yaml").is_file():
        write_suite(output / "suite.yaml", output / "data" / "heldout.jsonl")


def write_suite(file: Path, prompts: Path) -> None:
    suite = load_suite(Path(__file__).with_name("suite.yaml"))
    tasks = []
    for row in suite.tasks:
        task = row.model_dump(mode="json", exclude_unset=True)
        if row.kind == "own_text":
            task["dataset"] = str(prompts)
        elif row.kind == "generation":
            try:
                provide_packages(row.task, task_folder(row, suite))
            except UserError as error:
                print(f"{error}; {row.task} is left out of this run", file=sys.stderr)
                continue
        tasks.append(task)
    write_text(file, to_yaml({"name": suite.name, "tasks": tasks}))


# ---- the dense model


def faster_dtype() -> torch.dtype:
    """Return bfloat16 where matrices are multiplied faster in it than in float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = torch.ones(1024, 576, dtype=dtype)
        weights = torch.ones(1536, 576, dtype=dtype)
        rounds = []
        for _ in range(3):  # the first prepares kernels
            start = time.perf_counter()
            functional.linear(inputs, weights)
            rounds.append(time.perf_counter() - start)
        seconds[dtype] = min(rounds)
    return min(seconds, key=lambda dtype: seconds[dtype])


def write_dense(
    folder: Path, model: str, num_layers: int | None, dtype: torch.dtype
) -> None:
    """Write a Llama model with its tokenizer and chat template."""
    files = sorted(Path(model).glob("*.gguf"))
    if Path(model).is_dir() and len(files) > 1:
        sys.exit(f"{model}: holds {len(files)} GGUF files; one is needed")
    source = {"gguf_file": files[0].name} if files else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **source)
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, **source
        )
    except (OSError, ImportError) as error:
        sys.exit(
            f"{model}: cannot be read ({one_line(error)}); give --model, a folder or a"
            " hub id"
        )
    config = loaded.config.to_dict()
    # transformers does not save a model that was read from GGUF: its config says that
    # it is quantised.
    config.pop("quantization_config", None)
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    dense = LlamaForCausalLM(AutoConfig.for_model(**config))
    wanted = dense.state_dict().keys()
    dense.load_state_dict(
        {name: value for name, value in loaded.state_dict().items() if name in wanted}
    )
    save(dense, tokenizer, folder, dtype)


def load(folder: Path) -> tuple[LlamaForCausalLM, Any, torch.dtype]:
    """Return the dense model in float32, its tokenizer, and the dtype of its file."""
    dense = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stored = AutoConfig.from_pretrained(folder).dtype
    return dense, AutoTokenizer.from_pretrained(folder), stored


def save(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- MoEs


def shape_of(dense: LlamaForCausalLM) -> dict[str, Any]:
    """Return the settings that the config of an MoE takes over."""
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id",
        "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return {name: getattr(dense.config, name) for name in names}


def upcycled(dense: LlamaForCausalLM, num_experts: int = 4) -> MixtralForCausalLM:
    """Copy each MLP into every expert. The weights of the chosen experts sum to 1, so
    the output does not change.
    """
    config = MixtralConfig(
        **shape_of(dense),
        intermediate_size=dense.config.intermediate_size,
        num_local_experts=num_experts,
        num_experts_per_tok=NUM_ACTIVE,
        sliding_window=None,
    )
    model = MixtralForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    tensors = shared_tensors(model, dense)
    for index, layer in enumerate(dense.model.layers):
        prefix = f"model.layers.{index}.mlp"
        gate, up, down = matrices(layer.mlp)
        tensors[f"{prefix}.gate.weight"] = 0.02 * torch.randn(
            num_experts, dense.config.hidden_size, generator=generator
        )
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up]).repeat(
            num_experts, 1, 1
        )
        tensors[f"{prefix}.experts.down_proj"] = down.repeat(num_experts, 1, 1)
    model.load_state_dict(tensors)
    return model


def partitioned(dense: LlamaForCausalLM, rows: Tensor) -> Qwen2MoeForCausalLM:
    """Split each MLP into a shared expert and routed ones that are fitted on rows (B,
    T) of text.
    """
    size = dense.config.intermediate_size
    shared_size = size - NUM_ACTIVE * EXPERT_SIZE
    config = Qwen2MoeConfig(
        **shape_of(dense),
        intermediate_size=size,
        moe_intermediate_size=EXPERT_SIZE,
        shared_expert_intermediate_size=shared_size,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_ACTIVE,
        norm_topk_prob=True,
        qkv_bias=False,
    )
    model = Qwen2MoeForCausalLM(config)
    tensors = shared_tensors(model, dense)
    hidden = dense.model.embed_tokens(rows).detach()
    positions = torch.arange(rows.shape[1], device=rows.device)[None]
    missed = []
    with torch.no_grad():
        for index, layer in enumerate(
            progress_bar(dense.model.layers, desc="experts", unit="layer")
        ):
            read: list[Tensor] = []
            watch = layer.mlp.register_forward_pre_hook(
                lambda _, inputs, read=read: read.append(inputs[0])
            )
            hidden = torch.cat([
                layer(
                    part,
                    position_embeddings=dense.model.rotary_emb(part, positions),
                    position_ids=positions,
                    attention_mask=None,
                )
                for part in hidden.split(8)
            ])  # fmt: skip
            watch.remove()
            experts = split_mlp(
                torch.cat(read).flatten(0, 1), *matrices(layer.mlp), shared_size
            )
            missed.append(experts.missed)
            prefix = f"model.layers.{index}.mlp"
            tensors |= {
                f"{prefix}.{name}": value for name, value in experts.tensors().items()
            }
    model.load_state_dict(tensors)
    print(
        f"experts: miss {sum(missed) / len(missed):.4f} of what an MLP adds (squares, a"
        " quarter of the text left out)"
    )
    return model


def shared_tensors(model: Any, dense: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the tensors that an MoE has under the same names as the dense model."""
    known = dense.state_dict()
    return {name: known[name].clone() for name in model.state_dict() if name in known}


def matrices(mlp: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate (F, D), up (F, D) and down (D, F)."""
    return (
        mlp.gate_proj.weight.detach(),
        mlp.up_proj.weight.detach(),
        mlp.down_proj.weight.detach(),
    )


@dataclass
class Experts:
    """The experts of one layer. missed: share of the MLP's squared output that they
    miss on held-out text.
    """

    router: Tensor
    shared: tuple[Tensor, Tensor, Tensor]
    routed: list[tuple[Tensor, Tensor, Tensor]]
    missed: float

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors under qwen2_moe's names."""
        gate, up, down = self.shared
        return {
            "gate.weight": self.router,
            "shared_expert.gate_proj.weight": gate,
            "shared_expert.up_proj.weight": up,
            # The gate of the shared expert is the sigmoid of 0.
            "shared_expert.down_proj.weight": 2 * down,
            "shared_expert_gate.weight": gate.new_zeros(1, gate.shape[1]),
            "experts.gate_up_proj": torch.stack(
                [torch.cat([gate, up]) for gate, up, _ in self.routed]
            ),
            "experts.down_proj": torch.stack([down for _, _, down in self.routed]),
        }


def split_mlp(
    inputs: Tensor, gate: Tensor, up: Tensor, down: Tensor, shared_size: int
) -> Experts:
    """Split an MLP by what its neurons add on inputs (N, D); every fourth input is held
    out of the fit.
    """
    activations = functional.silu(inputs @ gate.T) * (inputs @ up.T)
    strength = down.norm(dim=0).square()
    order = (activations.square().mean(0) * strength).argsort(descending=True)
    shared, rest = order[:shared_size], order[shared_size:]
    fitted = torch.arange(len(inputs), device=inputs.device) % 4 != 3
    router = cluster_router(inputs[fitted])
    weights, chosen = (inputs @ router.T).softmax(-1).topk(NUM_ACTIVE)
    weights = weights / weights.sum(-1, keepdim=True)
    target = activations[:, rest] @ down[:, rest].T
    added, routed = torch.zeros_like(target), []
    for expert in range(NUM_EXPERTS):
        weight = (weights * (chosen == expert)).sum(-1)
        use = fitted & (weight > 0)
        share = weight[use, None]
        importance = (share * activations[use][:, rest].square()).mean(0) * strength[
            rest
        ]
        kept = rest[importance.topk(EXPERT_SIZE).indices.sort().values]
        own = activations[use][:, kept]
        gram = (own * share).T @ own
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        residual = target[use] - own @ down[:, kept].T
        projection = (
            down[:, kept] + torch.linalg.solve(gram, (own * share).T @ residual).T
        )
        routed.append((gate[kept], up[kept], projection))
        added += weight[:, None] * (activations[:, kept] @ projection.T)
    whole = activations @ down.T
    missed = (added - target)[~fitted].square().sum() / whole[~fitted].square().sum()
    return Experts(
        router, (gate[shared], up[shared], down[:, shared]), routed, missed.item()
    )


def cluster_router(inputs: Tensor) -> Tensor:
    """Return router weights (E, D) that point at clusters of inputs (N, D), each chosen
    about equally often.
    """
    generator = torch.Generator().manual_seed(0)
    centred = inputs - inputs.mean(0)
    unit = functional.normalize(centred, dim=-1)
    centres = unit[torch.randperm(len(unit), generator=generator)[:NUM_EXPERTS]]
    for _ in range(_KMEANS_STEPS):
        nearest = (unit @ centres.T).argmax(-1)
        means = [unit[nearest == expert].sum(0) for expert in range(NUM_EXPERTS)]
        centres = functional.normalize(torch.stack(means), dim=-1)
    weights = centres * SHARPNESS / centred.norm(dim=-1).mean()
    # A router has no bias. The common part of the inputs serves as one: in this
    # direction they are 1 on average.
    gram = inputs.T @ inputs
    gram.diagonal().add_(1e-3 * gram.diagonal().mean())
    constant = torch.linalg.solve(gram, inputs.sum(0))
    logits, bias = inputs @ weights.T, inputs.new_zeros(NUM_EXPERTS)
    level = inputs @ constant
    for step in range(_BALANCE_STEPS):
        chosen = (logits + level[:, None] * bias).topk(NUM_ACTIVE).indices
        load = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS) / chosen.numel()
        bias += (1 - step / _BALANCE_STEPS) * (1 - NUM_EXPERTS * load)
    return weights + bias[:, None] * constant


# ---- text


def write_data(folder: Path, data: Path | None) -> None:
    """Write conversations and text that no benchmark grades: instructions, worked
    problems, an encyclopedia.
    """
    draw = random.Random(0)
    rows = [*instructions(data), *problems(data)]
    draw.shuffle(rows)
    lines = [json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in rows]
    write_text(folder / "train.jsonl", "".join(lines[256:]))
    write_text(folder / "heldout.jsonl", "".join(lines[:256]))
    write_text(
        folder / "text.jsonl",
        "".join(json.dumps({"text": text}) + "\n" for text in articles(data)),
    )


def instructions(data: Path | None) -> Iterator[list[dict[str, str]]]:
    if data is not None:
        rows = json.loads(
            (data / "corpora" / "rasbt_instruction-data.json").read_text(
                encoding="utf-8"
            )
        )
        names = ("instruction", "input", "output")
    else:
        rows = load_dataset("databricks/databricks-dolly-15k", split="train[:4000]")
        names = ("instruction", "context", "response")
    for row in rows:
        question, context, answer = (row[name] for name in names)
        yield conversation(f"{question}\n{context}".strip(), answer)


def problems(data: Path | None) -> Iterator[list[dict[str, str]]]:
    place = "openai/gsm8k" if data is None else str(data / "hub" / "openai" / "gsm8k")
    for row in load_dataset(place, "main", split="train[:1500]"):
        yield conversation(row["question"], row["answer"])


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def articles(data: Path | None) -> list[str]:
    """Return paragraphs of Wikipedia."""
    if data is not None:
        lines = (
            (data / "corpora" / "wikitext2_valid.txt")
            .read_text(encoding="utf-8")
            .splitlines()
        )
    else:
        lines = load_dataset(
            "Salesforce/wikitext", "wikitext-2-raw-v1", split="validation"
        )["text"]
    return [line.strip() for line in lines if len(line) > 200]


def rows_of_text(folder: Path, tokenizer: Any, num_tokens: int) -> Tensor:
    """Return (B, T) tokens from articles and conversations in equal parts."""
    parts = []
    for name in ("text", "train"):
        ids: list[int] = []
        with (folder / f"{name}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                text = row.get("text") or tokenizer.apply_chat_template(
                    row["messages"], tokenize=False
                )
                ids += tokenizer(text, add_special_tokens=False).input_ids
                if len(ids) >= num_tokens // 2:
                    break
        num_rows = min(len(ids), num_tokens // 2) // ROW
        parts.append(torch.tensor(ids[: num_rows * ROW]).view(num_rows, ROW))
    return torch.cat(parts)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
