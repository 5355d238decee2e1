"""The class that Triton's Python backend runs, and the only importer of `triton_python_backend_utils`."""

from __future__ import annotations

import json
from pathlib import Path

import triton_python_backend_utils as pb_utils

from conch.api.config import load_config
from conch.api.errors import ConfigError
from conch.host import tensors
from conch.host.backend import Backend
from conch.host.engine_process import engine_command
from conch.host.instance import instance_of
from conch.host.pb import InferenceRequest
from conch.host.settings import settings_from_environment
from conch.host.termination import TerminationWatch


class TritonPythonModel:
    """One instance of a conch model."""

    _backend: Backend
    _termination: TerminationWatch

    @staticmethod
    def auto_complete_config(auto_complete_model_config: tensors.ModelConfig) -> tensors.ModelConfig:
        """Add what config.pbtxt leaves out."""
        tensors.complete(auto_complete_model_config)
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine; what is raised is what Triton shows as the reason of the failure."""
        model_config = json.loads(args["model_config"])
        if not model_config.get("model_transaction_policy", {}).get("decoupled"):
            raise ConfigError(
                "the model must be decoupled; the server sees to that by itself, unless it was started with "
                "--disable-auto-complete-config"
            )
        path = Path(args["model_repository"], args["model_version"], "model.json").resolve()
        labels = {
            "model": args["model_name"],
            "version": args["model_version"],
            "replica": args["model_instance_name"],
        }
        instance = instance_of(model_config, args["model_instance_name"])
        config = load_config(path, settings_from_environment())
        self._backend = Backend(pb_utils, config, labels, engine_command(), instance)
        self._backend.start()
        self._termination = TerminationWatch(self._backend.drain)

    def execute(self, requests: list[InferenceRequest]) -> None:
        """Admit requests. Their responses come through their senders, from another thread."""
        self._backend.execute(requests)

    def finalize(self) -> None:
        """Stop within a bounded time."""
        self._termination.close()
        self._backend.close()
