"""The least that a Python model can do between conch's engine and the wire: what Triton costs by itself.

A prompt is encoded, every token becomes a response, and that is all: no text, no stop strings, no metrics, no
errors, no cancellation. What a served conch costs beyond this is what its host costs.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

from conch.api.config import load_config
from conch.api.errors import RequestError
from conch.api.sampling import SamplingParams
from conch.engine.protocol import AddRequest, StepNews
from conch.host import tensors
from conch.host.engine_client import EngineClient
from conch.host.engine_process import engine_command
from conch.host.pb import InferenceRequest, ResponseSender
from conch.host.session import Session
from conch.host.settings import settings_from_environment
from conch.host.shares import EngineShare

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LIKE_ANY_TOKEN = np.array([b" word"], dtype=np.object_)
PROMPT, ONE = np.array([64], dtype=np.uint32), np.array([1], dtype=np.uint32)
REASON, GOING_ON = np.array([b"length"], dtype=np.object_), np.array([b""], dtype=np.object_)


class TritonPythonModel:
    """One engine, behind as little as can be."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: tensors.ModelConfig) -> tensors.ModelConfig:
        """Take the inputs and outputs of a conch model."""
        tensors.complete(auto_complete_model_config)
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine."""
        path = Path(args["model_repository"], args["model_version"], "model.json").resolve()
        config = load_config(path, settings_from_environment())
        self._senders: dict[int, ResponseSender] = {}
        self._numbers = itertools.count(1)
        self._client = EngineClient(EngineShare(config), self, engine_command(), itertools.count())
        self._client.start()
        ready = self._client.wait()
        self._tokenizer = Tokenizer.from_file(str(Path(ready.model_folder, "tokenizer.json")))

    def execute(self, requests: list[InferenceRequest]) -> None:
        """Send prompts to the engine."""
        for request in requests:
            given = {tensor.name(): tensor.as_numpy()[0] for tensor in request.inputs()}
            number = next(self._numbers)
            self._senders[number] = request.get_response_sender()
            ids = tuple(self._tokenizer.encode(given["text_input"].decode()).ids)
            params = SamplingParams(**json.loads(given["sampling_parameters"]))
            self._client.session.send(AddRequest(request_id=number, token_ids=ids, params=params))

    def news(self, news: StepNews) -> None:
        """Make a response of every token."""
        for output in news.outputs:
            ended = output.finish_reason is not None
            sender = self._senders.pop(output.request_id) if ended else self._senders[output.request_id]
            response = pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor("text_output", LIKE_ANY_TOKEN),
                    pb_utils.Tensor("finish_reason", REASON if ended else GOING_ON),
                    pb_utils.Tensor("num_input_tokens", PROMPT),
                    pb_utils.Tensor("num_output_tokens", ONE * len(output.token_ids)),
                ]
            )
            sender.send(response, flags=FINAL if ended else 0)

    def engine_up(self, session: Session) -> None:
        """Nothing to do."""

    def engine_down(self, session: Session, error: RequestError) -> None:
        """Nothing to do."""

    def engine_given_up(self, reason: str) -> None:
        """Nothing to do."""

    def finalize(self) -> None:
        """Stop the engine."""
        self._client.close()
