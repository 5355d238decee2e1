"""A stand-in for `triton_python_backend_utils`, and a small byte-level tokenizer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FINAL = 1
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Tensor:
    def __init__(self, name, array):
        assert isinstance(array, np.ndarray)
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

    def __init__(self, message, code=INTERNAL):
        self.text, self.kind = message, code


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Metric:
    def __init__(self):
        self.value = 0.0
        self.samples = []
        self.writes = 0

    def increment(self, by):
        assert by >= 0
        self.value += by
        self.writes += 1

    def set(self, value):
        self.value = value
        self.writes += 1

    def observe(self, value):
        self.samples.append(value)
        self.writes += 1


class FakePbUtils:
    """The module, with a metrics page of its own."""

    class TritonModelException(Exception):
        pass

    def __init__(self, *, metrics=True):
        self.Tensor, self.TritonError, self.InferenceResponse = Tensor, TritonError, InferenceResponse
        self.page = {}
        self.unloaded = []
        page, refusal = self.page, self.TritonModelException

        class MetricFamily:
            COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

            def __init__(self, name, description, kind):
                if not metrics:
                    raise refusal("metrics not supported")
                self.name, self.kind = name, kind

            def Metric(self, labels, buckets=None):
                assert (buckets is not None) == (self.kind == "histogram")
                return page.setdefault((self.name, tuple(sorted(labels.items()))), Metric())

        self.MetricFamily = MetricFamily

    def unload_model(self, name):
        self.unloaded.append(name)

    def value(self, name, **labels):
        """Sum of a metric over the series that have these labels."""
        return sum(
            metric.value
            for (series, pairs), metric in self.page.items()
            if series == f"conch:{name}" and labels.items() <= dict(pairs).items()
        )

    def samples(self, name):
        return [
            sample
            for (series, _), metric in self.page.items()
            if series == f"conch:{name}"
            for sample in metric.samples
        ]


class FakeSender:
    """Records responses, and fails the test when something follows the last one."""

    def __init__(self):
        self.responses = []
        self.finals = 0
        self.cancelled = False
        self.polls_after_final = 0
        self.fails_with = None
        self.done = threading.Event()

    def send(self, response=None, flags=0):
        assert self.finals == 0, "a response after the last one"
        if flags == FINAL:
            self.finals += 1
        self.responses.append(response)
        if self.finals:
            self.done.set()
        if self.fails_with is not None:
            raise self.fails_with

    def is_cancelled(self):
        self.polls_after_final += self.finals
        return self.cancelled

    # -- for tests

    def wait(self, timeout_s=10.0):
        assert self.done.wait(timeout_s), "no last response"
        return self

    @property
    def error(self):
        return self.responses[-1].error

    def text(self, choice=0):
        return b"".join(
            response.tensors["text_output"][choice] for response in self.responses if response.tensors
        ).decode()

    def all(self, name):
        return [response.tensors[name].tolist() for response in self.responses if name in response.tensors]


class FakeRequest:
    """A request with inputs given as plain Python values."""

    def __init__(self, *, parameters=None, timeout_us=0, raw_parameters=None, **inputs):
        self._inputs = [_tensor(name, value) for name, value in inputs.items()]
        self._parameters = raw_parameters if raw_parameters is not None else json.dumps(parameters or {})
        self._timeout_us = timeout_us
        self.sender = FakeSender()

    def inputs(self):
        return self._inputs

    def parameters(self):
        return self._parameters

    def timeout(self):
        return self._timeout_us

    def get_response_sender(self):
        return self.sender


def _tensor(name, value):
    if isinstance(value, np.ndarray):
        return Tensor(name, value)
    if isinstance(value, bool):
        return Tensor(name, np.array([value]))
    if isinstance(value, dict):
        value = json.dumps(value)
    if name == "messages" and not isinstance(value, (str, bytes)):
        value = json.dumps(value)
    if isinstance(value, (str, bytes)):
        raw = value.encode() if isinstance(value, str) else value
        array = np.empty(1, dtype=np.object_)
        array[0] = raw
        return Tensor(name, array)
    return Tensor(name, np.array([value] if isinstance(value, int) else value, dtype=np.int64))


def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog 日本語 😀 नमस्ते"] * 5, trainer)
    return tokenizer


def write_checkpoint(folder: Path) -> Tokenizer:
    """Write what the host reads of a checkpoint: tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = small_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "bos_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
