"""The config of a GGUF file, by the tables that transformers reads such files with."""

from __future__ import annotations

from typing import Any

from conch.model.gguf_file import GgufFile


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return what config.json says of the model, architecture included."""
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    facts: dict[str, Any] = {
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": len(file.metadata.get("tokenizer.ggml.tokens", ())),
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(file.metadata["general.architecture"], {}),
    }
    for key, value in file.metadata.items():
        room, _, rest = key.partition(".")
        name = GGUF_CONFIG_MAPPING.get(room, {}).get(rest)
        if isinstance(name, str):
            facts[name] = value
    config: dict[str, Any] = AutoConfig.for_model(**facts).to_dict()
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    return config
