"""What clients get: the tensors and rules of Triton's vLLM backend, over a fake engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer

from host.host_fakes import EOS, FakeRequest

TEXT = "the quick brown fox"


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def test_one_response_that_begins_with_the_prompt(ask):
    sender = ask(text_input=TEXT, sampling_parameters={"max_tokens": "4"})
    assert len(sender.responses) == 1
    assert sender.text() == TEXT + TEXT[: len(sender.text()) - len(TEXT)]
    assert len(sender.text()) > len(TEXT)
    assert list(sender.responses[0].tensors) == ["text_output"]


def test_the_prompt_can_be_left_out(ask, tokenizer):
    ids = tokenizer.encode(TEXT).ids
    sender = ask(text_input=TEXT, exclude_input_in_output=True, sampling_parameters={"max_tokens": len(ids)})
    assert sender.text() == TEXT


def test_a_stream_gives_deltas_and_ends_with_the_last(ask, tokenizer):
    ids = tokenizer.encode(TEXT).ids
    sender = ask(
        text_input=TEXT,
        stream=True,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_output_ids=True,
        sampling_parameters={"max_tokens": len(ids)},
    )
    assert sender.text() == TEXT
    assert len(sender.responses) > 1
    assert sum(sum(counts) for counts in sender.all("num_output_tokens")) == len(ids)
    assert [token for step in sender.all("output_ids") for token in step] == ids
    assert sender.all("num_input_tokens") == [[len(ids)]] * len(sender.responses)
    *before, last = (reason for [reason] in sender.all("finish_reason"))
    assert set(before) == {b"None"}
    assert last == b"length"
    assert all(response.tensors["text_output"].dtype == np.object_ for response in sender.responses)


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 40])
def test_a_stream_may_come_in_larger_pieces(make_backend, choices, length):
    request = FakeRequest(
        input_ids=[50, 51, 52],
        stream=True,
        return_num_output_tokens=True,
        sampling_parameters={"max_tokens": length, "n": choices, "ignore_eos": True},
    )
    make_backend(stream_interval=4).execute([request])
    pieces = [counts for counts in request.sender.wait().all("num_output_tokens")]
    assert [sum(counts) for counts in zip(*pieces, strict=True)] == [length] * choices
    assert all(max(counts) >= 4 for counts in pieces[1:-1])
    assert len(pieces) <= 2 + length // 4


def test_a_stop_string_ends_a_stream_whose_piece_is_not_full(make_backend):
    request = FakeRequest(
        text_input=TEXT,
        stream=True,
        return_finish_reason=True,
        sampling_parameters={"max_tokens": 200, "stop": ["brown"]},
    )
    make_backend(stream_interval=50).execute([request])
    assert request.sender.wait().text() == "the quick "
    assert request.sender.all("finish_reason")[-1] == [b"stop"]
    assert len(request.sender.responses) <= 2


def test_streaming_refuses_to_echo(ask):
    sender = ask(text_input=TEXT, stream=True, exclude_input_in_output=False)
    assert sender.error.kind == "INVALID_ARG"
    assert "exclude_input_in_output" in sender.error.text


def test_characters_that_span_tokens_are_never_cut(ask, tokenizer):
    text = "日本語テスト 😀👩‍👩‍👧 नमस्ते"
    ids = tokenizer.encode(text).ids
    for max_tokens in range(1, len(ids) + 1):
        sender = ask(text_input=text, stream=True, sampling_parameters={"max_tokens": max_tokens})
        assert sender.text() == tokenizer.decode(ids[:max_tokens])
        assert not any("\ufffd" in r.tensors["text_output"][0].decode() for r in sender.responses[:-1])
    whole = ask(
        text_input=text, exclude_input_in_output=True, sampling_parameters={"max_tokens": len(ids) - 1}
    )
    assert whole.text() == tokenizer.decode(ids[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_itself(ask, stream, tokenizer):
    sender = ask(
        text_input=TEXT,
        stream=stream,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
        sampling_parameters={"max_tokens": 60, "stop": ["k br", "zzz"]},
    )
    assert sender.text() == "the quic"
    assert sender.all("finish_reason")[-1] == [b"stop"]
    produced = sum(sum(counts) for counts in sender.all("num_output_tokens"))
    ids = tokenizer.encode(TEXT).ids
    assert "k br" in tokenizer.decode(ids[:produced])
    assert "k br" not in tokenizer.decode(ids[: produced - 1])
    for response in sender.responses:
        assert "k" not in response.tensors["text_output"][0].decode()


def test_a_stop_string_can_be_kept(ask):
    sender = ask(
        text_input=TEXT,
        exclude_input_in_output=True,
        sampling_parameters={"max_tokens": 60, "stop": "brown", "include_stop_str_in_output": True},
    )
    assert sender.text() == "the quick brown"


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_may_be_a_special_token(ask, tokenizer, skip):
    text = "fox<|im_start|>dog"
    ids = tokenizer.encode(text).ids
    sampling = {"max_tokens": 60, "stop": ["zzz", "<|im_start|>"], "skip_special_tokens": skip}
    sender = ask(
        text_input=text,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
        sampling_parameters=sampling,
    )
    assert sender.text() == "fox"
    assert sender.all("finish_reason") == [[b"stop"]]
    assert sender.all("num_output_tokens") == [[ids.index(tokenizer.token_to_id("<|im_start|>")) + 1]]


def test_a_stop_string_counts_from_min_tokens_on(ask, tokenizer):
    count = len(tokenizer.encode(TEXT).ids)
    sampling = {"max_tokens": 3 * count, "stop": "quick", "min_tokens": count + 1}
    sender = ask(text_input=TEXT, exclude_input_in_output=True, sampling_parameters=sampling)
    assert sender.text() == TEXT + "the "


def test_an_unused_stop_string_changes_nothing(ask):
    sampling = {"max_tokens": 9}
    plain = ask(text_input=TEXT, stream=True, sampling_parameters=sampling)
    watched = ask(text_input=TEXT, stream=True, sampling_parameters={**sampling, "stop": ["foxhole", "xq"]})
    assert watched.text() == plain.text()


def test_the_end_token_counts_but_is_not_text(ask, tokenizer):
    text = f"fox{EOS}dog"
    ids = tokenizer.encode(text).ids
    sender = ask(
        text_input=text,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
        sampling_parameters={"max_tokens": 50, "skip_special_tokens": False},
    )
    assert sender.text() == "fox"
    assert sender.all("finish_reason") == [[b"stop"]]
    assert sender.all("num_output_tokens") == [[ids.index(2) + 1]]
    ignoring = ask(
        text_input=text,
        exclude_input_in_output=True,
        sampling_parameters={"max_tokens": len(ids), "ignore_eos": True, "skip_special_tokens": False},
    )
    assert ignoring.text() == text


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_share_each_response(ask, stream):
    sender = ask(
        text_input=TEXT,
        stream=stream,
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_output_ids=True,
        sampling_parameters={"n": 3, "max_tokens": 5},
    )
    assert all(len(response.tensors["text_output"]) == 3 for response in sender.responses)
    assert sender.text(0) == sender.text(1) == sender.text(2) != ""
    assert sender.all("finish_reason")[-1] == [b"length"] * 3
    for response in sender.responses:
        assert response.tensors["num_output_tokens"].sum() == len(response.tensors["output_ids"])


def test_log_probabilities_have_the_shape_of_vllm(ask):
    sender = ask(
        text_input=TEXT,
        return_logprobs=True,
        return_cumulative_logprob=True,
        sampling_parameters={"max_tokens": 3, "logprobs": 2},
    )
    [[text]] = sender.all("logprobs")
    positions = json.loads(text)
    assert len(positions) == 3
    for entries in positions:
        assert [entry["rank"] for entry in entries.values()] == [1, 2]
        assert {type(entry["decoded_token"]) for entry in entries.values()} == {str}
    assert sender.all("cumulative_logprob") == [[pytest.approx(-1.5)]]


def test_a_sum_of_log_probabilities_needs_no_sampling_parameter(ask):
    sender = ask(
        text_input=TEXT,
        return_logprobs=True,
        return_cumulative_logprob=True,
        sampling_parameters={"max_tokens": 2},
    )
    assert sender.all("cumulative_logprob") == [[pytest.approx(-1.0)]]
    assert sender.all("logprobs") == [[b"null"]]


@pytest.mark.parametrize("sampling", [{"max_tokens": 3}, {"max_tokens": 30, "stop": "own"}])
def test_timings_come_with_the_last_response(ask, sampling):
    sender = ask(text_input=TEXT, stream=True, return_timings=True, sampling_parameters=sampling)
    [[text]] = sender.all("timings")
    timings = json.loads(text)
    assert set(timings) == {
        "queue_s",
        "ttft_s",
        "total_s",
        "num_cached_tokens",
        "num_preemptions",
        "num_draft_tokens",
        "num_accepted_tokens",
    }
    assert 0 <= timings["ttft_s"] <= timings["total_s"]
    assert "timings" in sender.responses[-1].tensors


def test_the_end_is_told_once(ask):
    sampling = {"max_tokens": 30, "stop": "own"}
    wants = {"return_finish_reason": True, "return_output_ids": True, "return_timings": True}
    sender = ask(text_input=TEXT, stream=True, sampling_parameters=sampling, **wants)
    *before, last = (reason for [reason] in sender.all("finish_reason"))
    assert set(before) == {b"None"}
    assert last == b"stop"


def test_token_ids_and_messages_are_prompts_too(ask, tokenizer):
    ids = tokenizer.encode(TEXT).ids
    sampling = {"max_tokens": len(ids)}
    assert ask(input_ids=np.array(ids, dtype=np.int32), sampling_parameters=sampling).text() == TEXT
    chat = ask(
        messages=[{"role": "user", "content": "fox"}],
        return_num_input_tokens=True,
        sampling_parameters={"max_tokens": 200, "ignore_eos": True, "skip_special_tokens": False},
    )
    rendered = "<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    assert chat.text().startswith(rendered + "<|im_start|>")
    assert chat.all("num_input_tokens") == [[len(tokenizer.encode(rendered, add_special_tokens=False).ids)]]


def test_the_same_intent_in_every_form_gives_the_same(ask):
    forms = [
        {"sampling_parameters": {"max_tokens": 3, "temperature": 0}},
        {"sampling_parameters": {"max_tokens": "3", "temperature": "0.0"}},
        {"parameters": {"max_tokens": 3, "temperature": 0, "id": "x", "triton_enable_empty": True}},
        {"parameters": {"max_tokens": "3"}, "sampling_parameters": {"max_tokens": 3.0, "temperature": 0}},
    ]
    assert len({ask(text_input=TEXT, **form).text() for form in forms}) == 1


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"text_input": TEXT, "sampling_parameters": {"temperature": "hot"}}, ["temperature"]),
        ({"text_input": TEXT, "parameters": {"top_p": 2}}, ["top_p"]),
        ({"text_input": "the " * 300}, ["301", "256", "text_input"]),
        ({"text_input": "the " * 500_000}, ["at least", "256", "text_input"]),
        ({"text_input": ""}, ["text_input", "empty"]),
        ({"input_ids": []}, ["input_ids", "empty"]),
        ({"input_ids": [1, 420]}, ["input_ids", "420"]),
        ({"input_ids": [-1]}, ["input_ids", "-1"]),
        ({}, ["text_input", "input_ids", "messages"]),
        ({"text_input": TEXT, "messages": [{"role": "user", "content": "x"}]}, ["exactly one"]),
        ({"text_input": b"\xff\xfe"}, ["text_input", "UTF-8"]),
        ({"text_input": TEXT, "sampling_parameters": "[" * 2000}, ["sampling_parameters"]),
        ({"text_input": TEXT, "sampling_parameters": {"n": 9}}, ["n", "max_num_seqs", "8"]),
        ({"text_input": TEXT, "sampling_parameters": {"stop_token_ids": [420]}}, ["stop_token_ids", "420"]),
        ({"messages": []}, ["messages"]),
        ({"text_input": TEXT, "raw_parameters": '{"seed":1,"seed":1}'}, ["seed"]),
        ({"text_input": np.array([b"a", b"b"], dtype=object)}, ["text_input", "[2]"]),
        ({"text_input": np.array([1.5])}, ["text_input", "float64"]),
        ({"input_ids": np.array([1.5])}, ["input_ids", "float64"]),
    ],
)
def test_what_is_wrong_is_named(ask, inputs, words):
    sender = ask(**inputs)
    assert len(sender.responses) == 1
    assert sender.error.kind == "INVALID_ARG"
    for word in words:
        assert word in sender.error.text


def test_each_request_gets_its_own_answer_once(shared_backend, tokenizer):
    requests = [
        FakeRequest(
            text_input=f"number {index} fox",
            stream=index % 2 == 0,
            exclude_input_in_output=True,
            sampling_parameters={"max_tokens": len(tokenizer.encode(f"number {index} fox").ids)},
        )
        for index in range(200)
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda request: shared_backend.execute([request]), requests))
    for index, request in enumerate(requests):
        assert request.sender.wait().text() == f"number {index} fox"
        assert request.sender.finals == 1
