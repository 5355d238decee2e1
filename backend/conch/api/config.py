"""The configuration of one engine: `1/model.json`, typed and validated whole.

Where a key means what a vLLM engine argument means, it has that name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from conch.api.errors import ConfigError
from conch.api.experts import EPLBConfig
from conch.api.kv_events import KVEventsConfig
from conch.api.mesh_config import check_mesh
from conch.api.model_reference import resolve_model_reference
from conch.api.remote_config import check_remote_ranks
from conch.api.speculative import SpeculativeConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "gguf"]
KvCacheDType = Literal["auto", "int8"]
ModelImpl = Literal["auto", "fused", "transformers"]
PreemptionMode = Literal["auto", "swap", "recompute"]
PreemptionVictim = Literal["least_loss", "last_admitted"]
ReplicaFailure = Literal["error", "replay"]
DEFAULT_ROUTER = "least_loaded"
MIB = 1 << 20


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one engine is told. Born whole: a value that does not fit is refused here.

    Attributes
    ----------
    model
        A folder in Hugging Face layout, or a GGUF file; ``package:NAME/FILE`` is one inside a Python package;
        ``demo:llama`` and ``demo:mixtral`` are small ones with random weights, made when they are loaded.
    dtype
        Of weights, activations and KV cache. ``auto`` is what the checkpoint's config states.
    kv_cache_dtype
        ``auto`` keeps KV in `dtype`; ``int8`` in 8-bit numbers with a scale for each token and head, in
        little more than half of the memory of 16 bits. Needs the attention kernel ``cpu``.
    model_impl
        ``fused``: our decoder, one native call a step; ``transformers``: its own modules around our
        attention; ``auto``: the first where the model and the attention kernel allow it.
    quantization
        Of weights, on a CPU: ``int8`` makes 8-bit numbers in groups of 32 of any checkpoint; ``gguf`` serves
        the 4- and 8-bit groups of a GGUF file as they are stored. None serves every checkpoint in `dtype`.
    device
        ``auto`` is CUDA where there is a device, else the CPU.
    max_model_len
        Tokens of prompt and output together; None is what the checkpoint was trained for.
    max_num_seqs
        Requests that may run at once (each of a request's `n` choices counts).
    max_num_batched_tokens
        Token budget of one step, shared by decodes and prefill chunks.
    enable_chunked_prefill
        When False a prompt is computed in one step, and the budget is raised to `max_model_len`.
    block_size
        Tokens in one KV block.
    num_gpu_blocks_override
        KV blocks in the pool, whatever the device; None sizes the pool by memory.
    kv_cache_memory_bytes
        Size of the KV pool on a CPU, or on a GPU instead of `gpu_memory_utilization`.
    gpu_memory_utilization
        Share of a GPU's memory that weights and KV pool may take together.
    kv_watermark
        Share of the KV pool that stays free when a request is admitted beside others, for those to grow into.
    preemption_mode
        What becomes of the KV of a request that has to give way: ``swap`` parks it in the host's memory,
        ``recompute`` drops it, ``auto`` does whichever costs less. All drop what does not fit.
    swap_space_bytes
        Memory of the host for parked KV; 0 for none.
    preemption_victim
        Who gives way among those whom the scheduler would let go: ``least_loss`` is who has the least to
        compute or move again; ``last_admitted`` is who stands last in the scheduler's order.
    prefix_host_bytes
        Memory of the host for cached blocks that have to leave the KV pool; 0 for none.
    prefix_disk_bytes
        Bound on a file for those that have to leave that, too; 0 for none.
    prefix_disk_path
        Folder of the file, which has no name in it and ends with the engine; None is the system's place for
        temporary files.
    max_queue_size
        Requests that may wait; one more is refused as unavailable.
    queue_timeout_s
        Seconds that a request may wait for its first step; None is for ever.
    ttft_target_s, tpot_target_s
        For the scheduler ``slo``: seconds within which the first token, and each further one, are wanted by
        requests that state no targets of their own; None for no target.
    priority_aging_s
        For the scheduler ``priority``: seconds of waiting that count for one level of priority.
    fair_input_weight, fair_output_weight
        For the scheduler ``fair``: what a prompt token and a generated one count on a tenant's account.
    stream_interval
        Tokens that each response of a stream holds, but for the first, which comes at once, and the last.
    num_threads
        Compute threads of each engine on a CPU; None shares the cores that the process may use among all
        engines of the model, Triton's instances and their replicas.
    seed
        Where the seeds of unseeded requests come from; None is the operating system.
    trust_remote_code
        Whether code that comes with a checkpoint may run.
    kv_events_config
        Who may follow what the prefix cache holds; None for nobody. See
        `conch.api.kv_events.KVEventsConfig`.
    attention_kernel
        ``auto`` is ``cpu`` where that can serve the model, else ``torch``.
    data_parallel_size
        Engines in one model instance, each with its own weights, KV pool and queue: `max_num_seqs`,
        `max_queue_size` and the sizes of memory are of each. They divide the GPUs that the parameter
        `gpu_device_ids` of the config.pbtxt gives their instance; without it all see the same ones.
    router
        Who chooses the engine for a request, where there are several.
    on_replica_failure
        What becomes of the requests of an engine that dies: ``error`` fails them; ``replay`` serves those of
        which the client has seen nothing yet once more, by another engine or by the one that comes back.
    speculative_config
        Who drafts tokens ahead, for the model to verify many in one step; None for nobody. See
        `conch.api.speculative.SpeculativeConfig`.
    parallelism
        ``auto`` is ``mesh`` where the sizes below make more than one rank, else ``single``.
    tensor_parallel_size, pipeline_parallel_size
        Ranks that share each layer, and stages that share the layers: as many processes as their product,
        each with a KV pool of `kv_cache_memory_bytes`. See `conch.api.mesh_config` for what they exclude.
    expert_parallel_size
        Parts among which the experts of each layer are divided, of `tensor_parallel_size` ranks each, so that
        it multiplies the processes. Each part has attention of its own, over the rows of a step that are its
        own (data-parallel attention). vLLM says the same by `data_parallel_size` with
        `enable_expert_parallel`; here one scheduler fills all parts.
    eplb_config
        Moves experts to where there is room, by measured load; None leaves them where they began. See
        `conch.api.experts.EPLBConfig`.
    pipeline_layers
        Layers of each stage, in order; None measures at start what layers and head take, so that the slowest
        stage is as fast as can be.
    distributed_timeout_seconds
        How long ranks wait for one another, at the start and in a step, before all of them give up. One that
        shows no sign of life while it serves is given up after 10 s, or half of this where that is less.
    remote_ranks
        So many ranks, the last ones, are started on other hosts with ``conch rank``; the others here.
    master_addr, master_port
        Address of this host, and port, to which ranks of other hosts come.
    rank_token_file
        File with a secret that they must know; a relative path is taken from the folder of the `model.json`.
        None is the variable ``CONCH_RANK_TOKEN``.
    """

    model: str
    dtype: DType = "auto"
    kv_cache_dtype: KvCacheDType = "auto"
    model_impl: ModelImpl = "auto"
    quantization: Quantization | None = None
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int = 512 * MIB
    gpu_memory_utilization: float = 0.9
    kv_watermark: float = 0.01
    preemption_mode: PreemptionMode = "auto"
    swap_space_bytes: int = 0
    preemption_victim: PreemptionVictim = "least_loss"
    prefix_host_bytes: int = 0
    prefix_disk_bytes: int = 0
    prefix_disk_path: str | None = None
    max_queue_size: int = 1024
    queue_timeout_s: float | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    priority_aging_s: float = 30.0
    fair_input_weight: float = 1.0
    fair_output_weight: float = 2.0
    stream_interval: int = 1
    num_threads: int | None = None
    seed: int | None = None
    trust_remote_code: bool = False
    enable_prefix_caching: bool = True
    scheduler: str = "fcfs"
    kv_manager: str = "paged"
    prefix_cache: str = "hash"
    kv_events_config: KVEventsConfig | None = None
    attention_kernel: str = "auto"
    speculative_config: SpeculativeConfig | None = None
    parallelism: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    eplb_config: EPLBConfig | None = None
    pipeline_layers: tuple[int, ...] | None = None
    distributed_timeout_seconds: float = 60.0
    remote_ranks: int = 0
    master_addr: str | None = None
    master_port: int = 29501
    rank_token_file: str | None = None
    data_parallel_size: int = 1
    router: str = DEFAULT_ROUTER
    on_replica_failure: ReplicaFailure = "error"

    @property
    def drafter(self) -> str:
        """Name of the drafter in force."""
        return "none" if self.speculative_config is None else self.speculative_config.name

    def __post_init__(self) -> None:
        """Refuse values out of range, naming the key and the limit."""
        for key in _POSITIVE:
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"{key} must be greater than 0, not {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}")
        if not 0 <= self.kv_watermark < 1:
            raise ConfigError(f"kv_watermark must be in [0, 1), not {self.kv_watermark}")
        for key in _NOT_NEGATIVE:
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} must be 0 or more, not {getattr(self, key)}")
        self._check_preemption()
        self._check_prefix_cache()
        check_mesh(self)
        check_remote_ranks(self)
        if self.data_parallel_size == 1 and self.router != DEFAULT_ROUTER:
            raise ConfigError(f"router {self.router!r} has nothing to choose with data_parallel_size 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request may need one token in each step"
            )

    def _check_preemption(self) -> None:
        if self.preemption_mode == "swap" and not self.swap_space_bytes:
            raise ConfigError("preemption_mode 'swap' needs swap_space_bytes: memory to swap to")
        if self.preemption_mode == "recompute" and self.swap_space_bytes:
            raise ConfigError("swap_space_bytes is of no use with preemption_mode 'recompute'")

    def _check_prefix_cache(self) -> None:
        is_caching = self.enable_prefix_caching and self.prefix_cache != "none"
        if (self.prefix_host_bytes or self.prefix_disk_bytes) and not is_caching:
            raise ConfigError("prefix_host_bytes and prefix_disk_bytes are of no use without a prefix cache")
        if self.prefix_disk_path is not None and not self.prefix_disk_bytes:
            raise ConfigError("prefix_disk_path is of no use without prefix_disk_bytes")
        if self.kv_events_config and self.kv_events_config.is_published and not is_caching:
            raise ConfigError("kv_events_config: there are no KV events without a prefix cache")


_NOT_NEGATIVE = (
    "swap_space_bytes",
    "prefix_host_bytes",
    "prefix_disk_bytes",
    "max_queue_size",
    "remote_ranks",
)
_POSITIVE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "queue_timeout_s",
    "ttft_target_s",
    "tpot_target_s",
    "priority_aging_s",
    "fair_input_weight",
    "fair_output_weight",
    "stream_interval",
    "num_threads",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "distributed_timeout_seconds",
    "master_port",
    "data_parallel_size",
)


def parse_config(raw: Mapping[str, Any]) -> EngineConfig:
    """Validate a decoded `model.json`.

    Raises
    ------
    ConfigError
        An unknown key (the nearest known one is suggested), a wrong type or a value out of range.
    """
    known = {field.name for field in msgspec.structs.fields(EngineConfig)}
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown key {key!r} in the engine configuration{hint}")
    try:
        return msgspec.convert(dict(raw), EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine configuration: {error}") from error


def load_config(path: Path, overrides: Mapping[str, Any] | None = None) -> EngineConfig:
    """Read and validate a `model.json`, and settle where its models are (see `resolve_model_reference`)."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    config = parse_config({**raw, **(overrides or {})})
    drafting = config.speculative_config
    if drafting is not None and drafting.model is not None:
        own = resolve_model_reference(drafting.model, path.parent)
        drafting = msgspec.structs.replace(drafting, model=own)
    token_file = config.rank_token_file
    return msgspec.structs.replace(
        config,
        rank_token_file=None if token_file is None else str(path.parent / token_file),
        model=resolve_model_reference(config.model, path.parent),
        speculative_config=drafting,
    )
