"""Calibrate selections of a layer study, one after another, in the one model that is rewired in place.

    calibrations = Calibrations(model, rows, ranks)     # while the model is regular
    convert_model(model, Connectivity([3, 4]))
    with calibrations.folded():
        ...                                             # its weights are those that `fcsd calibrate` gives
    ...                                                 # and the original's again

The original is a second set of modules around the same parameters; a rewired layer gets copies of its own while it is
calibrated. So beside the model only the rewired layers are held twice.

Not covered: weights that are sharded over ranks.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from fcsd.model.connectivity.convert import farskip_layers
from fcsd.model.connectivity.rewire import decoder_layers
from fcsd.model.connectivity.spec import CALIBRATED
from fcsd.model.families import family_of
from fcsd.parallel.ranks import Ranks
from fcsd.training.calibration.model import calibrate_model


class Calibrations:
    """What every calibration of one model needs. rows: the text, as of `calibrate_model`, the same on all ranks."""

    def __init__(self, model: Any, rows: Sequence[Any], ranks: Ranks) -> None:
        self.model, self.rows, self.ranks = model, rows, ranks
        self.original = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})

    @contextlib.contextmanager
    def folded(self) -> Iterator[None]:
        """Have the rewired layers calibrated; a model without any is left as it is. All ranks call this.

        Raises:
            UserError: as `calibrate_model`.
        """
        layers, indices = decoder_layers(self.model, family_of(self.model.config)), farskip_layers(self.model)
        shared = [
            (module, name, parameter)
            for index in indices
            for module in layers[index].modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        try:
            for module, name, parameter in shared:
                own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                module.register_parameter(name, own)
            if indices:
                calibrate_model(self.model, self.original, self.rows, ranks=self.ranks, progress=False)
            yield
        finally:
            for module, name, parameter in shared:
                module.register_parameter(name, parameter)
            vars(self.model.config).pop(CALIBRATED, None)
