"""Small checkpoints with random weights, made on the spot: they make no sense, but they divide.

For topologies that no model at hand fits: as many heads and experts as ranks could want, in a second, without
a download. The same name always gives the same weights. What they write is noise of printable characters.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from conch.api.model_reference import DEMO_SCHEME
from conch_kernels.cache import cached_folder

_FORMAT = 1
"""Part of the cache key: grows when what is made of a name changes."""
_END, _BEGIN_TURN, _END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (_END, _BEGIN_TURN, _END_TURN)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PRINTABLE = frozenset(map(chr, range(33, 127))) | {"Ġ"}
"""Pieces that mean themselves, and the space."""
_SEED = 8
_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
_OF_FAMILY: dict[str, dict[str, Any]] = {"llama": {}, "mixtral": _EXPERTS}


def demo_checkpoint(reference: str) -> Path:
    """Return the folder of ``demo:FAMILY``, which is made in the cache where it is missing."""
    family = reference.removeprefix(DEMO_SCHEME)
    return cached_folder(f"demo{_FORMAT}-{family}", lambda folder: _write(folder, family))


def _write(folder: Path, family: str) -> None:
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = _write_tokenizer(folder)
    end = vocabulary[_END]
    shape = {**_SHAPE, **_OF_FAMILY[family], "vocab_size": len(vocabulary)}
    config = AutoConfig.for_model(family, **shape, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model, [index for piece, index in vocabulary.items() if piece in _PRINTABLE])
    config.architectures, config.dtype = [type(model).__name__], "float32"
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def _draw(model: Any, said: list[int]) -> None:  # noqa: ANN401 - transformers is not typed
    """Draw weights wide enough for answers to differ from token to token; only some tokens are ever said."""
    source = torch.Generator().manual_seed(_SEED)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                width = 0.5 if len(weight) == len(head) else 1 / math.sqrt(weight.shape[-1])
                weight.copy_(width * torch.randn(weight.shape, generator=source))
        is_silent = torch.ones(len(head), dtype=torch.bool)
        is_silent[said] = False
        head[is_silent] = 0.0


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer of bytes, which takes any text; returns its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _CHAT_TEMPLATE,
        "bos_token": _END,
        "eos_token": _END_TURN,
        "pad_token": _END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=2), encoding="utf-8")
    return vocabulary
