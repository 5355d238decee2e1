"""Token ids to text as they come, for one choice."""

from __future__ import annotations

from conch.host.codec import TextCodec

_UNFINISHED = "\ufffd"
_TAIL = 8  # tokens that hold the whole of a character that they end in, since no token of text is empty


class Detokenizer:
    """Gives text as soon as it can no longer change.

    The pieces that `feed` and `flush` return, joined, are the decoding of all tokens at once, byte for byte.
    So text is held while it ends inside a character, and while it ends in a run of byte-fallback tokens
    (``<0xF0>``), which are decoded as one: one bad byte turns the whole run into U+FFFD. The tokenizers
    library's own `DecodeStream` gives such a run away early and then fails on it.

    ::

        ids   ...  7   9 | 4   5
                   ^     ^     ^ end
                   |     text given up to here
                   decoding starts here: decoders treat the first token's space differently
    """

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool) -> None:
        self._codec = codec
        self._skipped = codec.special_ids if skip_special_tokens else frozenset[int]()
        self._token_ids: list[int] = []
        self._start = 0
        self._given = 0

    def feed(self, token_id: int) -> str:
        """Take the next token; returns the text that it completes."""
        if token_id in self._skipped:
            return ""
        self._token_ids.append(token_id)
        if token_id in self._codec.byte_ids:
            return ""
        end = len(self._token_ids)
        if end - self._given > _TAIL and self._decode(end - _TAIL, end).endswith(_UNFINISHED):
            return ""  # so does all of it, which may be long by now
        text = self._decode(self._start, end)
        if text.endswith(_UNFINISHED):
            return ""
        return self._give(text)

    def flush(self) -> str:
        """Return what is left when no token follows."""
        return self._give(self._decode(self._start, len(self._token_ids)))

    def _give(self, text: str) -> str:
        piece = text[len(self._decode(self._start, self._given)) :]
        if piece:
            self._start = self._given
        self._given = len(self._token_ids)
        return piece

    def _decode(self, start: int, end: int) -> str:
        if end - start == 1:
            return self._codec.token_text(self._token_ids[start])
        return self._codec.decode(self._token_ids[start:end], skip_special_tokens=False)
