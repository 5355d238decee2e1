"""The one thread that owns the live requests and turns the engine's news into responses."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable

from conch.api.errors import ErrorCode, RequestError
from conch.api.steps import FinishReason, RequestOutput
from conch.engine.protocol import AddRequest, CancelRequest, StepNews
from conch.host.departures import Departures
from conch.host.events import (
    Arrived,
    ClientGone,
    Close,
    EndAll,
    EngineDown,
    EngineGivenUp,
    EngineUp,
    Event,
    Failed,
    Held,
    HoldOver,
)
from conch.host.live import LiveRequest, LiveTable
from conch.host.metrics import Accounts
from conch.host.outage import Outage, with_time_left
from conch.host.pb import PbUtils
from conch.host.replays import Replays
from conch.host.responses import ResponseWriter, send_error
from conch.host.session import Session, unavailable

Place = Callable[[AddRequest], Session | None]
"""Chooses an engine for a request; None while none serves."""

_CLIENT_LEFT = RequestError("the request was cancelled", ErrorCode.CANCELLED)


class Responder:
    """Sends every response of every admitted request, the last one exactly once.

    Whatever happens to a request arrives here as an event, in order: its admission, the engine's news, the
    client's leaving, an engine's death, the model's unloading. When it falls behind it merges the news that
    has queued up into one response for each request. All but the first and the last response of a stream hold
    `stream_interval` tokens or more.
    """

    def __init__(
        self, pb_utils: PbUtils, accounts: Accounts, stream_interval: int, place: Place, replays: Replays
    ) -> None:
        self._pb = pb_utils
        self._accounts = accounts
        self._stream_interval = stream_interval
        self._writer: ResponseWriter | None = None
        self._live = LiveTable()
        self._place = place
        self._replays = replays
        self._departures = Departures()
        self._outage = Outage(lambda: self._events.put(HoldOver()))
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="conch-responder", daemon=True)
        self._thread.start()

    @property
    def live(self) -> LiveTable:
        """The live requests, for the cancellation watcher to read."""
        return self._live

    # -- events, from any thread --------------------------------------------------------------------

    def use(self, writer: ResponseWriter) -> None:
        """Set what builds responses, before the first request."""
        self._writer = writer

    def admit(self, request: LiveRequest, message: AddRequest) -> None:
        """Take a request in; must come before its engine hears of it."""
        self._events.put(Arrived(request, message))

    def fail(self, request_id: int, error: RequestError) -> None:
        """End a request with an error."""
        self._events.put(Failed(request_id, error))

    def hold(self, request: LiveRequest, message: AddRequest) -> None:
        """Take a request in while no engine serves."""
        self._events.put(Held(request, message))

    def client_gone(self, request_id: int) -> None:
        """End a request that nobody waits for any more."""
        self._events.put(ClientGone(request_id))

    def news(self, news: StepNews) -> None:
        """Take what one step of the engine brought."""
        self._events.put(news)

    def tell(self, event: Event) -> None:
        """Take what happened to the engines or to all requests."""
        self._events.put(event)

    def close(self, error: RequestError, timeout_s: float) -> None:
        """End all requests and the thread."""
        self._events.put(Close(error))
        self._thread.join(timeout_s)

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            try:
                is_open = self._handle_batch()
            except Exception:  # a fault of ours; the other requests go on
                traceback.print_exc(file=sys.stderr)

    def _handle_batch(self) -> bool:
        """Handle all events that are there, waiting for one; False when told to close.

        A function of its own, so that nothing here refers to a request while the thread sleeps.
        """
        touched: dict[int, None] = {}
        is_open = True
        event = self._events.get()
        while True:
            if not isinstance(event, (StepNews, Arrived)):
                self._respond_to(touched)  # what came before an ending is told before it
            is_open = self._handle(event, touched) and is_open
            if self._events.empty():
                break
            event = self._events.get()
        self._respond_to(touched)
        return is_open

    def _respond_to(self, touched: dict[int, None]) -> None:
        for request_id in touched:
            request = self._live.get(request_id)
            if request is not None:
                self._respond(request)
        touched.clear()

    def _handle(self, event: Event, touched: dict[int, None]) -> bool:
        match event:
            case StepNews():
                self._take_news(event, touched)
            case Arrived():
                self._live.add(event.request)
                self._replays.keep(event.message)
            case ClientGone():
                self._give_up(event.request_id, _CLIENT_LEFT)
            case Failed():
                self._end_with(event.request_id, event.error)
            case EndAll():
                for request_id in self._live.ids():
                    self._give_up(request_id, event.error)
            case Close():
                for request_id in self._live.ids():
                    self._end_with(request_id, event.error)
                self._outage.close()
                self._live.close()
                return False
            case _:
                self._handle_outage(event)
        return True

    def _handle_outage(self, event: Event) -> None:
        """Handle what concerns the engines' coming and going; nothing else comes here."""
        match event:
            case EngineUp():
                self._outage.engine_up(event.session)
            case EngineDown():
                self._outage.engine_down(event.session)
                self._departures.forget(event.session)
                self._end_or_replay(event)
            case EngineGivenUp():
                self._outage.lose_hope()
            case Held():
                self._live.add(event.request)
                self._replays.keep(event.message)
                self._outage.hold(event.message)
        self._serve_held()

    def _end_or_replay(self, down: EngineDown) -> None:
        """End the requests of a dead engine, but for those that can begin again."""
        for request_id in self._live.ids():
            request = self._live.get(request_id)
            if request is None or request.session is not down.session:
                continue
            message = self._replays.take(request_id)
            if message is None:
                self._end_with(request_id, down.error)
            else:
                request.begin_again()
                self._outage.hold(message)

    def _serve_held(self) -> None:
        """Send held requests to an engine, or fail them when none has been there for too long."""
        for message in self._outage.take_due():
            request = self._live.get(message.request_id)
            if request is None:
                continue  # its client has left
            try:
                self._hand_on(request, message)
            except RequestError as error:
                self._end_with(request.id, error)

    def _hand_on(self, request: LiveRequest, message: AddRequest) -> None:
        message = with_time_left(message, request.arrival_s)
        session = self._place(message)
        if session is not None:
            request.session = session
            session.send(message)
        elif self._outage.is_over:
            self._outage.hold(message)  # the last one has just gone, which is about to arrive as an event
        else:
            raise unavailable("the engine is restarting")

    def _take_news(self, news: StepNews, touched: dict[int, None]) -> None:
        for output in news.outputs:
            request = self._live.get(output.request_id)
            if request is None:
                if self._departures.settle(output) and output.usage is not None:
                    self._accounts.usage(output.usage)
                continue
            try:
                self._take(request, output)
            except Exception:
                traceback.print_exc(file=sys.stderr)
                self._tell_engine(request, CancelRequest(request.id))
                self._end_with(request.id, RequestError("its output could not be read", ErrorCode.INTERNAL))
            else:
                touched[request.id] = None

    def _take(self, request: LiveRequest, output: RequestOutput) -> None:
        if output.failure is not None:
            self._end_with(request.id, RequestError(output.failure.message, output.failure.code))
            return
        if request.take(output):
            self._tell_engine(request, CancelRequest(request.id, (output.choice,)))
        if output.usage is not None:
            self._accounts.usage(output.usage)

    def _respond(self, request: LiveRequest) -> None:
        """Send what is new, if it is worth a response."""
        assert self._writer is not None, "set before the first request"
        if request.is_complete and request.was_cancelled:
            self._end_with(request.id, _CLIENT_LEFT)
        elif request.is_complete:
            self._live.pop(request.id)
            self._part_with(request)
            reasons = {choice.finish_reason for choice in request.choices}
            reason = FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP
            self._accounts.succeeded(reason)
            self._guarded_send(request, final=True)
        elif request.stream and request.is_due(self._stream_interval):
            self._replays.drop(request.id)
            self._guarded_send(request, final=False)

    def _guarded_send(self, request: LiveRequest, *, final: bool) -> None:
        """Send a response; what goes wrong with one client must not reach the others."""
        assert self._writer is not None, "set before the first request"
        try:
            self._writer.send(request, final=final)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            if not final:
                self._give_up(request.id, _CLIENT_LEFT)

    def _give_up(self, request_id: int, error: RequestError) -> None:
        """End a request that the engine still serves."""
        request = self._live.get(request_id)
        if request is not None:
            self._tell_engine(request, CancelRequest(request_id))
            self._end_with(request_id, error)

    def _end_with(self, request_id: int, error: RequestError) -> None:
        request = self._live.pop(request_id)
        if request is None:
            return
        self._part_with(request)
        self._accounts.failed(error.code)
        try:
            send_error(self._pb, request.sender, error)
        except Exception:
            traceback.print_exc(file=sys.stderr)

    def _part_with(self, request: LiveRequest) -> None:
        """Close the books on a request that is answered."""
        self._replays.drop(request.id)
        session = request.session
        if session is not None:
            session.burden.release(len(request.choices))
            if self._outage.serves(session):
                self._departures.note(request.id, session, request.unconfirmed)

    def _tell_engine(self, request: LiveRequest, message: CancelRequest) -> None:
        if request.session is not None:
            with contextlib.suppress(RequestError):  # it is gone, which arrives here as an event of its own
                request.session.send(message)
