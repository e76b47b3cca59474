"""Fill the folder that goes to the Hub: weights, card, licence, results."""

import shutil
from pathlib import Path

from fcsd.base.files import new_folder, read_json, write_text
from fcsd.model.connectivity.export import link_or_copy
from fcsd.recipe.recipe import Recipe
from fcsd.report.comparison import ITEMS_LINK
from fcsd.report.publish.card import write_card
from fcsd.report.publish.facts import facts_of_run
from fcsd.report.publish.places import public_text, without_places


def write_publication(
    recipe: Recipe, original: Path | None, model: Path, report_folder: Path, folder: Path
) -> None:
    """Assemble the folder from the distilled model and the report; weights are hard-linked where the disk allows.

    original: folder of the original checkpoint, whose licence is inherited.
    """
    report = read_json(report_folder / "report.json")
    with new_folder(folder, "report.json", "publication") as new:
        for file in sorted(model.iterdir()):
            place(file, new / file.name)
        for file in sorted(report_folder.iterdir()):
            if file.suffix == ".json":
                write_text(new / file.name, public_text(file.name, file.read_text(encoding="utf-8")))
            elif file.suffix == ".png":
                shutil.copyfile(file, new / file.name)
        # The page of all answers holds the benchmarks' questions, which are not to spread: it stays here.
        text = (report_folder / "report.md").read_text(encoding="utf-8")
        write_text(new / "report.md", without_places(text.replace(ITEMS_LINK, "")))
        for file in sorted(original.glob("LICENSE*")) if original is not None else ():
            if file.is_file() and not (new / file.name).exists():
                shutil.copyfile(file, new / file.name)
        write_card(facts_of_run(recipe, report, read_json(model / "config.json"), original, new), new)


def place(file: Path, to: Path) -> None:
    """Link weights where the disk allows; copy what a reader may edit there."""
    (link_or_copy if file.suffix == ".safetensors" else shutil.copyfile)(file, to)
