"""What is found out about a model before its weights are read, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest

from conch.api import CheckpointError, ConfigError
from conch.worker import prepare
from support.tiny import tiny_checkpoint
from support.worker_driver import config_for, silent


def spec_of(folder, **settings):
    return prepare(config_for(folder, **settings), silent).spec


def test_llama():
    spec = spec_of(tiny_checkpoint("llama"))
    attention = spec.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (4, 2, 12)
    assert attention.windows == (None, None) and spec.num_layers == 2
    assert (attention.softcap, attention.sinks, attention.device) == (False, False, "cpu")
    assert spec.vocab_size == 320 and spec.max_model_len == 512
    assert spec.eos_token_ids == {0, 2}
    assert "LlamaForCausalLM" in spec.name


def test_windows_softcaps_and_sinks():
    assert spec_of(tiny_checkpoint("mistral")).attention.windows == (24, 24)
    gemma2 = spec_of(tiny_checkpoint("gemma2")).attention
    assert gemma2.windows == (24, None) and gemma2.softcap
    assert spec_of(tiny_checkpoint("gemma3_text")).attention.windows == (24, None)
    gpt_oss = spec_of(tiny_checkpoint("gpt_oss")).attention
    assert gpt_oss.windows == (24, None) and gpt_oss.sinks


def write_config(folder, model_type, **settings):
    folder.mkdir()
    shutil.copy(tiny_checkpoint("llama") / "model.safetensors", folder)
    shutil.copy(tiny_checkpoint("llama") / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **settings}))
    return folder


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        ("falcon", SMALL, "attention interface"),
        ("bloom", {"n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 100}, "attention interface"),
        ("mamba", {**SMALL, "max_position_embeddings": 64}, "state"),
        ("qwen3_next", {**SMALL, "num_hidden_layers": 4}, "linear_attention|state"),
        ("llama4_text", SMALL, "chunked_attention"),
        ("t5", {}, "encoder-decoder"),
        ("no_such_model", {}, "no_such_model"),
    ],
)
def test_refused_with_a_reason(tmp_path, model_type, settings, why):
    folder = write_config(tmp_path / "model", model_type, **settings)
    with pytest.raises(CheckpointError, match=why):
        prepare(config_for(folder, max_model_len=32), silent)


def test_quantised_weights_are_refused(tmp_path):
    folder = write_config(
        tmp_path / "model", "llama", quantization_config={"quant_method": "gptq", "bits": 4}
    )
    with pytest.raises(CheckpointError, match="quantised"):
        prepare(config_for(folder), silent)


def test_code_of_a_checkpoint_does_not_run(tmp_path):
    folder = write_config(
        tmp_path / "model", "own", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    )
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(CheckpointError):
        prepare(config_for(folder), silent)
    assert not (tmp_path / "ran").exists()


def test_context_length():
    llama = tiny_checkpoint("llama")
    assert spec_of(llama, max_model_len=64).max_model_len == 64
    with pytest.raises(ConfigError, match="512"):
        spec_of(llama, max_model_len=513)
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    stretched = tiny_checkpoint("llama", rope_parameters=yarn)
    assert spec_of(stretched).max_model_len == 512
    assert spec_of(stretched, max_model_len=2048).max_model_len == 2048
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(ConfigError, match="512"):
        spec_of(tiny_checkpoint("llama", rope_parameters=dynamic), max_model_len=600)


def test_eos_ids_fall_back_to_the_config(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 7}))
    assert spec_of(folder).eos_token_ids == {7}
    path.unlink()
    assert spec_of(folder).eos_token_ids == {2}


def test_fingerprint_tells_weights_apart(tmp_path):
    folder = tiny_checkpoint("llama")
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    assert spec_of(folder).fingerprint == spec_of(copy).fingerprint
    assert spec_of(folder).fingerprint != spec_of(folder, dtype="bfloat16").fingerprint
    assert spec_of(folder).fingerprint != spec_of(folder, kv_cache_dtype="int8").fingerprint
    assert spec_of(folder).fingerprint != spec_of(tiny_checkpoint("llama", seed=1)).fingerprint
