"""The models that an evaluation evaluates: loaded from a folder, or behind a server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.evaluation.backend import Served
from fcsd.evaluation.config import ServerConfig
from fcsd.evaluation.runner import Dropping
from fcsd.model.config import ModelConfig
from fcsd.model.load import ModelFolder, load_tokenizer
from fcsd.parallel.launch import Launch
from fcsd.parallel.place import load_for_evaluation


@dataclass(frozen=True)
class EvaluatedFolder:
    """A checkpoint as the model of `fcsd.evaluation.stage.Evaluation`.

    device_map: for one process, as in transformers.
    """

    checkpoint: ModelFolder
    device_map: Any = None

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def dropping(self) -> Dropping:
        from fcsd.model.families.capacity import dropping

        return dropping

    def fingerprints(self, name: str) -> dict[str, Any]:
        return self.checkpoint.fingerprints(name)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(
            self.folder, trust_remote_code=self.config.trust_remote_code
        )

    def load(self, launch: Launch) -> PreTrainedModel:
        return load_for_evaluation(self.checkpoint, launch, device_map=self.device_map)

    def served(
        self, server: ServerConfig, tokenizer: PreTrainedTokenizerBase
    ) -> Served:
        from fcsd.evaluation.served import ServedBackend
        from fcsd.evaluation.server import Server

        client = Server(server.url, concurrency=server.concurrency)
        client.look(self.config.path)
        return ServedBackend(client, self.checkpoint, tokenizer)
