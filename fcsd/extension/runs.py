"""Recipes, their runs, and the rows that these train on."""

from fcsd.pipeline.context import Run
from fcsd.pipeline.rows import data_inputs, training_rows
from fcsd.recipe.layout import RunLayout
from fcsd.recipe.load_recipe import load_recipe
from fcsd.training.calibration.checkpoint import take_rows

__all__ = [
    "Run",
    "RunLayout",
    "data_inputs",
    "load_recipe",
    "take_rows",
    "training_rows",
]
