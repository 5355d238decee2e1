"""Text and parameters on the wire with each drafter at work, several tokens at a time: F17, F43 and F52."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import msgspec
import pytest
from transformers import AutoTokenizer

from conch.host.serving.repository import ModelEntry, write_model
from support.drafters import DRAFTERS, KNOWING, drafters, target
from support.fault_checks import FRONTS, GREEDY, FaultServer, body
from support.fault_models import checkpoints
from support.server import RunningServer, wait_until
from support.wire import Answer, ServedModel

pytestmark = pytest.mark.e2e

SETTINGS = {"dtype": "float32", "num_threads": 1, "seed": 1, "kv_cache_memory_bytes": 16 << 20}
PROMPT = "the dog is a dog and the dog is a dog and"
TOKENS = 64
VOCAB = 320


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("drafters")
    for name, speculative in drafters().items():
        said = {key: value for key, value in msgspec.to_builtins(speculative).items() if value is not None}
        own = {"model": target(), **SETTINGS, "speculative_config": said}
        write_model(folder / "models", ModelEntry(name, own))
    log = folder / "server.log"
    with RunningServer(log, repository=folder / "models", start_timeout_s=300) as running:
        yield running


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(target())


@cache
def readable() -> dict[str, float]:
    """Return a bias for tokens that are text by themselves: which stop strings there are is seen in it."""
    tokens = {token: tokenizer().decode([token]) for token in range(3, VOCAB)}
    return {
        str(token): 100.0 for token, text in tokens.items() if text.isascii() and text.isprintable() and text
    }


@pytest.fixture(scope="module")
def free(faults: FaultServer) -> Answer:
    """What the model writes if nothing stops it, without drafts."""
    assert checkpoints()["tiny"] == target()
    return faults.model("tiny").stream(asked({}))


@pytest.fixture(params=DRAFTERS)
def model(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[ServedModel]:
    """A model whose drafter drafts in the test and, unless it never can be, is right now and then."""
    served = ServedModel(server, request.param)
    names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
    before = [served.metric(name) for name in names]
    yield served
    counted = names if request.param in KNOWING else names[:1]
    for name, had in zip(counted, before, strict=False):
        wait_until(lambda name=name, had=had: served.metric(name) > had, 5, f"more {name}")


def asked(sampling: Mapping[str, object], prompt: str = PROMPT) -> dict[str, object]:
    return body(prompt, {**GREEDY, "max_tokens": TOKENS, "logit_bias": readable(), **sampling})


def everywhere(model: ServedModel, requests: Sequence[Mapping[str, object]]) -> list[list[Answer]]:
    """Send each request through each front end, all at once."""
    with ThreadPoolExecutor(12) as pool:
        waiting = [[pool.submit(send, model, each) for send in FRONTS.values()] for each in requests]
        return [[one.result() for one in group] for group in waiting]


def stop_strings(text: str) -> list[str]:
    """Cut some from a text, wherever tokens begin and end."""
    rng = random.Random(52)
    places = [rng.randrange(8, len(text) - 12) for _ in range(10)]
    return [text[at : at + rng.randint(2, 12)] for at in places]


def test_the_stream_is_the_decoding_of_all_tokens(model: ServedModel, free: Answer):
    for answer in everywhere(model, [asked({})])[0]:
        assert answer.output_ids == free.output_ids and answer.finish_reason == "length"
        assert answer.text == tokenizer().decode(free.output_ids, skip_special_tokens=True)
        assert max(answer.counts) > 1 or model.name not in KNOWING, "each token came alone"


def test_text_is_cut_where_a_stop_string_begins(model: ServedModel, free: Answer):
    """In the middle of what one step brought, too; of two, the one that ends first counts."""
    text = free.text
    stops = [[stop] for stop in stop_strings(text)]
    stops += [[stop[:2], stop] for (stop,) in stops[:3]] + [[stop, stop[:2]] for (stop,) in stops[:3]]
    for stop, answers in zip(
        stops, everywhere(model, [asked({"stop": each}) for each in stops]), strict=True
    ):
        ends = {text.find(one) + len(one): text.find(one) for one in sorted(stop, key=len)}
        for answer in answers:
            assert (answer.text, answer.finish_reason) == (text[: ends[min(ends)]], "stop"), stop


def test_near_matches_are_given_away_in_the_end(model: ServedModel, free: Answer):
    """And no more is held back than what may still become a stop string."""
    text = free.text
    stops = [text[-4:] + "☃", text[:-1] + "☃", text[20:26] + "☃"]
    for stop, answers in zip(
        stops, everywhere(model, [asked({"stop": [each]}) for each in stops]), strict=True
    ):
        for answer in answers:
            assert (answer.text, answer.finish_reason) == (text, "length")
        shown, count = "", 0
        for delta, new in zip(answers[-1].deltas, answers[-1].counts, strict=True):
            shown, count = shown + delta, count + new
            known = tokenizer().decode(free.output_ids[:count], skip_special_tokens=True)
            assert known.startswith(shown) and stop.startswith(known[len(shown) :])


def test_a_bias_forces_and_bans(model: ServedModel, free: Answer):
    """After drafts that say something else; ids that there are none of harm nobody."""
    banned = free.output_ids[5]
    biases = [{**readable(), str(banned): -100}, {"17": 100}, readable()]
    asks = [asked({"logit_bias": bias}) for bias in biases]
    bad = [
        asked({key: value, "min_tokens": 3})
        for key, ids in (("stop_token_ids", [[-1], [VOCAB], [2**31]]), ("logit_bias", [{str(VOCAB): 1.0}]))
        for value in ids
    ]
    answers = everywhere(model, [*asks, *bad])
    for first, second, third in zip(*answers[:3], strict=True):
        assert banned not in first.output_ids and first.num_output == TOKENS
        assert second.output_ids == [17] * TOKENS
        assert third.output_ids == free.output_ids
    assert all(answer.error for refused in answers[3:] for answer in refused)
