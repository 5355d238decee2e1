"""All of the training of a head, from questions to a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from conch.api.config import EngineConfig
from conch.api.errors import ConfigError
from conch.training.export import write_head
from conch.training.learning import Course, Teacher
from conch.training.start import new_head
from conch.training.states import Lesson, Target
from conch.training.texts import Text, write_texts
from conch.training.vocabulary import choose_tokens

Progress = Callable[[str, float], None]

_SAVE_EVERY_S = 120.0
_WRITERS = 64
EXAM_DEPTH = 4


@dataclass(frozen=True, slots=True)
class LessonPlan:
    """What a head is made of.

    Attributes
    ----------
    max_tokens
        Of each answer that the target writes.
    draft_vocabulary
        Tokens that the head can draft: those that the target writes most often.
    layers
        Of the target, whose input the head reads, rising; the last must be one past the target's last layer.
        None for three of them, a third of the depth apart.
    held_out
        One text in so many is not learnt from but kept for the exam.
    """

    course: Course
    max_tokens: int = 160
    draft_vocabulary: int = 8192
    layers: tuple[int, ...] | None = None
    held_out: int = 20


@dataclass(frozen=True, slots=True)
class Result:
    """A head that was trained.

    Attributes
    ----------
    hit_rates
        For 1 and more drafts, in what share of steps all of them were right, over texts held out.
    recipe
        How it was made.
    """

    hit_rates: tuple[float, ...]
    recipe: dict[str, Any]

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step brings on average, its own one among them."""
        return 1 + sum(self.hit_rates)


def train_head(
    config: EngineConfig,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    plan: LessonPlan,
    output: Path,
    progress: Progress,
) -> Result:
    """Let the target answer `prompts`, train a head on that, and write it to `output`, now and then too.

    Parameters
    ----------
    config
        The target.
    folder
        Its checkpoint.
    progress
        Told a stage and the share of it that is done.
    """
    writers = msgspec.structs.replace(config, max_num_seqs=_WRITERS, speculative_config=None)
    texts = write_texts(writers, prompts, plan.max_tokens, lambda share: progress("the target writes", share))
    return train_on(texts, folder, plan, output, progress)


def train_on(
    texts: Sequence[Text], folder: Path, plan: LessonPlan, output: Path, progress: Progress
) -> Result:
    """Train a head on texts that the target in `folder` has written."""
    held, learnt = texts[:: plan.held_out], [t for i, t in enumerate(texts) if i % plan.held_out]
    if not learnt:
        raise ConfigError(f"{len(texts)} texts are too few to learn from")
    target = Target(folder)
    count = target.config.num_hidden_layers
    layers = plan.layers or (count // 3, 2 * count // 3, count)

    def read(some: Sequence[Text], stage: str) -> list[Lesson]:
        return target.lessons(some, layers, lambda share: progress(stage, share))

    exam, lessons = read(held, "reads the exam"), read(learnt, "reads what it has written")
    vocab_size = len(target.head)
    drafted = choose_tokens(learnt, vocab_size, min(plan.draft_vocabulary, vocab_size))
    head = new_head(target, lessons, plan.course.seed)
    teacher = Teacher(head, target, drafted)
    recipe = {
        "vocab_size": vocab_size,
        "layers": list(layers),
        "texts": len(learnt),
        "tokens": sum(len(text.token_ids) for text in learnt),
        **asdict(plan.course),
        "max_tokens": plan.max_tokens,
        "draft_vocabulary": len(drafted),
        "states": "bfloat16",
    }
    saved_s = time.monotonic()

    def learn(share: float, loss: float) -> None:
        nonlocal saved_s
        progress(f"the head learns (loss {loss:.2f})", share)
        if time.monotonic() - saved_s > _SAVE_EVERY_S:
            saved_s = time.monotonic()
            write_head(output, head, drafted, layers, {**recipe, "share_done": round(share, 3)})

    steps = teacher.teach(lessons, plan.course, learn)
    hit_rates = tuple(teacher.examine(exam, EXAM_DEPTH))
    result = Result(hit_rates, {**recipe, "steps": steps, "hit_rates": [round(r, 4) for r in hit_rates]})
    write_head(output, head, drafted, layers, result.recipe)
    return result
