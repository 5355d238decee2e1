from __future__ import annotations

import pytest

pytest.importorskip("tritonclient.grpc")

from speculation_experiments import batch_and_k, drafters, engines, page
from speculation_experiments.work import MODULES, TOPICS, Lots, chats
from speculation_worker import start

from conch.training import prompts, topics
from support.tiny import tiny_checkpoint


def test_no_head_was_trained_on_what_is_served():
    assert not set(TOPICS) & set(topics.TOPICS)
    assert not set(MODULES) & set(prompts._MODULES)
    assert not set(chats()) & set(prompts.make_prompts(3000, 1))


def test_nothing_is_served_twice_and_there_is_enough():
    lots, seen = Lots(), []
    most = sum((rounds + 1) * drafters.STREAMS[size] for size, rounds in drafters.ROUNDS.items())
    assert most >= 4 + batch_and_k.ROUNDS * sum(batch_and_k.STREAMS.values())
    for _ in range(most):
        seen += lots.draw("chat", 1)["chats"]
    assert len(set(seen)) == most and chats()[:most] == seen
    copied = lots.draw("copying", 2)["prompts"] + lots.draw("copying", 1)["prompts"]
    assert len({tuple(prompt) for prompt in copied}) == 3


def answer(seconds, tokens, **counts):
    none = {"drafts": 0, "drafts_accepted": 0, "accepted_by_position": [], "token_ids": []}
    return {"seconds": seconds, "tokens": tokens, **none, **counts}


def test_figures():
    slow, fast = [answer(2.0, 100), answer(4.0, 100), answer(1.0, 100)], [answer(1.0, 100)] * 3
    assert engines.speedup(fast, slow) == 2.0
    some = [
        answer(1.0, 9, drafts=4, drafts_accepted=3, accepted_by_position=[3]),
        answer(1.0, 9, drafts=4, drafts_accepted=5, accepted_by_position=[3, 2]),
    ]
    assert engines.acceptance_length(some) == 2.0
    assert engines.acceptance_by_position(some) == [0.75, 0.25]
    assert engines.acceptance_length([answer(1.0, 9)]) is None
    one, other = (
        answer(1.0, 8, token_ids=[[1, 2, 3, 4], [5] * 4]),
        answer(1.0, 8, token_ids=[[1, 2, 9, 4], [5] * 4]),
    )
    assert engines.agreement(one, other) == 0.75
    engines.check_same_work(one, other, 4)
    with pytest.raises(RuntimeError, match="unequal"):
        engines.check_same_work(one, answer(1.0, 8, token_ids=[[1, 2]]), 4)


def test_the_record_names_no_folder_of_this_machine():
    configs = {"none": None, "eagle": {"method": "eagle", "model": str(engines.HEAD)}}
    assert engines.recorded(configs) == {
        "none": None,
        "eagle": {"method": "eagle", "model": "model_repository/speculative_eagle/smollm2/1/head"},
    }


def test_decoding_is_counted_from_the_last_first_token():
    own = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "backoff": False}
    settings = {
        "model": str(tiny_checkpoint("llama")),
        "dtype": "float32",
        "num_threads": 1,
        "speculative_config": own,
    }
    _, ask = start({"settings": settings})
    prompts = [[7, 50, 60, 9] * 5, [8, 51, 61, 10] * 5, [3, 4, 5, 6] * 5]
    question = {"prompts": prompts, "at_once": 2, "max_tokens": 20}
    plain, drafted = ask({**question, "drafts": 0}), ask(question)
    assert plain["drafts"] == 0 and drafted["drafts"] > 0
    assert plain["tokens"] == 3 * 19, "each had one token when decoding began"
    assert 0 < drafted["tokens"] <= plain["tokens"] and drafted["steps"] < plain["steps"]
    assert sum(drafted["accepted_by_position"]) == drafted["drafts_accepted"]
    engines.check_same_work(plain, drafted, 20)
    assert engines.agreement(plain, drafted) == 1.0


def test_the_page_shows_what_was_run(tmp_path):
    where = tmp_path / "speculation.md"
    where.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    gain = {"c1": 1.4, "c16": 0.99}
    results = {
        "drafters": {
            "speedup": {"eagle": {"chat": gain}},
            "acceptance_length": {"eagle": {"chat": {"c1": 1.9, "c16": None}}},
            "details": {"eagle": {"chat": {"c1": {"acceptance_by_position": [0.6, 0.3]}}}},
        },
        "batch_and_k": {
            "speedup_by_batch_and_k": {
                "eagle": {
                    "acceptance_by_position": [0.6, 0.3],
                    "speedup": {"c1": {"1": 1.3, "2": 1.4}, "c16": {"1": 0.9, "2": 0.8}},
                }
            },
            "drafted_for": {"eagle": "chat"},
        },
    }
    for _ in range(2):  # a second time replaces the first
        page.rewrite(results, tmp_path / "speculation" / "one.json", where)
    text = where.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count("| `eagle` | chat | 1.40 | 0.99 | 1.90 | – | 0.60, 0.30 |") == 1
    assert "It pays at 1 at once and no more." in text and "| 16 | 0.90 | 0.80 |" in text
    assert "vLLM" not in text
    assert page.BEGIN in page.PAGE.read_text() and page.END in page.PAGE.read_text()
