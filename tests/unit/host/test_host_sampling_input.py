from __future__ import annotations

import math

import pytest

from conch.api.errors import RequestError
from conch.api.sampling import SamplingParams
from conch.host import strict_json
from conch.host.sampling_input import MOST_TOKENS, parse_sampling


def refused(*sources):
    with pytest.raises(RequestError) as caught:
        parse_sampling(*sources)
    return caught.value


@pytest.mark.parametrize(
    ("key", "forms"),
    [
        ("max_tokens", [64, "64", 64.0, " 64 ", "64.0"]),
        ("temperature", [0.5, "0.5", "5e-1"]),
        ("temperature", [0, "0", -0.0, 0.0]),
        ("ignore_eos", [True, "true", "True", 1, 1.0, "1"]),
        ("skip_special_tokens", [False, "false", 0, "0"]),
        ("stop", ["w", ["w"], '["w"]']),
        ("stop_token_ids", [[1, 2], ["1", 2.0], "[1, 2]"]),
        ("logit_bias", [{"5": 1}, {"5": "1.0"}, '{"5": 1}']),
        ("top_k", [-1, "-1"]),
        ("seed", [7, "7", 7.0]),
    ],
)
def test_the_same_value_in_every_form(key, forms):
    values = [getattr(parse_sampling({key: form}), key) for form in forms]
    assert all(value == values[0] and type(value) is type(values[0]) for value in values)


@pytest.mark.parametrize("key", [key for key in SamplingParams.__struct_fields__])
def test_null_is_the_default(key):
    assert parse_sampling({key: None}) == SamplingParams()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("max_tokens", value)
            for value in (0, -1, -2, 1.5, "abc", "", "1_0", True, [], {}, math.nan, "nan")
        ),
        *(
            ("temperature", value)
            for value in (-1, math.nan, math.inf, 1e38, "nan", "inf", "hot", True, [1], 10**400)
        ),
        *(("top_p", value) for value in (1.0001, -0.1, math.nan, 2)),
        *(("min_p", value) for value in (1.1, math.nan)),
        *(("top_k", value) for value in (-2, 0.5, "x")),
        *(("repetition_penalty", value) for value in (0, -1, math.nan)),
        *(("stop", value) for value in (5, [1], [""], "", {"a": 1}, ["\ud800"], "\ud800")),
        *(("stop_token_ids", value) for value in ("12", 5, [1.5], [None], "[1.5]", [True])),
        *(
            ("logit_bias", value)
            for value in ([1], "x", {"a": 1}, {"1": 101}, {"1": None}, {"1": 1, "01": 2})
        ),
        *(("ignore_eos", value) for value in (2, "yes", [], 0.5)),
        *(("n", value) for value in (0, 129, True, "two")),
        *(("logprobs", value) for value in (-1, 21, True)),
        *(("seed", value) for value in (1 << 63, 0.5)),
        ("min_tokens", 17),
    ],
)
def test_what_cannot_be_read_names_its_field(key, value):
    error = refused({key: value})
    assert error.field == key
    assert str(error).startswith(f"{key}: ")
    assert len(str(error)) < 300


def test_no_stop_strings_are_none():
    assert parse_sampling({"stop": []}).stop == ()
    assert parse_sampling({"stop": "["}).stop == ("[",)
    assert parse_sampling({"stop": "[a]"}).stop == ("[a]",)


@pytest.mark.parametrize("value", [1 << 31, 1 << 63, 10**30, "1e20", 1e300])
def test_a_huge_bound_is_clamped(value):
    assert parse_sampling({"max_tokens": value}).max_tokens == MOST_TOKENS


def test_an_unknown_key_suggests_the_near_one():
    error = refused({"max_token": 5})
    assert error.field == "max_token"
    assert "'max_tokens'" in str(error)
    assert "known are" in str(refused({"xyzzy": 5}))


def test_a_key_of_vllm_that_is_not_served_says_so():
    for key, value in (("prompt_logprobs", 1), ("best_of", 2), ("guided_decoding", {}), ("bad_words", ["x"])):
        error = refused({key: value})
        assert "not supported" in str(error)
        assert error.field == key
    assert parse_sampling(
        {"best_of": 1, "use_beam_search": False, "guided_decoding": None, "logprobs": False}
    ) == (SamplingParams())


def test_two_sources_must_agree():
    assert parse_sampling({"seed": "1"}, {"seed": 1, "n": 2}) == SamplingParams(seed=1, n=2)
    assert refused({"seed": 1}, {"seed": 2}).field == "seed"


# -- JSON


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 1}', "repeats the key 'a'"),
        ('{"a": {"b": 1, "b": 2}}', "repeats the key 'b'"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"\\udc00": 1}', "surrogate"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "must be a JSON object, not a list"),
        ("null", "not null"),
        ('"x"', "not a string"),
        ("1" * 5000, "field"),
        ("[" * 100_000, "field"),
        ('{"a":' * 2000 + "1" + "}" * 2000 + "x", "field"),
    ],
)
def test_json_is_read_strictly(text, words):
    with pytest.raises(RequestError, match="field: ") as caught:
        strict_json.decode_object(text, "field")
    assert words in str(caught.value)


def test_whole_surrogate_pairs_are_text():
    assert strict_json.decode('"\\ud83d\\ude00"', "field") == "😀"


def test_bytes_that_are_not_text_are_named():
    with pytest.raises(RequestError, match="field: is not valid UTF-8"):
        strict_json.decode_utf8(b"a\xff", "field")
