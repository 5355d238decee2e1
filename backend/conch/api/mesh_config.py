"""What the keys of a mesh of ranks allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conch.api.errors import ConfigError
from conch.api.mesh import MeshShape

if TYPE_CHECKING:
    from conch.api.config import EngineConfig
    from conch.api.model_spec import ModelSpec

MAX_STAGES = 64


def check_mesh(config: EngineConfig) -> None:
    """Refuse settings that more than one rank cannot serve.

    Raises
    ------
    ConfigError
        Naming the key.
    """
    shape = shape_of(config)
    _check_pipeline_layers(config.pipeline_layers, config.pipeline_parallel_size)
    if config.eplb_config is not None and shape.expert == 1:
        raise ConfigError("eplb_config has nothing to balance with expert_parallel_size 1")
    if shape.size == 1:
        return
    named = {
        "tensor_parallel_size": shape.tensor,
        "pipeline_parallel_size": shape.pipeline,
        "expert_parallel_size": shape.expert,
    }
    sizes = " and ".join(f"{key} {size}" for key, size in named.items() if size > 1)
    if config.pipeline_parallel_size > MAX_STAGES:
        raise ConfigError(f"pipeline_parallel_size must be at most {MAX_STAGES}")
    if config.parallelism == "single":
        raise ConfigError(f"parallelism 'single' is one rank; {sizes} need 'mesh' (or 'auto')")
    if config.model_impl == "fused":
        raise ConfigError(f"model_impl 'fused' is one native call a step, which {sizes} cannot divide")
    if config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization!r} is served by one rank only, not with {sizes}"
        )
    if config.device.startswith("cuda"):
        raise ConfigError(f"{sizes} run on CPUs so far, not on device {config.device!r}")
    if config.prefix_disk_bytes:
        raise ConfigError(f"prefix_disk_bytes is served by one rank only, not with {sizes}")


def _check_pipeline_layers(layers: tuple[int, ...] | None, stages: int) -> None:
    if layers is None:
        return
    if stages == 1:
        raise ConfigError("pipeline_layers is of no use with pipeline_parallel_size 1")
    if len(layers) != stages or min(layers) < 1:
        raise ConfigError(
            f"pipeline_layers must hold a number greater than 0 for each of the {stages} stages, not "
            f"{list(layers)}"
        )


def parallelism_in_force(config: EngineConfig) -> str:
    """Return the name that `parallelism` means."""
    if config.parallelism != "auto":
        return config.parallelism
    return "single" if shape_of(config).size == 1 else "mesh"


def shape_of(config: EngineConfig) -> MeshShape:
    """Return the mesh that a configuration asks for."""
    return MeshShape(config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_parallel_size)


def ranks_here(config: EngineConfig) -> int:
    """Return how many of the mesh's ranks run on the engine's own host: the first ones."""
    return shape_of(config).size - config.remote_ranks


def check_layers(model: ModelSpec, layers: tuple[int, ...] | None) -> None:
    """Refuse stages that have more layers than the model, or fewer.

    Raises
    ------
    ConfigError
        Naming both numbers.
    """
    if layers is not None and sum(layers) != model.num_layers:
        raise ConfigError(
            f"pipeline_layers add up to {sum(layers)}, but the model has {model.num_layers} layers"
        )


def check_model(model: ModelSpec, tensor: int, pipeline: int) -> None:
    """Refuse a model that cannot be divided among so many ranks.

    Raises
    ------
    ConfigError
        Naming the sizes of both.
    """
    heads, kv_heads = model.attention.num_heads, model.attention.num_kv_heads
    divides = heads % tensor == 0 and (kv_heads % tensor == 0 or tensor % kv_heads == 0)
    if tensor > 1 and (not divides or heads % kv_heads):
        raise ConfigError(
            f"tensor_parallel_size {tensor} cannot divide {heads} query heads and {kv_heads} KV heads: "
            "it must divide the query heads, and divide the KV heads or be a multiple of them"
        )
    if model.num_layers < pipeline:
        raise ConfigError(f"pipeline_parallel_size {pipeline} cannot divide {model.num_layers} layers")
