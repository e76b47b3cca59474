"""Errors, records, files, manifests and text: what loads no torch."""

from fcsd.base.artifact import Stage, check_outputs, read_manifest, versions
from fcsd.base.errors import UserError
from fcsd.base.files import (
    check_file_place,
    check_regular,
    file_sha256,
    hold_folder,
    home,
    new_folder,
    read_json,
    read_text,
    release_folder,
    safetensors_header,
    write_json,
    write_text,
    writing,
)
from fcsd.base.fingerprints import arrays_fingerprint, read_sealed, write_sealed
from fcsd.base.strict import (
    Strict,
    did_you_mean,
    like,
    option,
    parse_yaml,
    read_yaml,
    validate,
)
from fcsd.base.temporary import file_beside, scratch_folder
from fcsd.base.terminal import show
from fcsd.base.text import markdown, nats, progress_bar
from fcsd.evaluation.study import ModelStudy
from fcsd.model.config import ModelConfig

__all__ = [
    "ModelConfig",
    "ModelStudy",
    "Stage",
    "Strict",
    "UserError",
    "arrays_fingerprint",
    "check_file_place",
    "check_outputs",
    "check_regular",
    "did_you_mean",
    "file_beside",
    "file_sha256",
    "hold_folder",
    "home",
    "like",
    "markdown",
    "nats",
    "new_folder",
    "option",
    "parse_yaml",
    "progress_bar",
    "read_json",
    "read_manifest",
    "read_sealed",
    "read_text",
    "read_yaml",
    "release_folder",
    "safetensors_header",
    "scratch_folder",
    "show",
    "validate",
    "versions",
    "write_json",
    "write_sealed",
    "write_text",
    "writing",
]
