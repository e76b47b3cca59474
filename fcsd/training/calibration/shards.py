"""A checkpoint's model with the weights of one decoder layer in memory at a time, and a
copy of its files to change.

Names and shapes of files and model are taken to each other by transformers' own
conversions, as `from_pretrained` and `save_pretrained` do it; values are float32 in
memory. A tensor that has changed is written over the old bytes of the copy: its dtype
and shape stay, and so does the file's header.

Not covered: quantised checkpoints, whose tensors the quantisation method names.
"""

import contextlib
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

from fcsd.base.files import safetensors_header
from fcsd.data.batches import Batch
from fcsd.model.connectivity import rewire
from fcsd.model.connectivity.checkpoint import Checkpoint
from fcsd.model.connectivity.load import config_and_class
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families.structure import output_head
from fcsd.training.calibration.roles import Place
from fcsd.training.calibration.state import Models
from fcsd.training.calibration.steps import Steps, Stream


class Layerwise(Models):
    """Teacher and student that share the weights of a checkpoint: one layer of them is
    loaded at a time.
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
        config, cls = config_and_class(checkpoint, connectivity)
        with torch.device("meta"):
            self.model = cls._from_config(config, dtype=torch.float32, **options).eval()
        steps = Steps(self.model, checkpoint.family)
        super().__init__(steps, steps, device)
        names = {module: name for name, module in self.model.named_modules()}
        self.stack = next(
            name for module, name in names.items() if module is self.student.layers
        )
        head = f"{names[output_head(self.model)]}."
        outside = (
            name
            for name in self.model.state_dict()
            if not name.startswith((f"{self.stack}.", head))
        )
        self.files = {
            name: file
            for file in checkpoint.weight_files
            for name in safetensors_header(checkpoint.folder / file)[0]
        }
        self._dtypes: dict[str, torch.dtype] = {}
        self._load(outside)
        self._fill_buffers(self.model, self.stack)

    def teacher_step(self, index: int, batch: Batch, stream: Stream) -> Stream:
        with rewire.regular(self.model):
            return super().teacher_step(index, batch, stream)

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[None]:
        layer: nn.Module = self.student.layers[index]
        prefix = f"{self.stack}.{index}"
        self._load(f"{prefix}.{name}" for name in layer.state_dict())
        self._fill_buffers(layer)
        try:
            yield
        finally:
            layer.to("meta")

    def fold(
        self,
        index: int,
        places: Sequence[Place],
        matrix: Tensor,
        use: Any,
        expert: int | None = None,
    ) -> None:
        """Fold a map, and round the weights to what their files hold."""
        super().fold(index, places, matrix, use, expert)
        for name, _ in places:
            weight = self.student.layers[index].get_parameter(name).data
            weight = weight if expert is None else weight[expert]
            weight.copy_(weight.to(self._dtypes[f"{self.stack}.{index}.{name}"]))

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of the loaded layer by their names in the files."""
        own = self.student.layers[index].state_dict()
        return self._in_files(
            {f"{self.stack}.{index}.{name}": value for name, value in own.items()}
        )

    def files_of(self, layers: Iterable[int]) -> set[str]:
        """Name the weight files that hold tensors of these layers."""
        return {self.files[name] for k in layers for name in self.layer_tensors(k)}

    def head(self) -> nn.Linear:
        """Load the output head, which no layer needs, and return it."""
        head = output_head(self.model)
        name = next(
            name for name, module in self.model.named_modules() if module is head
        )
        names = [f"{name}.{parameter}" for parameter in head.state_dict()]
        state = self.model.state_dict()
        if (
            self._in_files({name: state[name] for name in names}).keys()
            <= self.files.keys()
        ):
            self._load(names)
        else:  # the files hold it once, as the embeddings
            self.model.tie_weights()
        return output_head(self.model)

    def _in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take tensors to the names and shapes of the checkpoint's files, which may be
        those of memory.
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
        owners = {
            name: self.model.get_submodule(name.rpartition(".")[0]) for name in names
        }
        wanted = [
            name
            for name, owner in owners.items()
            if not getattr(owner, "_is_tied", False)
        ]
        with contextlib.ExitStack() as opened:
            slices: dict[str, Any] = {}
            by_file: dict[str, Any] = {}
            for name in self._in_files({name: state[name] for name in wanted}):
                file = self.files[name]
                if file not in by_file:
                    by_file[file] = opened.enter_context(
                        safe_open(self.checkpoint.folder / file, framework="pt")
                    )
                slices[name] = by_file[file].get_slice(name)
            self._note_dtypes(wanted, slices)
            settings = LoadStateDictConfig(
                device_map={"": self.device},
                dtype=torch.float32,
                weight_mapping=cast(Any, get_model_conversion_mapping(self.model)),
            )
            logging.disable_progress_bar()
            convert_and_load_state_dict_in_model(self.model, slices, settings)
        self.model._weight_conversions = None
        for name in wanted:
            if self.model.get_parameter_or_buffer(name).is_meta:
                raise AssertionError(
                    f"{self.checkpoint.folder}: '{name}' was not loaded"
                )

    def _note_dtypes(self, names: Sequence[str], slices: dict[str, Any]) -> None:
        dtypes = {
            name: value[:0].dtype for name, value in slices.items() if value.get_shape()
        }
        kinds = {dtype for dtype in dtypes.values() if dtype.is_floating_point}
        state = self.model.state_dict() if len(kinds) > 1 else {}
        for name in names:
            # Conversions may need several weights at once, so they are asked only if it
            # matters.
            in_files = self._in_files({name: state[name]}) if state else {}
            self._dtypes[name] = next(
                (dtypes[one] for one in in_files if one in dtypes), next(iter(kinds))
            )

    @torch.no_grad()
    def _fill_buffers(self, root: nn.Module, leave_out: str | None = None) -> None:
        """Compute the buffers that no file holds, as `from_pretrained` does: by the
        model's own initialisation.
        """
        excluded = (
            set(self.model.get_submodule(leave_out).modules()) if leave_out else set()
        )
        for module in root.modules():
            meta = {
                name: buffer
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.is_meta
            }
            if module in excluded or not meta:
                continue
            for name, buffer in meta.items():
                module._buffers[name] = torch.empty_like(buffer, device=self.device)
            self._body_of(module)._init_weights(module)

    def _body_of(self, module: nn.Module) -> Any:
        """Return the innermost model of transformers that holds a module."""
        from transformers import PreTrainedModel

        body: Any = self.model
        for candidate in self.model.modules():
            if isinstance(candidate, PreTrainedModel) and any(
                m is module for m in candidate.modules()
            ):
                body = candidate
        return body


def own_copies(folder: Path, source: Path, files: Iterable[str]) -> None:
    """Give `folder` copies of its own of weight files that are links to the source's;
    what is one already stays.
    """
    for name in files:
        if os.path.samefile(folder / name, source / name):
            temporary = folder / f".{name}.tmp"
            shutil.copyfile(source / name, temporary)
            os.replace(temporary, folder / name)


def write_changed(
    folder: Path, files: dict[str, str], tensors: dict[str, Tensor], source: Path
) -> dict[str, str]:
    """Write the tensors that differ from the source's over their bytes in `folder`;
    return their names with the SHA-256 of those bytes.

    files: tensor -> file.
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
            stream.flush()
            os.fsync(stream.fileno())
    return changed


def damage_of_copies(
    folder: Path, source: Path, files: Iterable[str], written: Mapping[str, str]
) -> str | None:
    """Compare the copies in `folder` with what was written; tell which is damaged, or
    None.

    A tensor that is none of those `written` (name -> SHA-256), gets the source's bytes
    again where it has others: a layer that was cut off is solved from them.
    """
    for file in sorted({*files}):
        if os.path.samefile(folder / file, source / file):
            continue
        try:
            header, begin = safetensors_header(folder / file)
            known, same = safetensors_header(source / file)
        except (OSError, ValueError):
            header, known, begin, same = {}, {}, 0, 0
        is_whole = (folder / file).stat().st_size == (source / file).stat().st_size
        if not known or header != known or begin != same or not is_whole:
            return file
        now = np.memmap(folder / file, np.uint8, "r+")
        before = np.memmap(source / file, np.uint8, "r")
        for name, facts in header.items():
            place = slice(*(begin + offset for offset in facts["data_offsets"]))
            if name in written:
                if hashlib.sha256(now[place].data).hexdigest() != written[name]:
                    return f"{file}, tensor {name}"
            elif not np.array_equal(now[place], before[place]):
                now[place] = before[place]
        now.flush()
    return None


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 over names, kinds, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"\0{name} {value.dtype} {tuple(value.shape)}\0".encode())
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().data if data.numel() else b"")
    return digest.hexdigest()
