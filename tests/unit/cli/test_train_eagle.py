"""``conch train-eagle``: what it refuses before anything is loaded, and what it asks a model."""

from __future__ import annotations

import pytest

from conch.cli.main import main
from conch.training.prompts import make_prompts
from support.tiny import tiny_checkpoint


@pytest.mark.parametrize("option", ["--minutes", "--prompts", "--max-tokens", "--draft-vocabulary"])
def test_nothing_is_made_of_nothing(option, tmp_path, capsys):
    model = str(tiny_checkpoint("llama"))
    assert main(["train-eagle", "--model", model, option, "0", str(tmp_path / "head")]) == 1
    assert option in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_questions_are_many_and_repeatable():
    questions = make_prompts(600, 1)
    assert len(questions) == 600 and len(set(questions)) > 590
    assert questions == make_prompts(600, 1) != make_prompts(600, 2)
    assert sum("\n\n" in question for question in questions) > 200, "text of packages"
