"""`speculative_config` is validated whole."""

from __future__ import annotations

import pytest

from conch.api import ConfigError, RequestError, SamplingParams
from conch.api.config import load_config, parse_config


def parse(**keys):
    return parse_config({"model": "m", "speculative_config": keys}).speculative_config


def test_a_model_alone_drafts():
    assert parse(model="small").name == "draft_model"
    assert parse(method="mine", model="small").name == "mine"
    assert parse_config({"model": "m"}).drafter == "none"
    assert parse_config({"model": "m", "speculative_config": {"method": "ngram"}}).drafter == "ngram"


def test_the_model_may_lie_beside_the_file(tmp_path):
    (tmp_path / "small").mkdir()
    path = tmp_path / "model.json"
    path.write_text('{"model": "large", "speculative_config": {"model": "small"}}')
    assert load_config(path).speculative_config.model == str(tmp_path / "small")


def test_defaults():
    assert parse(method="ngram").num_tokens == 5
    assert parse(method="suffix").num_tokens == 24
    assert parse(method="ngram").prompt_lookup == (5, 5)
    assert parse(method="ngram", prompt_lookup_max=3).prompt_lookup == (3, 3)
    assert parse(method="ngram", prompt_lookup_min=2).prompt_lookup == (2, 2)
    assert parse(method="ngram", prompt_lookup_min=2, prompt_lookup_max=4).prompt_lookup == (2, 4)


def test_the_schedule_is_by_ranges_of_batch_sizes():
    settings = parse(
        method="ngram", num_speculative_tokens=4, num_speculative_tokens_per_batch_size=[[2, 3, 1], [8, 9, 0]]
    )
    assert [settings.most_at(size) for size in (1, 2, 3, 4, 8, 9, 10)] == [4, 1, 1, 4, 0, 0, 4]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "needs a method"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "at most 64"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "speculative_config"),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "suffix_decoding_max_spec_factor"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "cached_requests"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2, 9]]}, "per_batch_size"),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 2], [4, 8, 1]]},
            "rising ranges",
        ),
        ({"method": "ngram", "num_tokens": 3}, "num_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(keys, said):
    with pytest.raises(ConfigError, match=said):
        parse(**keys)


def test_a_request_may_ask_for_fewer_or_none():
    assert SamplingParams(num_speculative_tokens=0).num_speculative_tokens == 0
    with pytest.raises(RequestError, match="num_speculative_tokens"):
        SamplingParams(num_speculative_tokens=-1)
