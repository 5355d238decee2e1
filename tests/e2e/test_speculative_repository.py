"""The ready repository with a trained EAGLE head: it drafts at once, and mostly what the model would say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.fault_checks import body
from support.server import RunningServer, wait_until
from support.wire import ServedModel

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository" / "speculative_eagle"
QUESTIONS = ("Tell me about the history of olive oil.", "Give me three tips about origami.")
TOKENS = 96


def test_the_head_drafts_for_its_model(server_log: Path):
    recipe = json.loads((REPOSITORY / "smollm2" / "1" / "head" / "recipe.json").read_text())
    with RunningServer(server_log, repository=REPOSITORY) as server:
        model = ServedModel(server, "smollm2")
        for question in QUESTIONS:
            said = json.dumps([{"role": "user", "content": question}])
            asked = body("", {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}, messages=said)
            del asked["text_input"]
            answer = model.stream(asked)
            assert answer.error is None and answer.num_output == TOKENS
        wait_until(lambda: model.metric("spec_decode_num_drafts_total") > 0, 5, "drafts")
        drafts = model.metric("spec_decode_num_drafts_total")
        drafted = model.metric("spec_decode_num_draft_tokens_total")
        accepted = model.metric("spec_decode_num_accepted_tokens_total")
    assert drafts > 20
    right = np.cumsum([0.0, *recipe["hit_rates"][:3]])  # of none to three: back-off may draft fewer
    expected = np.interp(drafted / drafts, range(4), right)
    assert accepted / drafts > 0.5 * expected, "far worse than in its exam"
