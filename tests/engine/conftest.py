"""Checkpoints for engine tests."""

from __future__ import annotations

import pytest

from support.tiny import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_llama():
    return tiny_checkpoint("llama")
