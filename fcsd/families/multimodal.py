"""Multimodal families: the text stack inside a wrapper is rewired, the rest is left alone."""

from fcsd.families.family import Family

ROWS: tuple[Family, ...] = ()
