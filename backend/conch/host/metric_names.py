"""The metrics of a model, with vLLM's names under the prefix ``conch:``.

What is about one engine is there once for each, told apart by the label ``replica``; the sum over ``replica``
is the model's.
"""

from __future__ import annotations

from dataclasses import dataclass

from conch.api.mesh_config import MAX_STAGES
from conch.api.speculative import MAX_SPECULATIVE_TOKENS
from conch.engine.protocol import EngineStats

PREFIX = "conch:"

PROMPT_TOKENS = "request_prompt_tokens"
GENERATION_TOKENS = "request_generation_tokens"
QUEUE_TIME = "request_queue_time_seconds"
TIME_TO_FIRST_TOKEN = "time_to_first_token_seconds"
TIME_PER_OUTPUT_TOKEN = "time_per_output_token_seconds"
LATENCY = "e2e_request_latency_seconds"

SUCCESS = "request_success_total"
FAILURE = "request_failure_total"
CANCELLED = "request_cancelled_total"
RESTARTS = "engine_restarts_total"

RUNNING = "num_requests_running"
WAITING = "num_requests_waiting"
KV_USAGE = "kv_cache_usage_perc"
KV_BLOCKS_USED = "kv_blocks_used"
KV_BLOCKS_TOTAL = "kv_blocks_total"
KV_TOKENS_USED = "kv_tokens_used"
KV_BLOCKS_PARKED = "kv_blocks_parked"
SWAP_BLOCKS_TOTAL = "swap_blocks_total"
PREFIX_HOST_BLOCKS = "prefix_cache_host_blocks"
PREFIX_DISK_BLOCKS = "prefix_cache_disk_blocks"
READY = "engine_ready"
REPLICAS_READY = "replicas_ready"
ACCEPTED_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
EXPERT_TOKENS = "expert_tokens_total"
EXPERT_IMBALANCE = "expert_load_imbalance"
ACCEPTANCE_LENGTH = "spec_decode_mean_acceptance_length"
STAGE_SECONDS = "pipeline_stage_busy_seconds_total"
BUBBLES = "pipeline_bubble_fraction"

_LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
_TOKEN_TIME_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.5, 0.75, 1.0, 2.5),
)
_COUNT_BUCKETS = tuple(float(1 << power) for power in range(18))


@dataclass(frozen=True, slots=True)
class Counter:
    """A sum that only grows, split by the values of labels.

    Attributes
    ----------
    labels
        None for one series; with more than one, the values of each series are told by its counts.
    values
        Of the one label.
    at_zero
        Whether all series are there from the start, or each from its first count on.
    """

    description: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    at_zero: bool = True


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution over upper bounds of buckets."""

    description: str
    buckets: tuple[float, ...]


COUNTERS = {
    SUCCESS: Counter("Requests answered in full.", ("finished_reason",), ("stop", "length")),
    FAILURE: Counter(
        "Requests that ended with an error, the client's or ours.",
        ("reason",),
        ("invalid_argument", "unavailable", "timeout", "internal"),
    ),
    CANCELLED: Counter("Requests whose client left."),
    RESTARTS: Counter("Times that the engine process was started again."),
    "prompt_tokens_total": Counter("Prompt tokens of admitted requests."),
    "generation_tokens_total": Counter("Tokens generated."),
    "computed_tokens_total": Counter("Tokens that went through the model."),
    "engine_steps_total": Counter("Steps of the engine."),
    "num_preemptions_total": Counter("Times that a running request was sent back to wait."),
    "blocks_swapped_out_total": Counter("KV blocks that preempted requests left in the host's memory."),
    "blocks_swapped_in_total": Counter("KV blocks that were brought back from there."),
    "prefix_cache_queries_total": Counter("Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": Counter("Prompt tokens found in the prefix cache."),
    "prefix_cache_host_hits_total": Counter("Tokens whose cached KV came back from the host's memory."),
    "prefix_cache_disk_hits_total": Counter("Tokens whose cached KV came back from the disk."),
    "spec_decode_num_drafts_total": Counter("Drafts that were verified."),
    "spec_decode_num_draft_tokens_total": Counter("Tokens that the drafter proposed."),
    "spec_decode_num_accepted_tokens_total": Counter("Proposed tokens that were accepted."),
    ACCEPTED_BY_POSITION: Counter(
        "Accepted tokens by their position in the draft.",
        ("position",),
        tuple(str(position) for position in range(MAX_SPECULATIVE_TOKENS)),
        at_zero=False,
    ),
    "spec_decode_drafting_seconds_total": Counter("Seconds that drafting took."),
    "engine_busy_seconds_total": Counter("Seconds in which the engine had a step to compute."),
    STAGE_SECONDS: Counter(
        "Seconds in which a stage of a pipeline computed.",
        ("stage",),
        tuple(str(stage) for stage in range(MAX_STAGES)),
        at_zero=False,
    ),
    EXPERT_TOKENS: Counter(
        "Tokens that went to each expert of each layer, where ranks share them.",
        ("layer", "expert"),
        at_zero=False,
    ),
}

FROM_STATS = {
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "computed_tokens_total": "computed_tokens",
    "engine_steps_total": "steps",
    "num_preemptions_total": "preemptions",
    "blocks_swapped_out_total": "blocks_swapped_out",
    "blocks_swapped_in_total": "blocks_swapped_in",
    "prefix_cache_queries_total": "prefix_queries",
    "prefix_cache_hits_total": "prefix_hits",
    "prefix_cache_host_hits_total": "prefix_host_hits",
    "prefix_cache_disk_hits_total": "prefix_disk_hits",
    "spec_decode_num_drafts_total": "drafts",
    "spec_decode_num_draft_tokens_total": "drafts_proposed",
    "spec_decode_num_accepted_tokens_total": "drafts_accepted",
    "spec_decode_drafting_seconds_total": "drafting_s",
    "engine_busy_seconds_total": "steps_s",
}
"""Counter to the field of `EngineStats` that it sums over the lives of all engine processes."""

FROM_TUPLES = {ACCEPTED_BY_POSITION: "accepted_by_position", STAGE_SECONDS: "stages_s"}
"""The same, of fields that hold one number for each value of the counter's label."""

GAUGES = {
    RUNNING: "Choices of requests that hold KV.",
    WAITING: "Requests that wait.",
    KV_USAGE: "Share of the KV pool that requests hold, 1 is all.",
    KV_BLOCKS_USED: "KV blocks that requests hold.",
    KV_BLOCKS_TOTAL: "KV blocks in the pool.",
    KV_TOKENS_USED: "Tokens whose KV is held.",
    KV_BLOCKS_PARKED: "KV blocks that preempted requests have in the host's memory.",
    SWAP_BLOCKS_TOTAL: "KV blocks that the host's memory has room for.",
    PREFIX_HOST_BLOCKS: "Cached KV blocks in the host's memory.",
    PREFIX_DISK_BLOCKS: "Cached KV blocks on the disk.",
    READY: "Whether the engine serves.",
    REPLICAS_READY: "Engines of the model instance that serve; fewer than there are is a degraded model.",
    EXPERT_IMBALANCE: "Tokens of the busiest rank over the mean of those that share experts, lately.",
    ACCEPTANCE_LENGTH: "Tokens that a verified draft has brought on average, with the one after it.",
    BUBBLES: "Share of its stages' time that a pipeline has idled while there were steps to compute.",
}

OF_ENGINES = frozenset({RESTARTS, EXPERT_TOKENS, *FROM_STATS, *FROM_TUPLES, *GAUGES} - {REPLICAS_READY})
"""What is counted for each engine apart; all else is about requests, or the model instance."""

HISTOGRAMS = {
    TIME_TO_FIRST_TOKEN: Histogram("From arrival to the first token.", _LATENCY_BUCKETS),
    TIME_PER_OUTPUT_TOKEN: Histogram("Mean time between the tokens of one output.", _TOKEN_TIME_BUCKETS),
    LATENCY: Histogram("From arrival to the end.", _LATENCY_BUCKETS),
    QUEUE_TIME: Histogram("From arrival to the first step.", _LATENCY_BUCKETS),
    PROMPT_TOKENS: Histogram("Tokens of a prompt.", _COUNT_BUCKETS),
    GENERATION_TOKENS: Histogram("Tokens of an output.", _COUNT_BUCKETS),
}


def gauges_of(stats: EngineStats) -> dict[str, float]:
    """Return the gauges that an engine's snapshot tells."""
    return {
        RUNNING: stats.running,
        WAITING: stats.waiting,
        KV_USAGE: stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0,
        KV_BLOCKS_USED: stats.kv_blocks_used,
        KV_BLOCKS_TOTAL: stats.kv_blocks_total,
        KV_TOKENS_USED: stats.kv_tokens_used,
        KV_BLOCKS_PARKED: stats.kv_blocks_parked,
        SWAP_BLOCKS_TOTAL: stats.swap_blocks_total,
        PREFIX_HOST_BLOCKS: stats.prefix_host_blocks,
        PREFIX_DISK_BLOCKS: stats.prefix_disk_blocks,
        EXPERT_IMBALANCE: stats.experts.imbalance,
        ACCEPTANCE_LENGTH: 1 + stats.drafts_accepted / stats.drafts if stats.drafts else 0.0,
        BUBBLES: bubble_fraction(stats),
    }


def bubble_fraction(stats: EngineStats) -> float:
    """Return what share of their time the stages of a pipeline have idled; 0 where there is none."""
    most_s = len(stats.stages_s) * stats.steps_s
    return max(0.0, 1 - sum(stats.stages_s) / most_s) if most_s else 0.0
