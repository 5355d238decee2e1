"""One served model inside Triton's stub: all the parts put together, without Triton itself."""

from __future__ import annotations

import gc
import itertools
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from conch.api.config import EngineConfig
from conch.api.errors import ErrorCode, RequestError
from conch.engine.protocol import AddRequest, EngineReady, StepNews
from conch.host.cancellation import CancellationWatcher
from conch.host.chat_template import load_chat_template
from conch.host.choice import ChoiceFactory
from conch.host.codec import TextCodec
from conch.host.engine_client import EngineClient, Session, unavailable
from conch.host.inputs import Inputs, read_inputs
from conch.host.live import LiveRequest
from conch.host.metrics import Accounts, MetricsFlusher, open_metrics_page
from conch.host.pb import InferenceRequest, PbUtils
from conch.host.prompt import Prompt, PromptReader
from conch.host.responder import Responder
from conch.host.responses import ResponseWriter, send_error
from conch.host.sender import GuardedSender
from conch.host.surrender import surrender

_JOIN_WITHIN_S = 2.0


class Backend:
    """Admits requests, and owns the threads that answer them.

    Parameters
    ----------
    pb_utils
        Triton's module.
    config
        What the engine is told.
    labels
        Of all metrics; must differ between instances of a model.
    command
        How to start the engine.
    """

    def __init__(
        self, pb_utils: PbUtils, config: EngineConfig, labels: Mapping[str, str], command: Sequence[str]
    ) -> None:
        self._pb = pb_utils
        self._model = labels["model"]
        self._accounts = Accounts()
        self._flusher = MetricsFlusher(self._accounts, open_metrics_page(pb_utils, labels))
        self._responder = Responder(pb_utils, self._accounts, config.stream_interval)
        self._watcher = CancellationWatcher(self._responder.live, self._responder.client_gone)
        self._client = EngineClient(config, self, command)
        self._ids = itertools.count(1)
        self._refusal: str | None = None
        self._codec: TextCodec
        self._reader: PromptReader

    def start(self) -> EngineReady:
        """Start the engine and read the tokenizer.

        Raises
        ------
        ConchError
            The engine did not start, or the checkpoint has no tokenizer that can be read.
        """
        try:
            ready = self._client.start()
            folder = Path(ready.model_folder)
            self._codec = TextCodec.load(folder)
            self._reader = PromptReader(self._codec, load_chat_template(folder), ready)
            self._responder.use(ResponseWriter(self._pb, self._codec))
        except Exception:
            self.close()
            raise
        return ready

    def execute(self, requests: Sequence[InferenceRequest]) -> None:
        """Admit requests; each is answered through its own sender, sooner or later."""
        for request in requests:
            self._admit(request)

    def drain(self) -> None:
        """End all requests now and refuse further ones: the server is shutting down."""
        self._refusal = "the server is shutting down"
        self._responder.end_all(unavailable(self._refusal))

    def close(self) -> None:
        """End all requests, the engine and the threads, within a bounded time."""
        self._refusal = "the model is being unloaded"
        self._client.close()
        self._responder.close(unavailable(self._refusal), _JOIN_WITHIN_S)
        self._watcher.close(_JOIN_WITHIN_S)
        self._flusher.close(_JOIN_WITHIN_S)
        gc.collect()  # nothing of Triton's may outlive this

    # -- the engine's events ------------------------------------------------------------------------

    def news(self, news: StepNews) -> None:
        """Hand on what one step brought."""
        self._responder.news(news)

    def engine_up(self, session: Session) -> None:
        """Hand on that the engine serves."""
        self._responder.engine_up(session)

    def engine_down(self, error: RequestError) -> None:
        """End all requests."""
        self._responder.engine_down(error)

    def engine_given_up(self, reason: str) -> None:
        """Refuse requests at once, and see that readiness is the truth."""
        if self._client.session is None:
            self._responder.engine_given_up()
            surrender(self._pb, self._model, reason)

    # -- admission ----------------------------------------------------------------------------------

    def _admit(self, request: InferenceRequest) -> None:
        sender = GuardedSender(request.get_response_sender())
        try:
            if self._refusal is not None:
                raise unavailable(self._refusal)  # a kept exception would keep the request
            inputs = read_inputs(request)
            prompt = self._reader.read(inputs)
        except RequestError as error:
            self._refuse(sender, error)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._refuse(sender, RequestError(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL))
        else:
            self._hand_over(sender, inputs, prompt)

    def _refuse(self, sender: GuardedSender, error: RequestError) -> None:
        self._accounts.failed(error.code)
        try:
            send_error(self._pb, sender, error)
        except Exception:
            traceback.print_exc(file=sys.stderr)

    def _hand_over(self, sender: GuardedSender, inputs: Inputs, prompt: Prompt) -> None:
        factory = ChoiceFactory(inputs.params, self._codec)
        live = LiveRequest(
            id=next(self._ids),
            sender=sender,
            session=self._client.session,
            stream=inputs.stream,
            wants=inputs.wants,
            num_prompt=len(prompt.token_ids),
            echo=prompt.echo,
            with_logprobs=inputs.params.logprobs is not None,
            choices=tuple(factory.make() for _ in range(inputs.params.n)),
        )
        message = AddRequest(
            request_id=live.id,
            token_ids=prompt.token_ids,
            params=inputs.engine_params,
            priority=inputs.priority,
            cache_salt=inputs.cache_salt,
            timeout_s=inputs.timeout_s,
            tenant=inputs.tenant,
            ttft_target_s=inputs.ttft_target_s,
            tpot_target_s=inputs.tpot_target_s,
        )
        session = live.session
        if session is None:
            self._responder.hold(live, message)
            return
        self._responder.admit(live)
        try:
            session.send(message)
        except RequestError as error:
            self._responder.fail(live.id, error)
