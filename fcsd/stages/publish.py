"""Write the report of a run, and the folder that goes to the Hub."""

from pathlib import Path

from fcsd.config.layout import models
from fcsd.config.recipe import Recipe
from fcsd.connectivity.checkpoint import find_folder


def report(recipe: Recipe, *, as_json: bool = False) -> Path:
    """Write `output_dir/report` from what the stages left; print the table of models, or the whole as JSON."""
    from fcsd.report.report import write_report

    folder = recipe.folder / "report"
    table = write_report(recipe, list(models(recipe)), folder)
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
    else:
        print(f"{table}\n\nreport: {folder / 'report.md'}")
    return folder


def publish(recipe: Recipe, *, as_json: bool = False) -> Path:
    """Leave `output_dir/publish`: checkpoint, remote code, tokenizer, model card with results; then the report."""
    from fcsd.publish.folder import write_publication

    folder = recipe.folder / "publish"
    report(recipe, as_json=as_json)
    original = find_folder(recipe.model_path, recipe.model.revision)
    write_publication(recipe, original, recipe.folder / "distill" / "model", recipe.folder / "report", folder)
    if not as_json:
        print(f"checkpoint: {folder}")
    return folder
