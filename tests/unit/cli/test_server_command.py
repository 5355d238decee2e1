"""What tritonserver is called with, and the folders that it is pointed at."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from conch.host.serving.command import LAST_WORDS_S, Endpoints, ServerFlags, build_command
from conch.host.serving.errors import ServeError
from conch.host.serving.folders import ENTRY, backend_directory, model_repository
from conch.host.serving.install import PYTHON_BACKEND_FILES, STUB_NAME, TritonInstall, find_triton
from conch.host.serving.repository import ModelEntry, find_configs, write_model
from conch.host.settings import SETTINGS_VARIABLE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tritonserver as NVIDIA installs it, without run bit on the stub."""
    root = tmp_path / "tritonserver"
    backend = root / "backends" / "python"
    backend.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin" / "tritonserver").write_text("")
    for name in (*PYTHON_BACKEND_FILES, STUB_NAME):
        (backend / name).write_text(name)
    return root


@pytest.fixture
def install(root: Path) -> TritonInstall:
    return find_triton(root)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--http-port", "1"], {"http-port": ("1",)}),
        (["--http-port=1", "--http-port=2"], {"http-port": ("1", "2")}),
        (["--flag", "--other", "x=y"], {"flag": (None,), "other": ("x=y",)}),
        (["--backend-config=python,a=b c"], {"backend-config": ("python,a=b c",)}),
        (["--number", "-1"], {"number": ("-1",)}),
    ],
)
def test_flags_are_read_in_each_form(
    arguments: list[str], expected: dict[str, tuple[str | None, ...]]
) -> None:
    flags = ServerFlags.parse(arguments)
    assert flags.values == expected
    assert ServerFlags.parse(flags.arguments()) == flags


def test_endpoints_follow_flags() -> None:
    flags = ServerFlags.parse(["--http-address=127.0.0.1", "--allow-grpc=false", "--metrics-port", "9"])
    endpoints = Endpoints.from_flags(flags)
    assert endpoints.port == {"http": 8000, "grpc": None, "metrics": 9}
    assert endpoints.address["metrics"] == "127.0.0.1", "Triton's metrics listen where HTTP does"
    assert endpoints.reachable("http") == "127.0.0.1:8000"


def test_taken_port_is_refused_with_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        flags = ServerFlags.parse(
            [f"--grpc-port={taken.getsockname()[1]}", "--allow-http=0", "--allow-metrics=0"]
        )
        with pytest.raises(ServeError, match="--grpc-port"):
            Endpoints.from_flags(flags).refuse_taken_ports()


def test_command_keeps_arguments_whole(install: TritonInstall, tmp_path: Path) -> None:
    repository = tmp_path / "a folder"
    repository.mkdir()
    flags = ServerFlags.parse(["--log-verbose=1", "--exit-timeout-secs", "3"])
    command = build_command(install, [repository], flags, {"block_size": 8, "model": "x"})
    assert f"--model-repository={repository}" in command.arguments
    assert {"--log-verbose=1", f"--exit-timeout-secs={3 + LAST_WORDS_S}"} <= set(command.arguments)
    assert command.exit_timeout_s == 3
    assert json.loads(command.environment[SETTINGS_VARIABLE]) == {"block_size": 8, "model": "x"}
    assert command.environment["LC_ALL"] == "C.UTF-8"
    assert command.environment["LD_LIBRARY_PATH"].startswith(str(install.libraries[0]))


def test_without_settings_the_variable_is_left_alone(
    install: TritonInstall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"seed": 1}')
    command = build_command(install, [tmp_path], ServerFlags(), {})
    assert command.environment[SETTINGS_VARIABLE] == '{"seed": 1}'


def test_backend_directory_is_complete_and_made_once(install: TritonInstall, cache: Path) -> None:
    first = backend_directory(install)
    stub = first / "python" / STUB_NAME
    assert os.access(stub, os.X_OK)
    for name in PYTHON_BACKEND_FILES:
        assert (first / "python" / name).resolve().is_relative_to(first.resolve()), "Triton refuses links out"
    assert (first / "conch" / "model.py").read_text() == ENTRY
    made = stub.stat().st_ino
    assert backend_directory(install) == first and stub.stat().st_ino == made
    install.stub.write_text("another stub")
    assert backend_directory(install) != first
    assert sorted(path.name[0] for path in (cache / "backends").iterdir() if path.name.startswith(".")) == []


def test_entry_is_the_one_in_the_backend_folder() -> None:
    entry = Path(__file__).parents[3] / "backend" / "model.py"
    assert "from conch.host.model import TritonPythonModel" in entry.read_text()
    assert "from conch.host.model import TritonPythonModel" in ENTRY


def test_incomplete_installation_is_named(root: Path) -> None:
    (root / "backends" / "python" / STUB_NAME).unlink()
    with pytest.raises(ServeError, match=STUB_NAME):
        find_triton(root / "bin" / "tritonserver")


def test_installed_server_on_path_comes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "bin" / "tritonserver").chmod(0o755)
    monkeypatch.setenv("PATH", str(root / "bin"))
    assert find_triton().server == root / "bin" / "tritonserver"


def test_model_repository_holds_one_valid_model() -> None:
    entry = ModelEntry("tiny", {"model": "/m", "block_size": 8}, instances=2)
    repository = model_repository(entry)
    assert repository == model_repository(entry)
    ((name, config),) = find_configs([repository], {"block_size": 4})
    assert (name, config.model, config.block_size) == ("tiny", "/m", 4)


def test_models_of_other_backends_are_not_read(tmp_path: Path) -> None:
    write_model(tmp_path, ModelEntry("ours", {"model": "/m"}))
    other = tmp_path / "theirs"
    (other / "1").mkdir(parents=True)
    (other / "config.pbtxt").write_text('backend: "vllm"')
    (other / "1" / "model.json").write_text('{"model": "/m", "disable_log_requests": true}')
    assert [name for name, _ in find_configs([tmp_path], {})] == ["ours"]
