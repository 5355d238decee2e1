"""Text out of tokens: nothing lost, nothing early, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from conch.api.errors import CheckpointError
from conch.host.codec import TextCodec
from conch.host.detokenizer import Detokenizer
from conch.host.stop_strings import NoStops, StopPatterns, StopStrings
from host.host_fakes import EOS, small_tokenizer

REPLACEMENT = "\ufffd"


def sentence_piece(strip: bool) -> Tokenizer:
    """Llama's kind of tokenizer: spaces are ▁, unknown characters are bytes, the first space is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "▁the", "h", "e", "a", "日", REPLACEMENT, "▁▁", "\n"]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


CODECS = {
    "byte_level": TextCodec(small_tokenizer()),
    "llama": TextCodec(sentence_piece(strip=True)),
    "gemma": TextCodec(sentence_piece(strip=False)),
}
SIZES = {"byte_level": 420, "llama": 270, "gemma": 270}
BYTES = [3 + byte for byte in "\n日😀x".encode()]
WORDS = [1, 2, *range(259, 270), *BYTES]


@pytest.mark.parametrize("kind", CODECS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_whole_decoding(kind, data, skip):
    likely = st.sampled_from(WORDS) if kind != "byte_level" else st.integers(0, 2)
    ids = data.draw(st.lists(st.one_of(likely, st.integers(0, SIZES[kind] - 1)), max_size=24))
    detokenizer = Detokenizer(CODECS[kind], skip_special_tokens=skip)
    pieces = [detokenizer.feed(token_id) for token_id in ids]
    whole = CODECS[kind].decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) + detokenizer.flush() == whole
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces)


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_text_survives_a_byte_level_tokenizer(text):
    codec = CODECS["byte_level"]
    detokenizer = Detokenizer(codec, skip_special_tokens=False)
    pieces = [detokenizer.feed(token_id) for token_id in codec.encode(text, add_special_tokens=False)]
    assert "".join(pieces) + detokenizer.flush() == text


def test_a_word_is_given_with_its_last_token():
    codec = CODECS["llama"]
    detokenizer = Detokenizer(codec, skip_special_tokens=True)
    assert [detokenizer.feed(token_id) for token_id in (1, 260, 261, 262)] == ["", "hello", " world", " the"]


class CountingCodec:
    """A codec that counts the tokens that it decodes."""

    def __init__(self, codec):
        self._codec, self.count = codec, 0
        self.byte_ids, self.special_ids = codec.byte_ids, codec.special_ids
        self.token_text = codec.token_text

    def decode(self, token_ids, *, skip_special_tokens):
        self.count += len(token_ids)
        return self._codec.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", CODECS)
def test_the_work_grows_with_the_tokens_however_long_no_character_ends(kind):
    codec = CountingCodec(CODECS[kind])
    vocabulary = range(3, SIZES[kind])
    broken = [t for t in vocabulary if codec.token_text(t) == REPLACEMENT and t not in codec.byte_ids]
    ids = [*broken[:1] * 2_000, *CODECS[kind].encode("hello", add_special_tokens=False)]
    detokenizer = Detokenizer(codec, skip_special_tokens=True)
    pieces = [detokenizer.feed(token_id) for token_id in ids]
    assert codec.count < 20 * len(ids)
    assert pieces[:2_000] == [""] * 2_000
    text = "".join(pieces) + detokenizer.flush()
    assert text == CODECS[kind].decode(ids, skip_special_tokens=True)
    assert text.count(REPLACEMENT) == 2_000


# -- stop strings


def cut(text: str, stops: list[str], include: bool, armed_from: int = 0) -> str:
    """The text up to the stop string that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching and end > armed_from:
            return text[: end if include else end - max(map(len, matching))]
    return text


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    unarmed=st.integers(0, 4),
)
@settings(max_examples=1000, deadline=None)
def test_text_ends_at_the_first_stop_string(pieces, stops, include, unarmed):
    finder = StopStrings(StopPatterns(stops), include=include)
    given_away = []
    for index, piece in enumerate(pieces):
        given_away.append(finder.feed(piece, armed=index >= unarmed))
        if finder.has_matched:
            break
    else:
        given_away.append(finder.flush())
    text = "".join(pieces)
    expected = cut(text, stops, include, armed_from=len("".join(pieces[:unarmed])))
    assert "".join(given_away) == expected


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_exactly_what_could_become_a_stop_string_is_held(pieces, stops):
    finder = StopStrings(StopPatterns(stops), include=False)
    out = ""
    for index, piece in enumerate(pieces):
        out += finder.feed(piece, armed=True)
        if finder.has_matched:
            return
        seen = "".join(pieces[: index + 1])
        longest = max(
            length
            for length in range(len(seen) + 1)
            if any(stop.startswith(seen[len(seen) - length :]) for stop in stops)
        )
        assert out == seen[: len(seen) - longest]


def test_a_near_match_is_delivered():
    finder = StopStrings(StopPatterns(["abcX"]), include=False)
    assert [finder.feed(text, armed=True) for text in ("ab", "cab", "cX")] == ["", "abc", ""]
    assert finder.has_matched
    unmatched = StopStrings(StopPatterns(["abcX"]), include=False)
    assert unmatched.feed("abcab", armed=True) == "abc"
    assert unmatched.flush() == "ab"


def test_no_stop_strings_hold_nothing():
    assert NoStops().feed("abc", armed=True) == "abc"
    assert NoStops().flush() == ""


# -- the codec


def test_a_text_far_too_long_is_not_tokenized_whole(monkeypatch):
    codec = CODECS["byte_level"]
    lengths = []
    encode = codec.encode
    monkeypatch.setattr(
        codec, "encode", lambda text, **options: lengths.append(len(text)) or encode(text, **options)
    )
    assert codec.least_tokens("word " * 4_000_000, 100) > 100
    assert max(lengths, default=0) < 2000


@given(st.text(max_size=60), st.integers(1, 20))
@settings(deadline=None)
def test_the_lower_bound_is_one(text, limit):
    codec = CODECS["byte_level"]
    assert codec.least_tokens(text, limit) <= len(codec.encode(text, add_special_tokens=True))


def test_special_tokens_in_a_text_are_those_tokens():
    assert CODECS["byte_level"].encode(f"a{EOS}", add_special_tokens=True)[-1] == 2


def test_a_missing_or_broken_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read"):
        TextCodec.load(tmp_path)
