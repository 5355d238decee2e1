"""One choice of a live request: tokens in, text and counts out."""

from __future__ import annotations

from conch.api.sampling import SamplingParams
from conch.api.steps import FinishReason, RequestOutput, TokenLogprobs, Usage
from conch.host.codec import TextCodec
from conch.host.detokenizer import Detokenizer
from conch.host.stop_strings import NoStops, StopFinder, StopPatterns, StopStrings


class ChoiceFactory:
    """Makes the choices of one request, which share its settings."""

    def __init__(self, params: SamplingParams, codec: TextCodec) -> None:
        self._params = params
        self._codec = codec
        self._patterns = StopPatterns(params.stop)
        hidden = codec.special_ids_of(params.stop) if params.skip_special_tokens else frozenset[int]()
        self._hidden_stops = hidden

    def make(self) -> Choice:
        """Return a choice that has nothing yet."""
        params = self._params
        stops: StopFinder = NoStops()
        if params.stop:
            stops = StopStrings(self._patterns, include=params.include_stop_str_in_output)
        detokenizer = Detokenizer(self._codec, skip_special_tokens=params.skip_special_tokens)
        return Choice(params, detokenizer, stops, self._hidden_stops)


class Choice:
    """Collects what the engine brings until it is taken for a response.

    The token that ends an answer (EOS or a stop token) counts but is not text, unless
    `include_stop_str_in_output` asks for it; the token that completes a stop string is the last that counts.
    A stop string that spells a special token is matched by that token where the text leaves it out.

    Parameters
    ----------
    hidden_stops
        Tokens that are not shown, and spell a stop string.

    Attributes
    ----------
    finish_reason
        Why it ended, None while it goes on.
    usage
        What the engine measured; may come after the end when a stop string ended it.
    text, token_ids, logprobs
        New since the last `clear`.
    num_output
        Tokens in all.
    cumulative_logprob
        Sum over all tokens; 0.0 where log-probabilities are not asked for.
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: Detokenizer,
        stops: StopFinder,
        hidden_stops: frozenset[int] = frozenset(),
    ) -> None:
        self._params = params
        self._detokenizer = detokenizer
        self._stops = stops
        self._hidden_stops = hidden_stops
        self._met_hidden_stop = False
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_output = 0
        self.cumulative_logprob = 0.0

    @property
    def has_matched_stop(self) -> bool:
        """Whether a stop string ended it: the engine does not know and must be told."""
        return self._stops.has_matched or self._met_hidden_stop

    def take(self, output: RequestOutput) -> None:
        """Take news from the engine."""
        self.usage = output.usage or self.usage
        if self.finish_reason is not None:
            return  # tokens on their way when a stop string matched
        stopped = output.finish_reason is FinishReason.STOP
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            self._count(token_id, output.logprobs[index] if output.logprobs else None)
            ends = stopped and index == last and not self._params.include_stop_str_in_output
            self._show("" if ends else self._detokenizer.feed(token_id))
            if self._stops.has_matched:
                self.finish_reason = FinishReason.STOP
                return
            if token_id in self._hidden_stops and self._is_armed:
                self._met_hidden_stop = True
                self._finish(FinishReason.STOP)
                return
        if output.finish_reason is not None:
            self._finish(output.finish_reason)

    @property
    def _is_armed(self) -> bool:
        """Whether a stop string counts by now."""
        return self.num_output >= self._params.min_tokens

    def is_due(self, interval: int) -> bool:
        """Whether what is new is enough for a response: that many tokens, or the first, or the last."""
        count = len(self.token_ids)
        return count >= interval or count == self.num_output or self.finish_reason is not None

    def clear(self) -> None:
        """Forget what a response has been made of."""
        self.text.clear()
        self.token_ids.clear()
        self.logprobs.clear()

    def _finish(self, reason: FinishReason) -> None:
        self._show(self._detokenizer.flush())
        self.finish_reason = FinishReason.STOP if self._stops.has_matched else reason
        if not self._stops.has_matched:
            self.text.append(self._stops.flush())

    def _count(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.num_output += 1
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.cumulative_logprob += logprobs.logprob
            self.logprobs.append(logprobs)

    def _show(self, text: str) -> None:
        if text:
            self.text.append(self._stops.feed(text, armed=self._is_armed))
