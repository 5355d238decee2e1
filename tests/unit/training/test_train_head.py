"""A head that is trained for seconds drafts for its target, and as well as its exam says."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from conch.api import ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from conch.engine.local import LocalEngine
from conch.training.head import TrainableHead
from conch.training.learning import Course, Teacher
from conch.training.lesson_plan import EXAM_DEPTH, LessonPlan, train_head, train_on
from conch.training.start import new_head
from conch.training.states import Target
from conch.training.texts import Text
from conch.training.vocabulary import choose_tokens
from conch.worker import prepare
from support.eagle import memoryless_checkpoint
from support.tiny import tiny_checkpoint

VOCAB = 64
PLAN = LessonPlan(
    Course(minutes=0.15, rate=3e-3), max_tokens=24, draft_vocabulary=48, layers=(0, 1, 2), held_out=10
)


def nothing(*_):
    pass


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_head_learns(tmp_path, one_thread):
    config = EngineConfig(
        model=str(tiny_checkpoint("llama", vocab_size=VOCAB)), dtype="float32", num_threads=1, seed=1
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 9))] for _ in range(200)]
    stages = []
    result = train_head(
        config,
        prepare(config, nothing).folder,
        prompts,
        PLAN,
        tmp_path,
        lambda stage, share: stages.append(stage),
    )
    assert {stage.partition(" (")[0] for stage in stages} == {
        "the target writes",
        "reads the exam",
        "reads what it has written",
        "the head learns",
    }
    assert len(result.hit_rates) == EXAM_DEPTH and result.acceptance_length > 1.2
    assert list(result.hit_rates) == sorted(result.hit_rates, reverse=True)
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert recipe["texts"] > 100 and recipe["steps"] > 10 and recipe["draft_vocabulary"] == 48
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["fc.weight"].dtype is torch.bfloat16 and int(stored["t2d"].sum()) == 48
    spec = SpeculativeConfig(
        method="eagle", model=str(tmp_path), num_speculative_tokens=EXAM_DEPTH, backoff=False
    )
    drafting = EngineConfig(
        model=config.model, dtype="float32", num_threads=1, seed=1, speculative_config=spec
    )
    fresh = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 9))] for _ in range(40)]
    with LocalEngine(drafting) as engine:
        engine.generate(fresh, [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * 40)
        stats = engine.stats()
    length = 1 + stats.drafts_accepted / stats.drafts
    assert length > 0.75 * result.acceptance_length


def test_what_is_written_most_is_drafted():
    texts = [Text((9, 9, 5, 5, 5, 7), 2), Text((9, 5, 7), 1)]
    assert choose_tokens(texts, 16, 2).tolist() == [5, 7]


def test_too_little_to_learn_from(tmp_path):
    with pytest.raises(ConfigError, match="too few"):
        train_on([Text((1, 2, 3), 1)], tmp_path, PLAN, tmp_path, nothing)


def test_a_head_begins_with_what_a_regression_says():
    """Of a model whose next token depends on the last one alone, which is linear but for norms."""
    target = Target(memoryless_checkpoint())
    with torch.inference_mode():
        following = target.module(input_ids=torch.arange(320)[:, None]).logits[:, 0].argmax(-1).tolist()
    rng, texts = random.Random(2), []
    for _ in range(200):
        chain = [rng.randrange(320)]
        while len(chain) < 12:
            chain.append(following[chain[-1]])
        texts.append(Text(tuple(chain), 1))
    lessons = target.lessons(texts, (1, 2), nothing)
    head = new_head(target, lessons[:150], seed=1)
    random_head = TrainableHead(head.shape)
    begun, unbegun = (
        Teacher(each, target, torch.arange(320)).examine(lessons[150:], 1)[0] for each in (head, random_head)
    )
    assert begun > 0.1 > 5 * unbegun, "a third of the head's heads are left to chance"
