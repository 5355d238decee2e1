"""Parameters on the wire: F11, F22, F34, F35, F42 and F43."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.fault_checks import FRONTS, GREEDY, FaultServer, body, known_answers, wait_for_metric

pytestmark = pytest.mark.e2e

VOCAB = 320
PROMPT = [40, 50, 60, 70, 80]
FRONT_NAMES = list(FRONTS)


@pytest.fixture(scope="module")
def clear(faults: FaultServer):
    """A prompt whose greedy answer is clear by far, even at the smallest temperatures that draw."""
    return known_answers(faults.oracle("tiny"), 1, lengths=[12], num_output=16, seed=5, margin=0.1)[0]


def send(faults: FaultServer, front: str, request, model: str = "tiny"):
    return FRONTS[front](faults.model(model), request)


def assert_refused(answer, *words: str) -> None:
    assert answer.error is not None, answer
    assert answer.status in (400, None)
    for word in words:
        assert word in answer.error, answer.error


# -- F11: the same intent in every form


@pytest.fixture(scope="module")
def intent(faults: FaultServer):
    """Settings of which each one matters to the answer."""
    said = {"temperature": 0.75, "top_p": 0.5, "seed": 11, "max_tokens": 24, "ignore_eos": True}
    free = faults.model("tiny").stream(body(PROMPT, said))
    said["stop_token_ids"] = [free.output_ids[17]]
    return said


def test_each_setting_of_the_intent_matters(faults, intent):
    whole = faults.model("tiny").stream(body(PROMPT, intent))
    assert 1 < whole.num_output <= 18 and whole.finish_reason == "stop"
    for key in ("temperature", "top_p", "seed", "max_tokens", "stop_token_ids"):
        changed = {**intent, key: 3} if key in ("max_tokens", "seed") else {**intent}
        if changed == intent:
            del changed[key]
        assert faults.model("tiny").stream(body(PROMPT, changed)).output_ids != whole.output_ids, key


@pytest.mark.parametrize("front", FRONT_NAMES)
def test_the_same_intent_in_every_form(faults, intent, front):
    plain = body(PROMPT, {})
    plain.pop("sampling_parameters")
    listed = {**intent, "stop_token_ids": json.dumps(intent["stop_token_ids"])}
    as_text = {
        key: "true" if value is True else str(value) if not isinstance(value, list) else json.dumps(value)
        for key, value in intent.items()
    }
    counted = {**listed, "seed": 11.0, "max_tokens": 24.0, "ignore_eos": 1}
    halves = {**plain, "sampling_parameters": json.dumps({k: intent[k] for k in ("top_p", "stop_token_ids")})}
    forms = {
        "serialized": body(PROMPT, intent),
        "serialized strings": body(PROMPT, as_text),
        "parameters": {**plain, "parameters": listed},
        "strings": {**plain, "parameters": as_text},
        "floats": {**plain, "parameters": counted},
        "both": {**halves, "parameters": {k: v for k, v in listed.items() if k != "stop_token_ids"}},
    }
    if front != "grpc":
        forms["top level"] = {**plain, **listed}
    answers = {name: send(faults, front, form) for name, form in forms.items()}
    expected = faults.model("tiny").stream(body(PROMPT, intent)).output_ids
    assert {name: answer.output_ids for name, answer in answers.items()} == dict.fromkeys(forms, expected)


@pytest.mark.parametrize("front", FRONT_NAMES)
def test_zero_is_not_unset(faults, clear, front):
    seeded = {"seed": 3, "max_tokens": "3", "ignore_eos": "true"}
    drawn = send(faults, front, body(clear.prompt, seeded))
    assert drawn.num_output == 3 and drawn.output_ids != clear.answer[:3], "the draw is the likeliest"
    for zero in (0, "0", 0.0, "0.0"):
        for form in (
            body(clear.prompt, {**seeded, "temperature": zero}),
            body(clear.prompt, {}, parameters={**seeded, "temperature": zero}),
        ):
            assert send(faults, front, form).output_ids == clear.answer[:3]


@pytest.mark.parametrize("front", FRONT_NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("top_p", [0.5]),
        ("max_tokens", "many"),
        ("max_tokens", True),
        ("seed", {"a": 1}),
        ("stop", [1]),
        ("stop_token_ids", "12"),
        ("ignore_eos", "yes"),
        ("logit_bias", [1]),
        ("max_token", 5),
    ],
)
def test_what_cannot_be_read_names_its_field(faults, front, key, value):
    assert_refused(send(faults, front, body(PROMPT, {key: value})), key)
    if isinstance(value, (str, bool, int)):
        assert_refused(send(faults, front, body(PROMPT, {}, parameters={key: value})), key)


# -- F35 and F22: budgets


@pytest.mark.parametrize("front", FRONT_NAMES)
@pytest.mark.parametrize(
    ("budget", "expected"),
    [(0, None), (-1, None), (-2, None), (1.5, None), ("", None), (1, 1), ("7", 7), (None, 16)]
    + [(huge, math.inf) for huge in (1 << 31, 1 << 63, "99999999999999999999")],
)
def test_budgets(faults, front, budget, expected):
    context = 64
    answer = send(faults, front, body(PROMPT, {**GREEDY, "max_tokens": budget}), "context_64")
    if expected is None:
        assert_refused(answer, "max_tokens")
    else:
        assert answer.error is None
        assert answer.num_output == len(answer.output_ids) == min(expected, context - len(PROMPT))
        assert answer.finish_reason == "length"
        assert answer.num_input == len(PROMPT)
    faults.assert_drained("context_64")


def test_the_reason_is_the_truth_around_the_natural_end(faults):
    model = faults.model("smollm2")
    chat = [{"role": "user", "content": "Hi"}]
    request = body("", {})
    del request["text_input"]
    request["messages"] = json.dumps(chat)

    def ask(**sampling):
        asked = {**request, "sampling_parameters": json.dumps({"temperature": 0, **sampling})}
        return model.stream(asked)

    whole = ask(max_tokens=400)
    assert whole.finish_reason == "stop"
    length = whole.num_output
    assert length > 4 and length == len(whole.output_ids)
    budgets = {1: "length", 2: "length", length - 1: "length", length: "stop", length + 1: "stop"}
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(budgets, pool.map(lambda n: ask(max_tokens=n), budgets), strict=True))
        unlimited = pool.submit(ask).result()
        endless = pool.submit(ask, ignore_eos=True, max_tokens=length + 3).result()
    assert {n: answer.finish_reason for n, answer in answers.items()} == budgets
    for budget, answer in answers.items():
        assert answer.num_output == min(budget, length)
        assert answer.output_ids == whole.output_ids[:budget]
    assert endless.num_output == length + 3, "the end was not one of the model's"
    assert unlimited.num_output == min(16, length)
    assert unlimited.finish_reason == ("length" if length > 16 else "stop")


# -- F34: the end of the context


@pytest.mark.parametrize("front", FRONT_NAMES)
@pytest.mark.parametrize("length", [61, 62, 63, 64, 65])
def test_the_context_is_a_hard_stop(faults, front, length):
    prompt = [(7 * index) % 300 + 3 for index in range(length)]
    reference = faults.oracle("context_64").greedy(prompt, 3)
    for budget in (1, 10, 1000):
        answer = send(faults, front, body(prompt, {**GREEDY, "max_tokens": budget}), "context_64")
        if length >= 64:
            assert_refused(answer, f"{length} tokens", "64 tokens")
        else:
            assert answer.output_ids == reference[: min(budget, 64 - length)]
            assert answer.finish_reason == "length"
    faults.assert_drained("context_64")


# -- F42: extremes of the sampling parameters

NAN = float("nan")
SAME_AS_GREEDY = [
    *({"temperature": value} for value in (0, -0.0, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)),
    *({"top_p": value} for value in (0, 1e-9)),
    {"top_k": 1},
    {"min_p": 1},
]
SAME_AS_PLAIN = [
    {"top_p": 1},
    {"min_p": 0},
    *({"top_k": value} for value in (-1, 0, VOCAB, VOCAB + 1, 1 << 31)),
    {"repetition_penalty": 1},
    {"temperature": 1},
    {"presence_penalty": 0, "frequency_penalty": 0},
    {"logit_bias": {}},
]
REFUSED = [
    *(("temperature", value) for value in (-1, NAN, math.inf, -math.inf, 1e38, "nan", "inf")),
    *(("top_p", value) for value in (1.0001, -0.1, NAN, "nan")),
    *(("min_p", value) for value in (1.1, -0.1, NAN)),
    *(("top_k", value) for value in (-2, 1.5, NAN)),
    *(("repetition_penalty", value) for value in (0, -1, NAN, math.inf)),
    *(("presence_penalty", value) for value in (2.1, NAN)),
    *(("frequency_penalty", value) for value in (-2.1, NAN)),
]


def test_extremes_that_are_greedy(faults, clear):
    model = faults.model("tiny")
    for settings in SAME_AS_GREEDY:
        answer = model.generate(body(clear.prompt, {"seed": 3, "max_tokens": 16, **settings}))
        assert answer.output_ids == clear.answer, settings


def test_values_that_are_off(faults):
    model = faults.model("tiny")
    plain = {"seed": 3, "max_tokens": 16, "ignore_eos": True}
    expected = model.generate(body(PROMPT, plain)).output_ids
    for settings in SAME_AS_PLAIN:
        assert model.generate(body(PROMPT, {**plain, **settings})).output_ids == expected, settings
    assert model.generate(body(PROMPT, {**plain, "top_k": 2})).output_ids != expected


def test_extremes_are_refused_and_harm_nobody(faults):
    model = faults.model("tiny")
    refused = model.metric("request_failure_total", reason="invalid_argument")
    with faults.healthy_streams("tiny"):
        for key, value in REFUSED:
            assert_refused(model.generate(body(PROMPT, {key: value})), key)
    faults.assert_alive()
    faults.assert_drained("tiny")
    wait_for_metric(model, "request_failure_total", refused + len(REFUSED), reason="invalid_argument")


def test_penalties_of_any_size_harm_nobody(faults):
    model = faults.model("tiny")
    with faults.healthy_streams("tiny"):
        for penalty in (1e-9, 1e-38, 5e-324, 1e38, 1.7e308):
            for temperature in (0, 1):
                settings = {"repetition_penalty": penalty, "temperature": temperature, "max_tokens": 8}
                answer = model.generate(body(PROMPT, {**settings, "ignore_eos": True}))
                assert answer.error is not None or answer.num_output == 8
    faults.assert_alive()
    faults.assert_drained("tiny")


# -- F43: token ids outside the vocabulary


@pytest.mark.parametrize("front", FRONT_NAMES)
def test_ids_outside_the_vocabulary(faults, front):
    with faults.healthy_streams("tiny", count=8):
        for token_id in (-1, VOCAB, VOCAB + 1000, 1 << 31, "x", 1.5):
            stops = {"stop_token_ids": [token_id], "min_tokens": 3}
            bias = {"logit_bias": {str(token_id): 1}, "min_tokens": 3}
            assert_refused(send(faults, front, body(PROMPT, stops)), "stop_token_ids")
            assert_refused(send(faults, front, body(PROMPT, bias)), "logit_bias")
            if isinstance(token_id, int):
                assert_refused(send(faults, front, body([5, token_id], {})), "input_ids", str(token_id))
        for token_id in (0, VOCAB - 1, "12"):
            stops = {"stop_token_ids": [token_id], "min_tokens": 3, "logit_bias": {str(token_id): 1}}
            assert send(faults, front, body([5, int(token_id)], stops)).error is None
    faults.assert_alive()


def test_a_bias_forces_and_bans_exactly(faults, clear):
    model = faults.model("tiny")
    for token_id in (3, VOCAB - 1):
        settings = {"max_tokens": 6, "ignore_eos": True, "seed": 1, "logit_bias": {str(token_id): 100}}
        assert model.generate(body(PROMPT, settings)).output_ids == [token_id] * 6
    banned = set(clear.answer)
    settings = {**GREEDY, "max_tokens": 16, "logit_bias": {str(token_id): -100 for token_id in banned}}
    assert not banned & set(model.generate(body(clear.prompt, settings)).output_ids)


def test_stop_ids_wait_for_min_tokens(faults, clear):
    first = clear.answer[0]
    settings = {**GREEDY, "max_tokens": 16, "stop_token_ids": [first]}
    model = faults.model("tiny")
    assert model.generate(body(clear.prompt, settings)).num_output == 1
    later = model.generate(body(clear.prompt, {**settings, "min_tokens": 6}))
    assert later.num_output >= 6 and first not in later.output_ids[:6]
