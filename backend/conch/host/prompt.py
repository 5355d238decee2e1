"""The prompt of a request: to token ids, and refused here if the engine could never serve it."""

from __future__ import annotations

from dataclasses import dataclass

from conch.api.errors import RequestError
from conch.engine.protocol import EngineReady
from conch.host.chat_template import ChatTemplate
from conch.host.codec import TextCodec
from conch.host.inputs import Inputs


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine takes it.

    Attributes
    ----------
    token_ids
        At least one token.
    echo
        What the response begins with: the prompt as text where the client asked for it, else nothing.
    """

    token_ids: tuple[int, ...]
    echo: str


class PromptReader:
    """Turns the prompts of one model into tokens.

    A text gets the special tokens that the checkpoint's tokenizer adds (such as BOS). Messages go through
    the checkpoint's chat template, which writes its own. In both, the spelling of a special token is that
    token, as in transformers.
    """

    def __init__(self, codec: TextCodec, template: ChatTemplate, ready: EngineReady) -> None:
        self._codec = codec
        self._template = template
        self._ready = ready
        self._most = ready.max_tokens_per_request - 1  # one must be left for output

    def read(self, inputs: Inputs) -> Prompt:
        """Return the prompt of a request.

        Raises
        ------
        RequestError
            It is empty, too long, holds unknown token ids, or the chat template refuses the messages.
        """
        params = inputs.params
        params.check_vocabulary(self._ready.vocab_size)
        if params.n > self._ready.max_num_seqs:
            raise RequestError(
                f"must be at most max_num_seqs ({self._ready.max_num_seqs}), not {params.n}", field="n"
            )
        if inputs.token_ids is not None:
            return self._from_ids(inputs)
        if inputs.messages is not None:
            text = self._template.render(inputs.messages)
            return self._from_text(text, inputs.echo, "messages")
        assert inputs.text is not None, "exactly one is set"
        return self._from_text(inputs.text, inputs.echo, "text_input")

    def _from_text(self, text: str, echo: bool, field: str) -> Prompt:
        least = self._codec.least_tokens(text, self._most)
        if least > self._most:
            raise self._too_long(f"at least {least}", field)
        ids = self._codec.encode(text, add_special_tokens=field == "text_input")
        self._check_length(len(ids), field)
        return Prompt(tuple(ids), text if echo else "")

    def _from_ids(self, inputs: Inputs) -> Prompt:
        array = inputs.token_ids
        assert array is not None, "called for input_ids"
        self._check_length(array.size, "input_ids")
        vocab_size = self._ready.vocab_size
        outside = array[(array < 0) | (array >= vocab_size)]
        if outside.size:
            raise RequestError(
                f"token id {outside[0]} is outside the vocabulary [0, {vocab_size})", field="input_ids"
            )
        ids = tuple(array.tolist())
        return Prompt(ids, self._codec.decode(ids, skip_special_tokens=False) if inputs.echo else "")

    def _check_length(self, count: int, field: str) -> None:
        if count == 0:
            raise RequestError("the prompt is empty", field=field)
        if count > self._most:
            raise self._too_long(str(count), field)

    def _too_long(self, count: str, field: str) -> RequestError:
        ready = self._ready
        holder = f"the context is {ready.max_model_len} tokens"
        if ready.max_tokens_per_request < ready.max_model_len:
            holder = (
                f"the KV pool holds {ready.max_tokens_per_request} tokens (a larger kv_cache_memory_bytes "
                f"would take it; the context is {ready.max_model_len})"
            )
        return RequestError(
            f"the prompt has {count} tokens and {holder}; at least one must be left for output", field=field
        )
