"""What vLLM's own scheduler costs, without a model: `schedule()`, then `update_from_output()`.

Options: ``{"max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "block_size"}``. Timed
are the making of a `Request` (its blocks are hashed there), `add_request` and the two calls; not messages,
and not what its engine core does around them.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lines import serve
from planning_runs import Run, answer
from planning_trace import VOCAB, Job
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


class VllmHost:
    """vLLM's scheduler as `planning_runs` drives it."""

    def __init__(self, options: dict[str, Any]) -> None:
        config = make_config(options)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hash_name = config.cache_config.prefix_caching_hash_algo
        self._hasher = get_request_block_hasher(options["block_size"], hash_function)
        self._scheduler = make_scheduler(config, options)
        self._next_id = 0
        self._hit_tokens = self._preemptions = 0

    def prepare(self, job: Job) -> tuple[str, list[int], SamplingParams]:
        """Return what a message holds."""
        self._next_id += 1
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        return str(self._next_id), list(job.token_ids), params

    def step(self, arrivals: list[tuple[str, list[int], SamplingParams]]) -> Run:
        """Take in what arrived and do one step."""
        scheduler = self._scheduler
        began = time.perf_counter()
        for name, token_ids, params in arrivals:
            scheduler.add_request(Request(name, token_ids, params, None, block_hasher=self._hasher))
        plan = scheduler.schedule()
        took = time.perf_counter() - began
        result = sample(plan, scheduler.requests)
        began = time.perf_counter()
        outputs = scheduler.update_from_output(plan, result)
        took += time.perf_counter() - began
        self._hit_tokens += sum(new.num_computed_tokens for new in plan.scheduled_new_reqs)
        self._preemptions += len(plan.preempted_req_ids or ())
        news = [one for core in outputs.values() for one in core.outputs]
        return Run(
            took,
            sum(len(one.new_token_ids) for one in news),
            sum(one.finish_reason is not None for one in news),
        )

    def clear(self) -> None:
        """End all requests."""
        self._scheduler.finish_requests(list(self._scheduler.requests), RequestStatus.FINISHED_ABORTED)
        self.step([])

    def counts(self) -> dict[str, int]:
        """Return what shows that the trace was served as it was meant."""
        return {"hit_tokens": self._hit_tokens, "preemptions": self._preemptions}


def sample(plan: Any, requests: dict[str, Request]) -> ModelRunnerOutput:  # noqa: ANN401
    """Return a token for each request whose tokens are all computed."""
    names = list(plan.num_scheduled_tokens)
    tokens = [
        [2 + index % 997] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
        for index, name in enumerate(names)
    ]
    return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens)


def make_config(options: dict[str, Any]) -> VllmConfig:
    """Return vLLM's configuration of a model that has no weights."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            block_size=options["block_size"],
            enable_prefix_caching=True,
            async_scheduling=False,
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = options["num_blocks"]
    return config


def make_scheduler(config: VllmConfig, options: dict[str, Any]) -> Scheduler:
    """Return the scheduler over a pool of one attention group."""
    spec = FullAttentionSpec(
        block_size=options["block_size"], num_kv_heads=3, head_size=64, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(options["num_blocks"], [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=options["block_size"],
        log_stats=False,
    )


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Build the scheduler."""
    host = VllmHost(options)
    gc.collect()
    gc.freeze()  # as its engine core does
    return {"hash": host.hash_name}, lambda question: answer(host, question)


if __name__ == "__main__":
    serve(start)
