"""Write the report of a run, and the folder that goes to the Hub."""

from pathlib import Path

from fcsd.pipeline.context import Run
from fcsd.recipe.layout import MAIN
from fcsd.report.publish.card import write_publication
from fcsd.report.report import write_report


def report(run: Run, *, as_json: bool = False) -> Path:
    """Write `output_dir/report` from what the stages left; print the table of models, or the whole as JSON."""
    folder = run.layout.report
    table = write_report(run.recipe, list(run.models()), folder)
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
    else:
        print(f"{table}\n\nreport: {folder / 'report.md'}")
    return folder


def publish(run: Run, *, as_json: bool = False) -> Path:
    """Leave `output_dir/publish`: checkpoint, remote code, tokenizer, model card with results; then the report."""
    layout = run.layout
    report(run, as_json=as_json)
    write_publication(run.recipe, run.original.folder, layout.model(MAIN), layout.report, layout.publish)
    if not as_json:
        print(f"checkpoint: {layout.publish}")
    return layout.publish
