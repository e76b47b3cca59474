"""Errors, records, files, manifests and text: what loads no torch."""

from fcsd.base.artifact import Stage, read_manifest, versions
from fcsd.base.errors import UserError
from fcsd.base.files import (
    check_file_place,
    check_regular,
    file_sha256,
    new_folder,
    read_json,
    read_text,
    safetensors_header,
    write_json,
    write_text,
    writing,
)
from fcsd.base.fingerprints import arrays_fingerprint
from fcsd.base.strict import Strict, did_you_mean, like, option, read_yaml, validate
from fcsd.base.temporary import file_beside
from fcsd.base.text import markdown, nats, progress_bar
from fcsd.data.config import ModelStudy
from fcsd.model.config import ModelConfig

__all__ = [
    "ModelConfig",
    "ModelStudy",
    "Stage",
    "Strict",
    "UserError",
    "arrays_fingerprint",
    "check_file_place",
    "check_regular",
    "did_you_mean",
    "file_beside",
    "file_sha256",
    "like",
    "markdown",
    "nats",
    "new_folder",
    "option",
    "progress_bar",
    "read_json",
    "read_manifest",
    "read_text",
    "read_yaml",
    "safetensors_header",
    "validate",
    "versions",
    "write_json",
    "write_text",
    "writing",
]
