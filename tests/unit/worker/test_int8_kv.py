"""int8 KV under a whole model: near what it was, twice the blocks, blocks that can be copied."""

from __future__ import annotations

import pytest
import torch

from conch.api import BuildContext, Move, SamplingParams, StepBatch
from conch.model.attention import PagedStep
from conch.model.causal_model import CausalModel
from conch.model.fused.decoder import FusedDecoder
from conch.worker import prepare
from conch.worker.pool import block_bytes, blocks_in
from conch_plugins.attention.cpu_paged import CpuPagedAttention
from support.tiny import tiny_checkpoint
from support.worker_driver import Driver, Job, build_worker, config_for, silent

BLOCK = 4
MAKES = {"fused": FusedDecoder, "transformers": CausalModel}


def worker_of(make="fused", kv="int8", **settings):
    worker = build_worker(
        tiny_checkpoint("llama"),
        **{
            "attention_kernel": "cpu",
            "model_impl": make,
            "kv_cache_dtype": kv,
            "block_size": BLOCK,
            **settings,
        },
    )
    assert isinstance(worker._model, MAKES[make])
    assert all((pool.dtype is torch.int8) is (kv == "int8") for pool in worker._pools)
    return worker


def logits_of(worker, ids, chunk):
    """Run one sequence through in chunks; returns the logits of all its tokens."""
    rows = []
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        batch = StepBatch(
            input_ids=torch.tensor(ids[start:end]),
            positions=torch.arange(start, end),
            cu_query=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.arange(-(-end // BLOCK), dtype=torch.int32)[None],
            slot_mapping=torch.arange(start, end),
            logit_rows=torch.arange(end - start),
            max_query=end - start,
            max_seq_len=end,
        )
        with torch.inference_mode():
            step = PagedStep(worker._kernel, worker._kernel.plan(batch), worker._pools)
            rows.append(worker._model.logits(batch, step).values.clone())
    return torch.cat(rows)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_logits_stay_near(make, dtype, chunk):
    """KV off by 1/254 of its largest element moves logits by less than 2 % of what they spread over."""
    ids = [5 + 37 * i % 300 for i in range(90)]
    wanted = logits_of(worker_of(make, "auto"), ids, chunk)
    found = logits_of(worker_of(make, dtype=dtype), ids, chunk)
    error = (found - wanted).pow(2).mean().sqrt()
    assert 0 < error < 0.02 * wanted.std()


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_the_same_memory_holds_about_twice_the_blocks(dtype, size):
    counts = {}
    for kv in ("auto", "int8"):
        config = config_for(
            tiny_checkpoint("llama", head_dim=64),
            dtype=dtype,
            kv_cache_dtype=kv,
            block_size=16,
            num_gpu_blocks_override=None,
            kv_cache_memory_bytes=1 << 24,
        )
        spec = prepare(config, silent).spec
        kernel = CpuPagedAttention(BuildContext(config, spec))
        counts[kv] = blocks_in(config, spec, kernel, config.kv_cache_memory_bytes)
        assert counts[kv] * block_bytes(spec, kernel) <= 1 << 24
    assert counts["int8"] / counts["auto"] == pytest.approx(size * 64 / (64 + 4), rel=1e-2)


def greedy(number, prompt):
    return Job(number, prompt, SamplingParams(temperature=0.0, max_tokens=10))


def test_copied_blocks_have_their_scales_and_are_independent():
    """Two prompts that part in their second block: one goes on in a copy of what the other has of it."""
    parent = greedy(1, [9, 8, 7, 6, 5, 4])
    child = greedy(2, [*parent.prompt[:5], 204])
    driver = Driver(worker_of(), BLOCK)
    driver.step([parent], 100)
    copy = driver.free.pop()
    child.blocks, child.computed = [parent.blocks[0], copy], 5
    driver.step([parent, child], 100, moves=(Move(parent.blocks[1], copy),))
    while not (parent.done and child.done):
        driver.step([job for job in (parent, child) if not job.done], 100)
    for job in (parent, child):
        alone = greedy(3, job.prompt)
        Driver(worker_of(), BLOCK).run([alone])
        assert alone.output == job.output
    assert child.output != parent.output
