"""Tiny random checkpoints in Hugging Face layout, with tokenizers, made on demand and cached.

Weights are wide, so that greedy choices are clear: embeddings and heads have a standard deviation of 0.5 and
matrices keep the scale of what they multiply. The same arguments always give the same files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch

VERSION = 1
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog is not so lazy any more",
    "one two three four five six seven eight nine ten, again and again and again",
    "there is a house in the town where the river meets the sea; they call it the rising sun",
    "def main(): return [index for index in range(10) if index % 2 == 0]",
]

MERGES = [
    ("▁", "t"),
    ("▁t", "h"),
    ("▁th", "e"),
    ("▁", "a"),
    ("▁a", "n"),
    ("▁an", "d"),
    ("▁", "o"),
    ("i", "n"),
    ("in", "g"),
    ("e", "r"),
    ("o", "n"),
    ("r", "e"),
    ("▁", "w"),
    ("o", "u"),
    ("▁", "i"),
    ("▁i", "s"),
    ("▁", "d"),
    ("▁d", "o"),
    ("▁do", "g"),
]

BASE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 24},
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {},
    "olmo2": {"num_key_value_heads": 4},
    "olmo3": {"num_key_value_heads": 4, "sliding_window": 24},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 96},
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
    },
    "cohere2": {
        "head_dim": 16,
        "sliding_window": 24,
        "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def tiny_checkpoint(family: str, *, seed: int = 0, tokenizer: str = "byte_level", **overrides) -> Path:
    """Return the folder of a tiny model; `overrides` are keys of its config."""
    asked = json.dumps([VERSION, family, seed, tokenizer, overrides], sort_keys=True)
    name = f"{family}-{hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()}"
    return _made_once(name, lambda folder: _write(folder, family, seed, tokenizer, overrides))


def tiny_root() -> Path:
    """Return the folder that holds what tests make once and keep."""
    root = Path(tempfile.gettempdir()) / f"conch-tiny-{os.getuid()}"
    root.mkdir(exist_ok=True)
    return root


def _made_once(name: str, make) -> Path:
    root = tiny_root()
    target = root / name
    if not target.is_dir():
        scratch = Path(tempfile.mkdtemp(dir=root))
        make(scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(scratch)
    return target


def _write(folder: Path, family: str, seed: int, tokenizer: str, overrides: dict) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family], **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    widen(model, seed)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder)
    WRITERS[tokenizer](folder)


def widen(model, seed: int) -> None:
    """Draw all weights anew, in the order of their names."""
    make = torch.Generator().manual_seed(seed)
    vocab = model.config.vocab_size
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=make)
            if weight.dim() == 1:
                centre = weight.mean().round()  # 1 for most norms, 0 for biases and Gemma's norms
                weight.copy_(centre + 0.1 * noise)
            elif vocab in weight.shape or "embed" in name:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise / math.sqrt(weight.shape[-1]))
        for name, bias in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):  # DeepSeek's, which chooses experts only
                bias.copy_(0.1 * torch.randn(bias.shape, generator=make))


def write_byte_level(folder: Path) -> None:
    """Write a byte-level BPE of 320 tokens, as GPT-2's: any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    assert tokenizer.get_vocab_size() == 320
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder, bos_token=IM_START, eos_token=IM_END, pad_token=END_OF_TEXT)


def write_metaspace(folder: Path) -> None:
    """Write a BPE of 320 tokens like Llama 2's: spaces are marks, unknown characters bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += list("abcdefghijklmnopqrstuvwxyz.,")
    merges = []
    for left, right in MERGES:
        merges.append((left, right))
        pieces.append(left + right)
    pieces += [f"<extra_{index}>" for index in range(320 - len(pieces))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _write_tokenizer_config(folder: Path, **tokens: str) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


WRITERS = {"byte_level": write_byte_level, "metaspace": write_metaspace}
