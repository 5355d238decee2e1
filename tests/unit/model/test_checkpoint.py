"""From the `model` of a configuration to a folder, made once and whole."""

from __future__ import annotations

import json
import shutil
import threading

import pytest

from conch.api import CheckpointError
from conch.model.checkpoint import resolve_checkpoint, weight_files
from conch_kernels.cache import cached_folder
from support.tiny import tiny_checkpoint
from support.worker_driver import config_for, silent


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_whole_folder_is_used_as_it_is(own_cache):
    folder = tiny_checkpoint("llama")
    assert resolve_checkpoint(config_for(folder), silent) == folder.resolve()
    assert not own_cache.exists()


@pytest.mark.parametrize("name", ["nowhere", "organisation/model"])
def test_a_missing_path_is_not_looked_for_elsewhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="never downloads"):
        resolve_checkpoint(config_for(name), silent)


def test_missing_files_are_named(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve_checkpoint(config_for(folder), silent)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="safetensors"):
        resolve_checkpoint(config_for(folder), silent)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "one.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"lacks two\.safetensors"):
        weight_files(folder)


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1, "b": "c"}}']
)
def test_an_index_that_is_none_is_refused_by_name(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is not an index of weights"):
        weight_files(tmp_path)


def test_a_missing_tokenizer_json_is_made_once(tmp_path, own_cache):
    from tokenizers import Tokenizer
    from transformers import GPT2Tokenizer

    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    model = json.loads(tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": GPT2Tokenizer.__name__}))
    made = resolve_checkpoint(config_for(folder), silent)
    assert made.parent == own_cache and made == resolve_checkpoint(config_for(folder), silent)
    twin = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in ("the quick brown fox", "  12 é 日本\n"):
        assert twin.encode(text).ids == tokenizer.encode(text).ids
    assert (made / "model.safetensors").resolve() == (folder / "model.safetensors").resolve()


def test_no_tokenizer_at_all_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        resolve_checkpoint(config_for(folder), silent)


def test_two_builders_at_once_both_succeed(own_cache):
    barrier = threading.Barrier(4)
    folders = []

    def build(folder):
        (folder / "first").write_text("1")
        barrier.wait()  # all are in the middle of it
        (folder / "second").write_text("2")

    threads = [threading.Thread(target=lambda: folders.append(cached_folder("key", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [own_cache / "key"] * 4
    assert sorted(path.name for path in own_cache.iterdir()) == ["key"]
    assert sorted(path.name for path in (own_cache / "key").iterdir()) == ["first", "second"]


def test_a_failed_build_leaves_nothing(own_cache):
    def build(folder):
        (folder / "half").write_text("1")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        cached_folder("key", build)
    assert list(own_cache.iterdir()) == []
