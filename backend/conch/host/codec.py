"""Text to token ids and back, without torch or transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from conch.api.errors import CheckpointError

_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_CHARACTERS_PER_TOKEN = 8
_SLACK_TOKENS = 64


class TextCodec:
    """The tokenizer of a checkpoint. Safe to use from several threads.

    Parameters
    ----------
    tokenizer
        Truncation and padding that its file asks for are switched off.

    Attributes
    ----------
    special_ids
        Tokens that are not text, such as BOS and chat markers.
    byte_ids
        Byte-fallback tokens, one byte of a character each.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_id_of = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self.special_ids = frozenset(self._special_id_of.values())
        self.byte_ids = _byte_fallback_ids(tokenizer)
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._token_text = functools.lru_cache(maxsize=4096)(self._decode_one)

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Read `tokenizer.json` of a checkpoint in Hugging Face layout.

        Raises
        ------
        CheckpointError
            There is none, or it cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"cannot read {path}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, with the checkpoint's BOS and the like where asked for."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the special tokens that are spelled like one of these texts."""
        return frozenset(self._special_id_of[text] for text in texts if text in self._special_id_of)

    def least_tokens(self, text: str, limit: int) -> int:
        """Return a lower bound on the tokens of a text, exact enough to refuse one far beyond `limit`.

        Costs the tokenising of a text of about `limit` tokens at most, however long the text is.
        """
        bound = len(text) // self._longest
        head = _CHARACTERS_PER_TOKEN * (limit + _SLACK_TOKENS)
        if bound > limit or len(text) <= head:
            return bound
        in_head = len(self.encode(text[:head], add_special_tokens=False))
        return max(bound, in_head - _SLACK_TOKENS)  # the cut may have split what merges

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself."""
        return self._token_text(token_id)

    def _decode_one(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)


def _byte_fallback_ids(tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.token_to_id(token) for token in _BYTE_TOKENS)
    return frozenset(token_id for token_id in ids if token_id is not None)
