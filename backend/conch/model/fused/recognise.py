"""From a transformers model on the meta device to a blueprint, where it is of a known make.

The module's own parts are asked, not its name: which norms it has and where, how its projections are cut,
what its attention is scaled by. The family says only what modules do not show: multipliers in the
configuration and what a norm's weight is relative to. A model with a parameter that found no part is not
recognised.
"""

from __future__ import annotations

from typing import Any

import torch

from conch.api import ModelSpec
from conch.model.fused.blueprint import Blueprint, LayerPart, MatrixPart, NormPart
from conch.model.rope import pin_rope
from conch_kernels.cpu_attention import LANES

_LLAMA_LIKE = {"llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "granite", "olmo2", "olmo3"}
_GEMMA_LIKE = {"gemma", "gemma2", "gemma3_text"}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


class NotRecognised(Exception):
    """The model is run by transformers' own modules; the message says why."""


def recognise(module: Any, hf_config: Any, spec: ModelSpec) -> Blueprint:  # noqa: ANN401 - transformers is not typed
    """Describe a model.

    Parameters
    ----------
    module
        ``...ForCausalLM`` on the meta device, RoPE pinned.
    hf_config
        Its configuration.
    spec
        What has been found out about its attention.

    Raises
    ------
    NotRecognised
        It is not of a known make.
    """
    config = hf_config.get_text_config()
    if config.model_type not in _LLAMA_LIKE | _GEMMA_LIKE:
        raise NotRecognised(f"{config.model_type} models are not among the fused families")
    if not type(module).__module__.startswith("transformers.models."):
        raise NotRecognised(f"{type(module).__name__} is not a class of transformers")
    if not hasattr(module.model, "layers"):
        raise NotRecognised(f"{type(module).__name__} is more than a decoder")
    if spec.attention.sinks or spec.attention.head_size != spec.attention.value_head_size:
        raise NotRecognised("attention sinks and values of another size are not fused")
    return _Reader(module, config, spec).read()


class _Reader:
    """Reads one model, noting which parameters it has seen."""

    def __init__(self, module: Any, config: Any, spec: ModelSpec) -> None:  # noqa: ANN401
        self._module, self._config, self._spec = module, config, spec
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._used: set[str] = set()
        self._offset = 1.0 if config.model_type in _GEMMA_LIKE else 0.0

    def read(self) -> Blueprint:
        model, config, attention = self._module.model, self._config, self._spec.attention
        first = model.layers[0]
        layers = tuple(self._layer(index, layer) for index, layer in enumerate(model.layers))
        has_own_key = config.model_type in {"gemma2", "gemma3_text"}
        activation = _ACTIVATIONS.get(config.hidden_activation if has_own_key else config.hidden_act)
        blueprint = Blueprint(
            layers=layers,
            embedding=self._parameter(model.embed_tokens.weight),
            head=self._matrix(self._module.lm_head),
            final=self._norm(model.norm),
            rope_tables=self._rope_tables({layer.rope for layer in layers if layer.rope}),
            hidden=config.hidden_size,
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            inner=self._shapes[layers[0].down.weights[0]][1],
            activation=activation or "",
            norm_whole_rows=config.model_type in {"olmo2", "olmo3"},
            embedding_scale=self._embedding_scale(),
            residual_scale=float(getattr(first, "residual_multiplier", 1.0)),
            logit_scale=1.0 / config.logits_scaling if config.model_type == "granite" else 1.0,
            logit_softcap=config.final_logit_softcapping if has_own_key else None,
            shapes=self._shapes,
        )
        self._check(blueprint)
        return blueprint

    def _layer(self, index: int, layer: Any) -> LayerPart:  # noqa: ANN401
        attention, mlp = layer.self_attn, layer.mlp
        names = {name for name, child in layer.named_children() if name.endswith("layernorm")}
        sandwich = "pre_feedforward_layernorm" in names
        after = not sandwich and "post_feedforward_layernorm" in names
        roles = {
            "attention_in": "input_layernorm",
            "attention_out": "post_attention_layernorm" if sandwich or after else "",
            "mlp_in": "pre_feedforward_layernorm"
            if sandwich
            else ("" if after else "post_attention_layernorm"),
            "mlp_out": "post_feedforward_layernorm",
        }
        norms = {
            role: self._norm(getattr(layer, name)) if name in names else None for role, name in roles.items()
        }
        has_softcap = (
            self._spec.attention.softcap
        )  # as the attention was asked, whatever the configuration says
        softcap = attention.attn_logit_softcapping if has_softcap else None
        return LayerPart(
            **norms,
            query=self._optional_norm(attention, "q_norm"),
            key=self._optional_norm(attention, "k_norm"),
            qkv=self._first_of(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj")),
            out=self._matrix(attention.o_proj),
            up=self._up(mlp),
            down=self._matrix(mlp.down_proj),
            rope=self._rope_of(index, attention),
            scale=float(attention.scaling),
            window=self._spec.attention.windows[index],
            softcap=None if softcap is None else float(softcap),
        )

    def _first_of(self, module: Any, *choices: tuple[str, ...]) -> MatrixPart:  # noqa: ANN401
        for names in choices:
            if all(hasattr(module, name) for name in names):
                return self._matrix(*(getattr(module, name) for name in names))
        raise NotRecognised(f"{type(module).__name__} has none of {choices}")

    def _up(self, mlp: Any) -> MatrixPart:  # noqa: ANN401
        part = self._first_of(mlp, ("gate_up_proj",), ("gate_proj", "up_proj"))
        return MatrixPart(part.weights, part.biases, interleaved=True)

    def _matrix(self, *modules: Any) -> MatrixPart:  # noqa: ANN401
        weights = tuple(self._parameter(module.weight) for module in modules)
        biases = tuple(self._parameter(module.bias) for module in modules if module.bias is not None)
        if len(biases) not in {0, len(modules)}:
            raise NotRecognised("some but not all of its projections have a bias")
        return MatrixPart(weights, biases)

    def _optional_norm(self, module: Any, name: str) -> NormPart | None:  # noqa: ANN401
        found = getattr(module, name, None)
        return None if found is None else self._norm(found)

    def _norm(self, norm: Any) -> NormPart:  # noqa: ANN401
        eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
        if eps is None or "RMSNorm" not in type(norm).__name__:
            raise NotRecognised(f"{type(norm).__name__} is not a norm that is fused")
        return NormPart(self._parameter(norm.weight), float(eps), self._offset)

    def _parameter(self, parameter: torch.nn.Parameter) -> str:
        name: str = self._names[id(parameter)]
        self._used.add(name)
        return str(name)

    def _embedding_scale(self) -> float:
        embedding, config = self._module.model.embed_tokens, self._config
        if hasattr(embedding, "scalar_embed_scale"):
            dtype = getattr(torch, self._spec.attention.dtype)
            return float(torch.tensor(embedding.scalar_embed_scale).to(dtype))  # as the module rounds it
        return float(config.embedding_multiplier) if config.model_type == "granite" else 1.0

    def _rope_of(self, index: int, attention: Any) -> str | None:  # noqa: ANN401
        if not getattr(attention, "use_rope", True):
            return None
        kinds = getattr(self._module.model.rotary_emb, "layer_types", None)
        return str(self._config.layer_types[index]) if kinds else "all"

    def _rope_tables(self, names: set[str]) -> dict[str, torch.Tensor]:
        """Ask the model's own rotary embedding, built again with its numbers."""
        real = type(self._module.model.rotary_emb)(self._config)
        pin_rope(real, self._spec.max_model_len)
        positions = torch.arange(self._spec.max_model_len)[None]
        tables = {}
        for name in sorted(names):
            extra = () if name == "all" else (name,)
            cosines, sines = (
                part[0].float() for part in real(torch.zeros(1, dtype=torch.float32), positions, *extra)
            )
            half = cosines.shape[1] // 2
            if not torch.equal(cosines[:, :half], cosines[:, half:]):
                raise NotRecognised("its rotary embedding does not rotate halves of a head")
            tables[name] = torch.cat([cosines[:, :half], sines[:, :half]], dim=1).contiguous()
        return tables

    def _check(self, blueprint: Blueprint) -> None:
        unused = sorted(set(self._shapes) - self._used)
        if unused:
            raise NotRecognised(f"its parameter {unused[0]} plays no part in a fused decoder")
        if not blueprint.activation:
            raise NotRecognised("its activation is not fused")
        wide = (blueprint.heads, blueprint.kv_heads)
        sizes = {
            "hidden size": blueprint.hidden,
            "intermediate size": blueprint.inner,
            "queries": wide[0] * blueprint.head_size,
            "queries, keys and values": (wide[0] + 2 * wide[1]) * blueprint.head_size,
        }
        if any(layer.query for layer in blueprint.layers):
            whole = blueprint.norm_whole_rows
            sizes["normalised keys"] = (wide[1] if whole else 1) * blueprint.head_size
        for what, size in sizes.items():
            if size % LANES:
                raise NotRecognised(f"the size of its {what}, {size}, is no multiple of {LANES}")
