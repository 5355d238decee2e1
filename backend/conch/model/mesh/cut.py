"""A transformers model without weights, cut down to what one rank holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from conch.api import ConfigError, EngineConfig, ModelSpec
from conch.api.mesh import Seat
from conch.model.describe import Description, build_on_meta
from conch.model.mesh.experts.cutting import ExpertShare, cut_experts, matching, narrow_inner
from conch.model.mesh.source import Source, narrow, source_of
from conch.model.mesh.split import Heads, Range, part_of, part_of_heads

_DIVIDED = {"colwise", "rowwise"}
_SERVED = {*_DIVIDED, "replicated_with_grad_allreduce", "moe_tp_experts"}
_SERVED_OF_EXPERTS = {"packed_colwise", "rowwise"}
_PIPELINE_PARTS = {"embed_tokens", "layers", "norm"}


@dataclass(slots=True)
class Share:
    """A rank's own model, on the meta device.

    Attributes
    ----------
    module
        Of the model's class, with the layers of the stage and parameters of the part.
    base
        What stands between the token ids and the head.
    layers
        Which of the model's layers it has.
    heads
        Which heads each of them has.
    vocabulary
        Which rows of embedding and head it has.
    is_tied
        Whether the head is the embedding.
    row_parallel
        Linear layers whose outputs are to be added up over the ranks.
    experts
        Of the layers that have them, in their order.
    sources
        Of every parameter, by its name here.
    """

    module: Any
    base: Any
    layers: Range
    heads: Heads
    vocabulary: Range
    is_tied: bool
    row_parallel: list[Any] = field(default_factory=list)
    experts: list[ExpertShare] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)


def cut_model(description: Description, seat: Seat, layers: Range, config: EngineConfig) -> Share:
    """Build a rank's share of a model.

    Parameters
    ----------
    layers
        Of its stage.

    Raises
    ------
    ConfigError
        The model cannot be divided like this.
    """
    spec = description.spec
    if not spec.attention.device.startswith("cpu"):
        raise ConfigError(f"several ranks run on CPUs so far, not on {spec.attention.device}")
    heads = Heads.of(spec.attention, seat)
    dtype = getattr(torch, spec.attention.dtype)
    module = build_on_meta(copy.deepcopy(description.hf_config), config.trust_remote_code, dtype)
    share = Share(
        module=module,
        base=module.base_model,
        layers=layers,
        heads=heads,
        vocabulary=part_of(module.get_output_embeddings().out_features, seat.shape.tensor, seat.part),
        is_tied=bool(module.config.get_text_config().tie_word_embeddings),
    )
    if seat.shape.tensor > 1:
        _Narrowing(share, spec, seat).carry_out()
    redundant = config.eplb_config.num_redundant_experts if config.eplb_config else 0
    share.experts += cut_experts(share.base, seat, redundant)
    if seat.shape.pipeline > 1:
        _cut_stage(share, seat)
    _find_sources(share)
    return share


class _Narrowing:
    """Takes the part of a rank out of every layer, by the model's own plan."""

    def __init__(self, share: Share, spec: ModelSpec, seat: Seat) -> None:
        self._share, self._spec, self._seat = share, spec, seat
        self._modules = dict(share.base.named_modules())
        self._has_cut_heads = False

    def carry_out(self) -> None:
        size, name = self._seat.shape.tensor, type(self._share.module).__name__
        plan = self._share.base.config.base_model_tp_plan
        if not plan:
            raise ConfigError(f"tensor_parallel_size {size}: transformers has no plan for {name}")
        weights = dict(self._share.base.named_parameters())
        for pattern, style in plan.items():
            paths, parameters = matching(pattern, self._modules), matching(pattern, weights)
            for path in parameters if style in _SERVED_OF_EXPERTS else ():
                narrow_inner(self._share.base, path, style, self._seat)
            served = _SERVED_OF_EXPERTS if parameters else _SERVED
            if style not in served and (paths or parameters):
                raise ConfigError(
                    f"tensor_parallel_size {size} cannot divide {name}: its plan has {style!r} for "
                    f"{pattern}, which is not served"
                )
            for path in paths if style in _DIVIDED else ():
                self._cut_linear(path, style == "rowwise")
        self._cut_vocabulary()
        if not self._has_cut_heads:
            self._share.heads = Heads.all_of(self._spec.attention)

    def _cut_linear(self, path: str, by_rows: bool) -> None:
        linear, owner = self._modules[path], self._modules[path.rpartition(".")[0]]
        total = linear.in_features if by_rows else linear.out_features
        if hasattr(owner, "layer_idx"):
            self._has_cut_heads = True
            part = part_of_heads(total, self._share.heads, self._spec.attention)
        else:
            part = part_of(total, self._seat.shape.tensor, self._seat.part)
        if by_rows:
            narrow(linear, "weight", 1, [part])
            linear.in_features = part[1] - part[0]
            self._share.row_parallel.append(linear)
        else:
            narrow(linear, "weight", 0, [part])
            narrow(linear, "bias", 0, [part])
            linear.out_features = part[1] - part[0]

    def _cut_vocabulary(self) -> None:
        module, rows = self._share.module, self._share.vocabulary
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        narrow(embedding, "weight", 0, [rows])
        embedding.num_embeddings, embedding.padding_idx = rows[1] - rows[0], None
        narrow(head, "weight", 0, [rows])
        narrow(head, "bias", 0, [rows])
        head.out_features = rows[1] - rows[0]


def loop_over(description: Description, layers: Sequence[torch.nn.Module]) -> Any:  # noqa: ANN401
    """Return a copy of the model's own loop over some layers: states in, states out; without memory."""
    base = description.meta.base_model
    loop: Any = copy.copy(base)
    loop._modules = {**base._modules}
    loop.layers, loop.norm, loop.embed_tokens = torch.nn.ModuleList(layers), torch.nn.Identity(), None
    loop.config = copy.deepcopy(base.config)
    loop.config.num_hidden_layers = len(layers)
    return copy.deepcopy(loop)


def check_has_stages(description: Description) -> None:
    """Refuse a model that cannot be cut between its layers.

    Raises
    ------
    ConfigError
        It says why.
    """
    if set(description.meta.base_model.config.base_model_pp_plan or ()) != _PIPELINE_PARTS:
        raise ConfigError(
            f"{type(description.meta).__name__} has no stages: transformers has no plan for it of "
            f"{', '.join(sorted(_PIPELINE_PARTS))}"
        )
    _check_passes_states(description)


def _cut_stage(share: Share, seat: Seat) -> None:
    """Keep the layers of a stage, the embedding in the first one only, norm and head in the last."""
    module, base = share.module, share.base
    first, last = share.layers
    base.layers = torch.nn.ModuleList(list(base.layers)[first:last])
    for part in base.layers.modules():
        if isinstance(getattr(part, "layer_idx", None), int):
            part.layer_idx -= first
    base.config.num_hidden_layers = last - first
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = list(base.config.layer_types)[first:last]
    if not seat.is_first_stage:
        base.embed_tokens = None
    if not seat.is_last_stage:
        base.norm = torch.nn.Identity()
        head_module = module.get_output_embeddings()
        name = next(name for name, part in module.named_modules() if part is head_module)
        setattr(module, name, torch.nn.Identity())


def _check_passes_states(description: Description) -> None:
    """Refuse a model that does more than its layers to what comes into a stage: it would be done again.

    A copy without layers must give back what it gets.
    """
    probe = loop_over(description, []).to_empty(device="cpu")
    states = torch.ones(1, 2, probe.config.hidden_size)
    with torch.inference_mode():
        positions = torch.zeros(1, 2, dtype=torch.long)
        given = probe(inputs_embeds=states, position_ids=positions, use_cache=False).last_hidden_state
    if not torch.equal(given, states):
        raise ConfigError(
            f"{type(description.meta).__name__} changes what comes into its layers, so it has no stages"
        )


def _find_sources(share: Share) -> None:
    """Tell where every tensor comes from: layers of a stage have other numbers in the checkpoint."""
    prefix = share.module.base_model_prefix
    layers, first = f"{prefix}.layers.", share.layers[0]
    module = share.module
    stored = module.state_dict(keep_vars=True).keys()
    for name, weight in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        if name not in stored:
            continue
        full = name
        if name.startswith(layers):
            index, _, rest = name[len(layers) :].partition(".")
            full = f"{layers}{int(index) + first}.{rest}"
        share.sources[name] = source_of(full, weight)
