"""What a model is, found out by running it once without weights.

A model is built on the meta device, where a forward pass computes shapes only (some 30 ms), and its attention
is answered by an object that takes notes. So heads, windows, soft caps and sinks are those that the model
really asks for, and a model whose layers do not all come to our attention is refused before it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conch.api import AttentionSpec, CheckpointError, EngineConfig, ModelSpec
from conch.model.attention import IMPLEMENTATION, STEP_KEYWORD, register_attention
from conch.model.limits import choose_dtype, choose_max_model_len, read_eos_token_ids, resolve_device
from conch.model.rope import pin_rope
from conch_kernels.cache import digest_of_stats

_ATTENTION_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint understood, nothing of its weights read.

    Attributes
    ----------
    folder
        In Hugging Face layout.
    hf_config
        transformers' config object.
    model_class
        transformers' class.
    meta
        Of that class, without memory: on the meta device, RoPE pinned.
    keep_fp32
        Parts of parameter names that stay in fp32 whatever the dtype.
    spec
        What plugins may know.
    """

    folder: Path
    hf_config: Any
    model_class: Any
    meta: Any
    keep_fp32: frozenset[str]
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class _LayerNotes:
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    window: int | None
    softcap: bool
    sinks: bool


class _Recorder:
    """A step that answers with shapes and notes what each layer asked for."""

    def __init__(self) -> None:
        self.layers: dict[int, _LayerNotes] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        constants: Mapping[str, Any],
    ) -> torch.Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise CheckpointError("its attention layers are not numbered each by its own")
        if not getattr(module, "is_causal", True):
            raise CheckpointError("it has attention that is not causal")
        for name in ("attention_mask", "position_bias", "attention_bias"):
            if constants.get(name) is not None:
                raise CheckpointError(f"its attention needs a {name}, which paged attention does not take")
        self.layers[index] = _LayerNotes(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_size=query.shape[2],
            value_size=value.shape[2],
            window=constants.get("sliding_window"),
            softcap=constants.get("softcap") is not None,
            sinks=constants.get("s_aux") is not None,
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def describe(folder: Path, config: EngineConfig) -> Description:
    """Understand the checkpoint in `folder`.

    Raises
    ------
    CheckpointError
        It is of a kind that cannot be served; the message says why.
    ConfigError
        `config` asks for more context than the model has.
    """
    hf_config = _read_hf_config(folder, config.trust_remote_code)
    text = hf_config.get_text_config()
    dtype = choose_dtype(config.dtype, text, folder)
    max_model_len = choose_max_model_len(config.max_model_len, text)
    meta = build_on_meta(hf_config, config.trust_remote_code, dtype)
    pin_rope(meta, max_model_len)
    layers, vocab_size = _probe(meta, text)
    one = layers[0]
    files = [folder / "config.json", *folder.glob("*.safetensors")]
    made_of = f"{dtype}-{config.kv_cache_dtype}-{config.quantization}"
    spec = ModelSpec(
        name=f"{type(meta).__name__} ({_human_size(meta)})",
        fingerprint=f"{made_of}-{digest_of_stats(files)}",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=read_eos_token_ids(folder, text),
        attention=AttentionSpec(
            num_heads=one.heads,
            num_kv_heads=one.kv_heads,
            head_size=one.head_size,
            value_head_size=one.value_size,
            windows=tuple(layer.window for layer in layers),
            softcap=any(layer.softcap for layer in layers),
            sinks=any(layer.sinks for layer in layers),
            dtype=str(dtype).removeprefix("torch."),
            device=resolve_device(config.device),
            block_size=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
        ),
    )
    keep_fp32 = {*(meta._keep_in_fp32_modules_strict or ())}
    if dtype is torch.float16:
        keep_fp32 |= {*(meta._keep_in_fp32_modules or ())}
    return Description(folder, hf_config, type(meta), meta, frozenset(keep_fp32), spec)


def _read_hf_config(folder: Path, trust_remote_code: bool) -> Any:  # noqa: ANN401 - transformers is not typed
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # unknown types, bad JSON, remote code: each raises its own
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    if getattr(hf_config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{folder} holds quantised weights, which are not served; use the original ones"
        )
    if getattr(hf_config, "is_encoder_decoder", False):
        raise CheckpointError(f"{folder} is an encoder-decoder model; only decoder-only models are served")
    return hf_config


def build_on_meta(hf_config: Any, trust_remote_code: bool, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Build a model without memory, with our attention."""
    from transformers import AutoModelForCausalLM

    register_attention()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                hf_config,
                attn_implementation=IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
                dtype=dtype,
            )
    except Exception as error:
        unknown = isinstance(error, KeyError) and error.args == (IMPLEMENTATION,)
        why = "they do not use transformers' attention interface" if unknown else error
        raise CheckpointError(f"{hf_config.model_type} models cannot be served: {why}") from error
    return model.eval()


def _probe(model: Any, text_config: Any) -> tuple[list[_LayerNotes], int]:  # noqa: ANN401
    """Run two tokens through; returns the notes of all layers and the width of the logits."""
    refusal = f"{type(model).__name__} cannot be served: "
    if getattr(model, "_is_stateful", False) or any(
        isinstance(part, torch.nn.Conv1d) for part in model.modules()
    ):
        raise CheckpointError(
            f"{refusal}it keeps state that is not attention (recurrent or convolutional layers)"
        )
    kinds = list(getattr(text_config, "layer_types", None) or ())
    odd = sorted(set(kinds) - _ATTENTION_TYPES)
    if odd:
        raise CheckpointError(f"{refusal}it has layers of kind {', '.join(odd)}")
    recorder = _Recorder()
    experts = getattr(model.config, "_experts_implementation", None)
    try:
        if experts is not None:  # the default asks which experts were hit, which meta tensors cannot say
            model.set_experts_implementation("batched_mm")
        with torch.inference_mode():
            ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
            output = model(
                input_ids=ids,
                position_ids=ids,
                use_cache=False,
                logits_to_keep=ids[0, :1],
                **{STEP_KEYWORD: recorder},
            )
    except CheckpointError as error:
        raise CheckpointError(f"{refusal}{error}") from error
    except Exception as error:
        raise CheckpointError(
            f"{refusal}it does not run with transformers' attention interface "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        if experts is not None:
            model.set_experts_implementation(experts)
    return _checked(recorder, kinds, text_config, refusal), output.logits.shape[-1]


def _checked(recorder: _Recorder, kinds: list[str], text_config: Any, refusal: str) -> list[_LayerNotes]:  # noqa: ANN401
    expected = text_config.num_hidden_layers
    if sorted(recorder.layers) != list(range(expected)):
        raise CheckpointError(
            f"{refusal}{len(recorder.layers)} of its {expected} layers run their attention through "
            "transformers' attention interface"
        )
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise CheckpointError(f"{refusal}its layers share KV")
    layers = [recorder.layers[index] for index in range(expected)]
    if len({(one.heads, one.kv_heads, one.head_size, one.value_size) for one in layers}) > 1:
        raise CheckpointError(f"{refusal}its layers differ in heads or head size")
    for index, kind in enumerate(kinds[:expected]):
        if kind == "sliding_attention" and layers[index].window is None:
            raise CheckpointError(f"{refusal}layer {index} slides, but does not say over how many tokens")
    return layers


def _human_size(model: Any) -> str:  # noqa: ANN401
    count = sum(weight.numel() for weight in {id(p): p for p in model.parameters()}.values())
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit} parameters"
    return f"{count} parameters"
