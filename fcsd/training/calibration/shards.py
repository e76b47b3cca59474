"""Hold a checkpoint's model with the weights of one decoder layer in memory at a time,
and write changed tensors into a copy of its files.

Transformers' own conversions map names and shapes of the files to those of the model
and back, as in `from_pretrained` and `save_pretrained`. Values are float32 in memory. A
changed tensor overwrites the old bytes in the copy: its dtype and shape stay the same,
and so does the file's header.

Not covered: quantised checkpoints, whose tensors the quantisation method names.
"""

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.base.files import safetensors_header
from fcsd.data.batches import Batch
from fcsd.model.connectivity import rewire
from fcsd.model.connectivity.checkpoint import Checkpoint
from fcsd.model.connectivity.load import load_folder
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.dtypes import PLAIN
from fcsd.model.families.structure import output_head
from fcsd.model.saved_dtypes import names_in_files
from fcsd.training.calibration.roles import Place
from fcsd.training.calibration.state import Models
from fcsd.training.calibration.steps import Steps, Stream


class Layerwise(Models):
    """Teacher and student that share the weights of a checkpoint, loaded one layer at a
    time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        connectivity: Connectivity,
        device: torch.device,
        **options: Any,
    ) -> None:
        assert checkpoint.family is not None
        self.checkpoint = checkpoint
        self.model: Any = load_folder(
            checkpoint.folder, connectivity=connectivity, weights=False, **options
        ).float()
        steps = Steps(self.model, checkpoint.family)
        super().__init__(steps, steps, device)
        names = {module: name for name, module in self.model.named_modules()}
        self.stack = next(
            name for module, name in names.items() if module is self.student.layers
        )
        self._head = names[output_head(self.model)]
        # The rest of the model (embeddings, final norm) is small enough to stay loaded;
        # the head is loaded by `head` when it is needed.
        outside = (
            name
            for name in self.model.state_dict()
            if not name.startswith((f"{self.stack}.", f"{self._head}."))
        )
        self.files = {
            name: file
            for file in checkpoint.weight_files
            for name in safetensors_header(checkpoint.folder / file)[0]
        }
        self._dtypes = {
            name: PLAIN[checkpoint.dtypes[in_file]]
            for name, in_files in names_in_files(self.model).items()
            for in_file in (*in_files, name)
            if checkpoint.dtypes.get(in_file) in PLAIN
        }
        self._load(outside)
        in_layers = {*self.student.layers.modules()}
        self._fill_buffers(
            module for module in self.model.modules() if module not in in_layers
        )

    def teacher_step(self, index: int, batch: Batch, stream: Stream) -> Stream:
        with rewire.regular(self.model):
            return super().teacher_step(index, batch, stream)

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[None]:
        layer: nn.Module = self.student.layers[index]
        prefix = f"{self.stack}.{index}"
        self._load(f"{prefix}.{name}" for name in layer.state_dict())
        self._fill_buffers(layer.modules())
        try:
            yield
        finally:
            layer.to("meta")

    def fold(
        self,
        index: int,
        weights: Sequence[Place],
        matrix: Tensor,
        use: Any,
        expert: int | None = None,
    ) -> None:
        """Fold a map, and round the weights to the dtypes of their files."""
        super().fold(index, weights, matrix, use, expert)
        # Later layers are solved on the weights that will be read from the files.
        for name, _ in weights:
            weight = self.student.layers[index].get_parameter(name).data
            weight = weight if expert is None else weight[expert]
            weight.copy_(weight.to(self._dtypes[f"{self.stack}.{index}.{name}"]))

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of the loaded layer by their names in the files."""
        state = self.student.layers[index].state_dict()
        return self._in_files(
            {f"{self.stack}.{index}.{name}": value for name, value in state.items()}
        )

    def files_of(self, layers: Iterable[int]) -> set[str]:
        """Name the weight files that hold tensors of these layers."""
        return {self.files[name] for k in layers for name in self.layer_tensors(k)}

    def head(self) -> nn.Linear:
        """Load the output head, which no layer needs, and return it."""
        names = [
            f"{self._head}.{name}" for name in output_head(self.model).state_dict()
        ]
        state = self.model.state_dict()
        if (
            self._in_files({name: state[name] for name in names}).keys()
            <= self.files.keys()
        ):
            self._load(names)
        # Otherwise the files hold the weight once, as the embeddings.
        else:
            self.model.tie_weights()
        return output_head(self.model)

    def _in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert tensors to the names and shapes of the checkpoint's files, which may be
        those in memory.
        """
        from transformers.core_model_loading import revert_weight_conversion

        file_tensors = revert_weight_conversion(self.model, tensors)
        return file_tensors if file_tensors.keys() <= self.files.keys() else tensors

    def _load(self, names: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig
        from transformers.utils import logging

        state = self.model.state_dict()
        loaded = list(names)
        with contextlib.ExitStack() as opened:

            @functools.cache
            def file(name: str) -> Any:
                path = self.checkpoint.folder / name
                return opened.enter_context(safe_open(path, framework="pt"))

            in_files = self._in_files({name: state[name] for name in loaded})
            slices = {name: file(self.files[name]).get_slice(name) for name in in_files}
            settings = LoadStateDictConfig(
                device_map={"": self.device},
                # The dtype to compute in; `fold` rounds to the files' dtype.
                dtype=torch.float32,
                weight_mapping=cast(Any, get_model_conversion_mapping(self.model)),
            )
            logging.disable_progress_bar()
            convert_and_load_state_dict_in_model(self.model, slices, settings)
        # transformers records only this load's conversions, and would use them to
        # convert all others back.
        self.model._weight_conversions = None
        for name in loaded:
            if self.model.get_parameter_or_buffer(name).is_meta:
                raise AssertionError(
                    f"{self.checkpoint.folder}: '{name}' was not loaded"
                )

    @torch.no_grad()
    def _fill_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Compute the buffers that no file holds by the model's own initialisation, as
        `from_pretrained` does.
        """
        # Of the models that contain a module the innermost one comes last.
        bodies: dict[nn.Module, Any] = {
            module: body
            for body in self.model.modules()
            if isinstance(body, PreTrainedModel)
            for module in body.modules()
        }
        for module in modules:
            meta = {
                name: buffer
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.is_meta
            }
            for name, buffer in meta.items():
                module._buffers[name] = torch.empty_like(buffer, device=self.device)
            if meta:
                bodies[module]._init_weights(module)


def own_copies(folder: Path, source: Path, files: Iterable[str]) -> None:
    """Replace weight files in `folder` that are links to the source's by copies."""
    for name in files:
        # One that is gone is damage, which `damage_of_copies` tells.
        if _is_link(folder / name, source / name):
            # The copy is renamed into place, so that a kill never leaves a part of it.
            temporary = folder / f".{name}.tmp"
            shutil.copyfile(source / name, temporary)
            os.replace(temporary, folder / name)


def _is_link(file: Path, target: Path) -> bool:
    return file.is_file() and os.path.samefile(file, target)


def write_changed(
    folder: Path, files: dict[str, str], tensors: dict[str, Tensor], source: Path
) -> dict[str, str]:
    """Overwrite the tensors in `folder` that differ from the source's; return their
    names with the SHA-256 of the new bytes.

    files: tensor name -> file.
    """
    changed: dict[str, str] = {}
    for file in sorted({files[name] for name in tensors}):
        header, begin = safetensors_header(folder / file)
        with (
            safe_open(source / file, framework="pt") as old,
            (folder / file).open("r+b") as stream,
        ):
            for name in (name for name in tensors if files[name] == file):
                value = old.get_tensor(name)
                new = tensors[name].to("cpu", value.dtype).reshape(value.shape)
                if torch.equal(new, value):
                    continue
                start, end = header[name]["data_offsets"]
                data = new.contiguous().view(torch.uint8).numpy().reshape(-1)
                assert len(data) == end - start
                stream.seek(begin + start)
                stream.write(data.tobytes())
                changed[name] = hashlib.sha256(data.data).hexdigest()
            # On disk before the caller records the layer as written.
            stream.flush()
            os.fsync(stream.fileno())
    return changed


def damage_of_copies(
    folder: Path, source: Path, files: Iterable[str], written: Mapping[str, str]
) -> str | None:
    """Return the name of a copy in `folder` that has changed since it was written, or
    None.

    A tensor that is not in `written` (name -> SHA-256) gets the source's bytes again if
    it differs: an interrupted layer is solved from these.
    """
    for file in sorted({*files}):
        if _is_link(folder / file, source / file):
            continue
        if not (folder / file).is_file():
            return f"{file}, which is gone"
        try:
            header, begin = safetensors_header(folder / file)
            source_header, source_begin = safetensors_header(source / file)
        except (OSError, ValueError):
            header, source_header, begin, source_begin = {}, {}, 0, 0
        # Only bytes of tensors may differ: neither the header nor the size changes.
        same_size = (folder / file).stat().st_size == (source / file).stat().st_size
        if (
            not source_header
            or header != source_header
            or begin != source_begin
            or not same_size
        ):
            return file
        copy = np.memmap(folder / file, np.uint8, "r+")
        original = np.memmap(source / file, np.uint8, "r")
        for name, facts in header.items():
            span = slice(*(begin + offset for offset in facts["data_offsets"]))
            if name in written:
                if hashlib.sha256(copy[span].data).hexdigest() != written[name]:
                    return f"{file}, tensor {name}"
            elif not np.array_equal(copy[span], original[span]):
                copy[span] = original[span]
        copy.flush()
    return None
