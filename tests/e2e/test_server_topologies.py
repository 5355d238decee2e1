"""The ready repositories: each starts on a real server as it is, and answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conch.api.config import load_config
from conch.host.serving.repository import ModelEntry, write_model
from conch.model.checkpoint import resolve_checkpoint
from support.oracle import Oracle
from support.server import RunningServer

pytestmark = pytest.mark.e2e

REPOSITORIES = Path(__file__).parents[2] / "model_repository"
MODELS = {"tensor_parallel": "demo", "expert_parallel": "demo_balanced", "combined": "demo"}
"""One of each of these repositories, by the name that it has here."""
START_S = 280
PATIENT = {"distributed_timeout_seconds": START_S}
"""A dozen processes begin at once, on a machine that may be busy."""
PROMPT = "The sea is"
COUNT = 12


def answer(server: RunningServer, model: str) -> str:
    """Ask as the README does."""
    body = json.dumps({"text_input": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True})
    request = urllib.request.Request(f"{server.http}/v2/models/{model}/generate", body.encode())
    with urllib.request.urlopen(request, timeout=120) as reply:
        text = json.load(reply)["text_output"]
    assert isinstance(text, str) and text.startswith(PROMPT)
    return text.removeprefix(PROMPT)


def greedy(path: Path) -> str:
    """Return what transformers answers in fp32 with the weights of a model.json."""
    from tokenizers import Tokenizer

    folder = resolve_checkpoint(load_config(path), lambda stage, fraction: None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode(Oracle(folder).greedy(tokenizer.encode(PROMPT).ids, COUNT))


def ranks(server: RunningServer) -> list[psutil.Process]:
    """Return the processes that follow an engine."""
    return [one for one in server.family() if "conch.engine.rank" in " ".join(one.cmdline())]


def path_of(name: str) -> Path:
    return REPOSITORIES / name / MODELS[name]


def settings_of(name: str) -> Path:
    return path_of(name) / "1" / "model.json"


def load(server: RunningServer, model: str) -> None:
    request = urllib.request.Request(f"{server.http}/v2/repository/models/{model}/load", b"{}")
    with urllib.request.urlopen(request, timeout=START_S):
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Models of several repositories behind one server, loaded when they are asked for."""
    folder = tmp_path_factory.mktemp("topologies")
    merged = folder / "models"
    merged.mkdir()
    for name in MODELS:
        (merged / name).symlink_to(path_of(name))
    write_model(merged, ModelEntry("on_gpus", {"model": "demo:llama"}, devices=[(0,)]))
    flags = ["--model-control-mode=explicit", "--load-model=tensor_parallel", "--exit-timeout-secs=3"]
    with RunningServer(
        folder / "server.log", repository=merged, settings=PATIENT, flags=flags, start_timeout_s=START_S
    ) as running:
        yield running


def test_a_demo_that_four_ranks_share_answers_as_one_would(server: RunningServer) -> None:
    assert len(ranks(server)) == 3
    assert answer(server, "tensor_parallel") == greedy(settings_of("tensor_parallel"))


@pytest.mark.parametrize(("model", "followers"), [("expert_parallel", 1), ("combined", 2)])
def test_parts_with_experts_and_replicas_of_two_ranks_do_too(
    server: RunningServer, model: str, followers: int
) -> None:
    before = len(ranks(server))
    load(server, model)
    assert len(ranks(server)) == before + followers
    assert answer(server, model) == greedy(settings_of(model))


def test_devices_that_a_machine_lacks_are_an_error_that_names_them(server: RunningServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        load(server, "on_gpus")
    assert "finds no CUDA device" in refused.value.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.parent.name for path in REPOSITORIES.glob("*/README.md")))
def test_each_repository_starts_as_it_is(name: str, server_log: Path) -> None:
    models = sorted(path.parents[1].name for path in (REPOSITORIES / name).glob("*/1/model.json"))
    repository, settings = REPOSITORIES / name, {**PATIENT, "dtype": "float32"}
    with RunningServer(
        server_log, repository=repository, settings=settings, start_timeout_s=START_S
    ) as running:
        for model in models:
            assert answer(running, model) == greedy(repository / model / "1" / "model.json")
