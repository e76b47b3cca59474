"""The folder that goes to the Hub: checkpoint, remote code, tokenizer, model card with results."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from fcsd.artifact import new_folder, read_json, write_text
from fcsd.recipe import Recipe
from fcsd.report.report import headline
from fcsd.report.table import markdown

_TEXT = """\
# {title}

{base} with **FarSkip connectivity**: {layers}. Its attention and MoE blocks read activations that are already there,
so that the communication of expert parallelism can run beside the computation. Parameters, their shapes and their
names are those of the original.

    o_k = o_(k-1) + attn_k(a) + shared_k(m) + routed_k(m)
    a = {attention}
    m = {mlp}

## Loading

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{where}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{where}", trust_remote_code=True)
```

`trust_remote_code=True` runs `modeling_farskip.py` of this repository, which rewires the layers of transformers' own
classes; without it loading fails. The connectivity alone changes no speed on one device: what it allows is overlap in
an engine that uses it.

## Results

{results}

## How it was made

Self-distillation (FCSD): teacher is the original checkpoint, objective `{objective}`, {steps} steps of
{batch} tokens, learning rate {rate:g}. The whole recipe, versions and per-item comparisons are in `report.md`.

## Limits

It was distilled on the data named in the recipe and evaluated on the tasks above, nothing else is known about what it
kept of the original.
"""


def write_publication(recipe: Recipe, model: Path, report_folder: Path, folder: Path) -> None:
    """Assemble the folder from the distilled model and the report; weights are hard-linked where the disk allows."""
    report = read_json(report_folder / "report.json")
    with new_folder(folder) as new:
        for file in sorted(model.iterdir()):
            _link(file, new / file.name)
        for file in sorted(report_folder.iterdir()):
            if file.suffix in (".png", ".md", ".json"):
                shutil.copyfile(file, new / file.name)
        write_text(new / "README.md", str(model_card(recipe, report, read_json(model / "config.json"))))


def model_card(recipe: Recipe, report: dict[str, Any], config: dict[str, Any]) -> ModelCard:
    """The card: what FarSkip is, which layers, recipe, results with their settings, limits, how to load."""
    publication = recipe.publication
    base = publication.base_model or recipe.model.path or None
    name = publication.repo_id or f"{recipe.name}-farskip"
    data = ModelCardData(
        language=publication.language or None,
        license=publication.license,
        base_model=base,
        base_model_relation="finetune" if base else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["farskip", "moe", "self-distillation"],
        model_name=name,
        eval_results=_eval_results(report),
    )
    farskip = config["farskip"]
    training = report["training"].get(
        "fcsd", {"results": {"steps": 0}, "settings": {"train": recipe.train.model_dump()}}
    )
    settings = training["settings"]["train"]
    text = _TEXT.format(
        title=name,
        base=f"`{base}`" if base else "A model trained from scratch",
        layers=f"{len(farskip['layers'])} of {config['num_hidden_layers']} decoder layers are rewired",
        attention="o_(k-1) without the routed output of layer k-1"
        if farskip["attention"] == "partial"
        else "o_(k-1)",
        mlp="o_(k-1)" if farskip["mlp"] == "outdated" else "o_(k-1) + attn_k(a)",
        where=publication.repo_id or "path/to/this/folder",
        results=_results(report),
        objective=recipe.objective.name,
        steps=training["results"]["steps"],
        batch=settings["batch_size_tokens"],
        rate=settings["learning_rate"],
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _results(report: dict[str, Any]) -> str:
    rows = headline(report, "fcsd")
    if not rows:
        return "Not evaluated."
    table = markdown(["task", "original", "this model", "delta"], rows)
    kl = report["models"]["fcsd"]["result"].get("kl_to_original")
    divergence = (
        f" KL(original || this model) on held-out text: {kl['kl']:.4f} nats per token."
        if kl and kl["kl"] is not None
        else ""
    )
    return f"{table}\n\nPer cent; delta with its paired standard error, same items and prompts for both.{divergence}"


def _eval_results(report: dict[str, Any]) -> list[EvalResult] | None:
    model = report["models"].get("fcsd")
    if model is None:
        return None
    # The suite's data set id, not the folder it was read from.
    ids = {row["task"]: row["dataset"] for row in model["result"]["settings"]["suite"]["tasks"]}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=ids[task] or task,
            dataset_name=task,
            metric_type=row["metric"],
            metric_value=round(row["value"], 4),
        )
        for task, row in model["result"]["tasks"].items()
    ]


def _link(source: Path, destination: Path) -> None:
    try:
        destination.hardlink_to(source)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, destination)
