"""Families whose layer is not the plain pre-norm layer, and what `rewire` has to know about each."""

from fcsd.families.family import Family

ROWS: tuple[Family, ...] = ()
