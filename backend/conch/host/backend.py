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
from conch.host.events import EndAll, EngineDown, EngineGivenUp, EngineUp
from conch.host.inputs import Inputs, read_inputs
from conch.host.instance import Instance
from conch.host.live import LiveRequest
from conch.host.metrics import Accounts
from conch.host.metrics_page import MetricsFlusher, open_metrics_page, replica_names
from conch.host.pb import InferenceRequest, PbUtils
from conch.host.prompt import Prompt, PromptReader
from conch.host.replays import make_replays
from conch.host.replicas import Replicas, make_router
from conch.host.responder import Responder
from conch.host.responses import ResponseWriter, send_error
from conch.host.sender import GuardedSender
from conch.host.session import Session, unavailable
from conch.host.shares import engine_shares
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
        How to start an engine.
    instance
        Which of the instances that Triton runs of the model this is.
    """

    def __init__(
        self,
        pb_utils: PbUtils,
        config: EngineConfig,
        labels: Mapping[str, str],
        command: Sequence[str],
        instance: Instance | None = None,
    ) -> None:
        self._pb = pb_utils
        self._model = labels["model"]
        shares = engine_shares(config, instance or Instance())
        router = make_router(config)
        self._accounts = Accounts(len(shares))
        self._replicas = Replicas(shares, router, self._accounts, self, command)
        page = open_metrics_page(pb_utils, labels, replica_names(labels["replica"], len(shares)))
        self._flusher = MetricsFlusher(self._accounts, page)
        self._responder = Responder(
            pb_utils, self._accounts, config.stream_interval, self._replicas.place, make_replays(config)
        )
        self._watcher = CancellationWatcher(self._responder.live, self._responder.client_gone)
        self._ids = itertools.count(1)
        self._refusal: str | None = None
        self._codec: TextCodec
        self._reader: PromptReader

    def start(self) -> EngineReady:
        """Start the engines and read the tokenizer.

        Raises
        ------
        ConchError
            An engine did not start, or the checkpoint has no tokenizer that can be read.
        """
        try:
            ready = self._replicas.start()
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
        self._responder.tell(EndAll(unavailable(self._refusal)))

    def close(self) -> None:
        """End all requests, the engines and the threads, within a bounded time."""
        self._refusal = "the model is being unloaded"
        self._replicas.close()
        self._responder.close(unavailable(self._refusal), _JOIN_WITHIN_S)
        self._watcher.close(_JOIN_WITHIN_S)
        self._flusher.close(_JOIN_WITHIN_S)
        gc.collect()  # nothing of Triton's may outlive this

    # -- the engines' events ------------------------------------------------------------------------

    def news(self, news: StepNews) -> None:
        """Hand on what one step brought."""
        self._responder.news(news)

    def engine_up(self, session: Session) -> None:
        """Hand on that an engine serves."""
        self._responder.tell(EngineUp(session))

    def engine_down(self, session: Session, error: RequestError) -> None:
        """End or replay the engine's requests."""
        self._responder.tell(EngineDown(session, error))

    def engine_given_up(self, reason: str) -> None:
        """Where no other serves, refuse requests at once, and see that readiness is the truth."""
        if self._replicas.are_all_down:
            self._responder.tell(EngineGivenUp())
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
        message = AddRequest(
            request_id=next(self._ids),
            token_ids=prompt.token_ids,
            params=inputs.engine_params,
            priority=inputs.priority,
            cache_salt=inputs.cache_salt,
            timeout_s=inputs.timeout_s,
            tenant=inputs.tenant,
            ttft_target_s=inputs.ttft_target_s,
            tpot_target_s=inputs.tpot_target_s,
        )
        factory = ChoiceFactory(inputs.params, self._codec)
        try:
            session = self._replicas.place(message)
        except RequestError as error:
            self._refuse(sender, error)
            return
        live = LiveRequest(
            id=message.request_id,
            sender=sender,
            session=session,
            stream=inputs.stream,
            wants=inputs.wants,
            num_prompt=len(prompt.token_ids),
            echo=prompt.echo,
            with_logprobs=inputs.params.logprobs is not None,
            factory=factory,
            choices=tuple(factory.make() for _ in range(inputs.params.n)),
        )
        if session is None:
            self._responder.hold(live, message)
            return
        self._responder.admit(live, message)
        try:
            session.send(message)
        except RequestError as error:
            self._responder.fail(live.id, error)
