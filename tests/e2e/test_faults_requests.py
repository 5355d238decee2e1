"""Whole requests on the wire: F15, F24, F33 and F41."""

from __future__ import annotations

import json
import random
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.fault_checks import FRONTS, GREEDY, FaultServer, body, known_answers, wait_for_metric
from support.fault_models import CONTEXT
from support.oracle import Same
from support.wire import parse_events, tensor

pytestmark = pytest.mark.e2e

FRONT_NAMES = list(FRONTS)
WITHIN_S = 10


# -- F15: identities


def test_two_hundred_ids_on_one_stream(faults: FaultServer):
    """Responses are told apart by id alone, so a mixed-up id is an answer to another's prompt."""
    rng = random.Random(15)
    stem = str(uuid.UUID(int=rng.getrandbits(128)))
    ids = [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(160)]
    ids += [stem[:-1] + last for last in "0123456789abcdef"]
    ids += ["", "0", "1", "x", "-1", "18446744073709551617", "1.0", "null", " ", "a b", "é", "e\u0301"]
    ids += ["日本語😀", "i" * 4096, "i" * 4095 + "j", "j" + "i" * 4095]
    ids += [str(number) for number in range(2, 10)]
    assert len(set(ids)) == len(ids) == 200
    prompts = [
        [3 + index // 300, 3 + index % 300, *(rng.randrange(3, 320) for _ in range(6))]
        for index in range(200)
    ]
    model = faults.model("tiny")
    requests = {
        key: body(prompt, {**GREEDY, "max_tokens": 8}) for key, prompt in zip(ids, prompts, strict=True)
    }
    answers = model.grpc_together(requests)
    same = Same(faults.oracle("tiny"))
    for key, prompt in zip(ids, prompts, strict=True):
        assert set(answers[key].ids) == {key}
        assert answers[key].num_output == 8 and answers[key].finish_reason == "length"
        same.check(prompt, answers[key].output_ids)
    same.finish()
    faults.assert_drained("tiny")


def test_the_same_id_at_once_is_not_in_the_way(faults: FaultServer):
    known = known_answers(faults.oracle("tiny"), 12, lengths=[6], num_output=8, seed=16)
    model = faults.model("tiny")
    asks = [body(one.prompt, {**GREEDY, "max_tokens": 8}, id="twice") for one in known]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(model.generate, asks))
    assert [answer.output_ids for answer in answers] == [one.answer for one in known]
    assert {*answers[0].ids, *answers[-1].ids} == {"twice"}


# -- F24: bodies of every kind

DEEP = 2000
ACCEPTED = [
    b'{"text_input":["a"]}',
    b'{"text_input":"\\u0000"}',
    b'\xef\xbb\xbf{"text_input":"a"}',
    b'{"text_input":"a","max_tokens":99999999999999999999999,"ignore_eos":true}',
    b'{"text_input":"a","triton_anything":1}',
]
REFUSED_BY_CONCH = {
    b"{}": "text_input",
    b'{"":1}': "text_input",
    b'{"sampling_parameters":"{}"}': "text_input",
    b'{"text_input":"a","input_ids":[5]}': "exactly one",
    b'{"text_input":"a","xyzzy":1}': "xyzzy",
    b'{"text_input":"a","max_tokens":1,"max_tokens":2}': "max_tokens",
    b'{"text_input":"a","parameters":{"max_tokens":1,"max_tokens":2}}': "max_tokens",
    b'{"text_input":"' + b"a" * 10_000_000 + b'"}': f"{CONTEXT} tokens",
    b'{"text_input":"\xff\xfe"}': "UTF-8",
    b'{"text_input":"\xc3"}': "UTF-8",
    b'{"text_input":"\xed\xa0\x80"}': "UTF-8",
    b'{"text_input":"a","parameters":{"temperature":NaN}}': "temperature",
    b'{"text_input":"a","parameters":{"temperature":Infinity}}': "temperature",
    b'{"text_input":"a","temperature":-Infinity}': "temperature",
    b'{"text_input":""}': "empty",
    b'{"input_ids":[]}': "empty",
    b'{"text_input":"a","sampling_parameters":"{"}': "sampling_parameters",
    b'{"text_input":"a","sampling_parameters":"[]"}': "sampling_parameters",
    b'{"text_input":"a","sampling_parameters":""}': "sampling_parameters",
    b'{"text_input":"a","sampling_parameters":"' + b"[" * DEEP + b'"}': "sampling_parameters",
    b'{"text_input":"a","sampling_parameters":"{\\"stop\\": [\\"\\\\ud800\\"]}"}': "surrogate",
    b'{"text_input":"a","sampling_parameters":"{\\"seed\\":1,\\"seed\\":2}"}': "seed",
    b'{"text_input":"a","priority":-1}': "priority",
    b'{"text_input":"a","timeout":"soon"}': "timeout",
    b'{"messages":"hi"}': "messages",
    b'{"messages":"[{\\"role\\":5}]"}': "messages",
    b'{"text_input":"a","binary_data_output":true}': "binary_data_output",
}
REFUSED_BY_TRITON = [
    *(b"", b"{", b"[]", b"null", b"5", b'"x"', b"\x00\x01\x02", b"<xml/>", b"{'text_input':'a'}"),
    *(b'{"text_input":"a",}', b'{"text_input":"a"} x', b'{"text_input":"a"}{"text_input":"b"}'),
    *(
        b'{"text_input":' + value + b"}"
        for value in (b"5", b"null", b"true", b"1.5", b"{}", b"[]", b'["a","b"]')
    ),
    b'{"text_input":"a","text_input":"b"}',
    b'{"text_input":' + b"[" * DEEP + b"]" * DEEP + b"}",
    b"[" * DEEP + b"]" * DEEP,
    b'{"text_input":"a","parameters":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    *(b'{"text_input":"a","parameters":' + value + b"}" for value in (b"[1]", b"5", b'{"stop":["a"]}')),
    *(b'{"text_input":"a","max_tokens":' + value + b"}" for value in (b"[1]", b"1e400", b'{"a":1}')),
    *(b'{"text_input":"a\x00b"}', b'{"text_input":"\\ud800"}', b'{"text_input":"\\udc00\\ud800"}'),
    *(b'{"text_input":"a","stream":' + value + b"}" for value in (b'"yes"', b"1", b"null", b"[true,false]")),
    *(b'{"input_ids":' + value + b"}" for value in (b'["a"]', b'"a"', b"[[1,2],[3]]", b"[1.5]", b"[null]")),
    b'{"input_ids":[9223372036854775808]}',
    b'{"messages":[{"role":"user","content":"x"}]}',
    b'{"text_input":"a","sampling_parameters":{"max_tokens":1}}',
    *(
        b'{"text_input":"a","id":5}',
        b'{"text_input":"a","priority":"high"}',
        b'{"text_input":"a","cache_salt":5}',
    ),
    b'{"inputs":[{"name":"text_input","shape":[-1],"datatype":"BYTES","data":["a"]}]}',
]
"""What Triton's own front end does not pass on. It answers some with 400 and some with 500, as it likes."""


def failures(model) -> float:
    return model.metric("request_failure_total")


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_bodies_of_every_kind(faults: FaultServer, verb: str):
    model = faults.model("tiny")
    with faults.healthy_streams("tiny", num_output=12):
        for sent in ACCEPTED:
            status, reply = model.post(verb, sent)
            assert status == 200 and "text_output" in parse_events(reply)[0], sent[:80]
        faults.assert_drained("tiny")
        before = failures(model)
        for sent in REFUSED_BY_TRITON:
            status, reply = model.post(verb, sent)
            (event,) = parse_events(reply)
            assert status in (400, 500) and event["error"], sent[:80]
            faults.assert_alive()
        assert failures(model) == before, "one of these did reach conch, and must be on its list"
        for sent, word in REFUSED_BY_CONCH.items():
            status, reply = model.post(verb, sent, WITHIN_S)
            (event,) = parse_events(reply)
            assert status == 400 and word in event["error"], (sent[:80], status, event)
            faults.assert_alive()
    faults.assert_drained("tiny")
    wait_for_metric(model, "request_failure_total", before + len(REFUSED_BY_CONCH))


def test_infer_says_that_it_is_not_offered(faults: FaultServer):
    for sent in (
        b"",
        b"{",
        b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","data":["a"]}]}',
    ):
        status, reply = faults.model("tiny").post("infer", sent)
        assert status == 501 and "decoupled" in json.loads(reply)["error"]
    faults.assert_alive()


def text(*values: bytes, shape: tuple[int, ...] | None = None):
    array = np.array(values, dtype=object)
    return tensor("text_input", "BYTES", array.reshape(shape or array.shape))


WRONG_TENSORS = {
    "no tensor": ([], "text_input"),
    "two texts": ([text(b"a", b"b")], "text_input"),
    "a matrix": ([text(b"a", shape=(1, 1))], "text_input"),
    "numbers for text": ([tensor("text_input", "FP32", np.ones(1, np.float32))], "text_input"),
    "narrow ids": ([tensor("input_ids", "INT32", np.ones(1, np.int32))], "input_ids"),
    "a matrix of ids": ([tensor("input_ids", "INT64", np.ones((1, 1), np.int64))], "input_ids"),
    "no ids": ([tensor("input_ids", "INT64", np.ones(0, np.int64))], "input_ids"),
    "not UTF-8": ([text(b"\xff")], "UTF-8"),
    "empty text": ([text(b"")], "empty"),
    "an unknown tensor": ([text(b"a"), tensor("xyzzy", "INT64", np.ones(1, np.int64))], "xyzzy"),
    "a number for a flag": ([text(b"a"), tensor("stream", "INT64", np.ones(1, np.int64))], "stream"),
    "two flags": ([text(b"a"), tensor("stream", "BOOL", np.ones(2, np.bool_))], "stream"),
    "one name twice": ([text(b"a"), text(b"a")], "text_input"),
    "10 MB": ([text(b"a" * 10_000_000)], f"{CONTEXT} tokens"),
}


def test_tensors_of_every_wrong_kind(faults: FaultServer):
    with faults.healthy_streams("tiny", num_output=12):
        for name, (tensors, word) in WRONG_TENSORS.items():
            answer = faults.model("tiny").grpc_tensors(tensors, timeout_s=WITHIN_S)
            assert answer.error is not None and word in answer.error, (name, answer)
            faults.assert_alive()
    faults.assert_drained("tiny")


# -- F33: prompts that are too long


@pytest.mark.parametrize("front", FRONT_NAMES)
def test_prompts_that_are_too_long(faults: FaultServer, front: str):
    model, send = faults.model("tiny"), FRONTS[front]
    with faults.healthy_streams("tiny", count=4):
        for count in (CONTEXT, CONTEXT + 1, 2 * CONTEXT, 20 * CONTEXT):
            answer = send(model, body([5] * count, {}), timeout_s=WITHIN_S)
            assert answer.status in (400, None)
            assert f"{count} tokens" in answer.error and f"{CONTEXT} tokens" in answer.error
            answer = send(model, body("!?" * count, {}), timeout_s=WITHIN_S)
            assert answer.status in (400, None) and f"{CONTEXT} tokens" in answer.error
    faults.assert_alive()
    faults.assert_drained("tiny")


# -- F41: prompts without length


def chat(*contents: str) -> dict[str, object]:
    messages = [{"role": "user", "content": content} for content in contents]
    asked = {key: value for key, value in body("", {"temperature": 0}).items() if key != "text_input"}
    return {**asked, "messages": json.dumps(messages)}


@pytest.mark.parametrize("name", ["tiny", "metaspace"])
def test_prompts_that_are_nearly_nothing(faults: FaultServer, name: str):
    """Refused or served, but the same everywhere. A tokenizer that adds BOS makes a token of nothing."""
    model = faults.model(name)
    special = "<|im_start|>" if name == "tiny" else "<s>"
    asks = {text: body(text, {"temperature": 0}) for text in ("", " ", "\n", special, special * 2)}
    asks |= {"ids": body([], {}), "empty content": chat(""), "no messages": chat()}
    with faults.healthy_streams(name):
        for what, asked in asks.items():
            answers = [send(model, asked) for send in FRONTS.values()]
            assert {answer.status for answer in answers[:2]} <= {200, 400}
            assert len({answer.error for answer in answers}) == 1, (what, answers)
            assert len({(tuple(answer.output_ids), answer.num_input) for answer in answers}) == 1, what
            has_tokens = what not in ("", "ids", "no messages") or (what == "" and name == "metaspace")
            assert (answers[0].error is None) is has_tokens, (what, answers[0])
            if has_tokens:
                assert answers[0].num_input >= 1 and answers[0].num_output == 16
    faults.assert_alive()
    faults.assert_drained(name)


def test_one_empty_prompt_among_four(faults: FaultServer):
    known = known_answers(faults.oracle("tiny"), 3, lengths=[4, 30, 9], num_output=12, seed=41)
    asks = {str(index): body(one.prompt, {**GREEDY, "max_tokens": 12}) for index, one in enumerate(known)}
    model = faults.model("tiny")
    with ThreadPoolExecutor(2) as pool:
        healthy = pool.submit(model.grpc_together, asks)
        empty = pool.submit(model.grpc, body([], {}))
    assert "empty" in empty.result().error
    assert [answer.output_ids for answer in healthy.result().values()] == [one.answer for one in known]
