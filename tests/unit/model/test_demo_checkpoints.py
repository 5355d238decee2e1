"""Small checkpoints with random weights, made on the spot."""

from __future__ import annotations

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from conch.api import EngineConfig
from conch.api.errors import ConfigError
from conch.api.model_reference import DEMOS, resolve_model_reference
from conch.model.checkpoint import resolve_checkpoint
from conch.model.describe import describe
from support.oracle import Oracle


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("family", DEMOS)
def test_each_demo_is_made_once_and_can_be_served(cache, family):
    config = EngineConfig(model=f"demo:{family}", device="cpu")
    folder = resolve_checkpoint(config, lambda stage, fraction: None)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder.parent == cache
    assert resolve_checkpoint(config, lambda stage, fraction: None) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    spec = describe(folder, config).spec
    assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.num_layers) == (8, 4, 4)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == spec.vocab_size
    assert tokenizer.decode(tokenizer.encode("grüße, 你好").ids) == "grüße, 你好"
    written = tokenizer.decode(Oracle(folder).greedy(tokenizer.encode("The sea").ids, 24))
    assert written.isascii() and written.isprintable() and len(set(written)) > 4, written


def test_the_same_name_means_the_same_weights(tmp_path, monkeypatch):
    found = []
    for place in ("one", "other"):
        monkeypatch.setenv("CONCH_CACHE", str(tmp_path / place))
        folder = resolve_checkpoint(EngineConfig(model="demo:llama"), lambda stage, fraction: None)
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            found.append(file.get_tensor("model.layers.0.mlp.up_proj.weight"))
    assert found[0].std() > 0
    assert found[0].equal(found[1])


def test_an_unknown_demo_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="'demo:lama'; there are demo:llama, demo:mixtral"):
        resolve_model_reference("demo:lama")
