from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

from conch.api.errors import ConfigError
from conch.host import tensors
from conch.host.settings import SETTINGS_VARIABLE, settings_from_environment


def triton_module():
    """Triton's own module, of which the auto-complete object is plain Python."""
    pytriton = importlib.util.find_spec("pytriton")
    if pytriton is None or not pytriton.submodule_search_locations:
        pytest.skip("pytriton is not installed")
    path = Path(
        pytriton.submodule_search_locations[0], "tritonserver/backends/python/triton_python_backend_utils.py"
    )
    spec = importlib.util.spec_from_file_location("real_pb_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(**said):
    base = {"name": "m", "max_batch_size": 0, "input": [], "output": []}
    return triton_module().ModelConfig(json.dumps({**base, **said}))


def test_an_empty_configuration_is_completed():
    config = config_of()
    tensors.complete(config)
    done = config.as_dict()
    assert done["model_transaction_policy"] == {"decoupled": True}
    assert done["max_batch_size"] == 0
    inputs = {tensor["name"]: tensor for tensor in done["input"]}
    assert inputs["text_input"] == {
        "name": "text_input",
        "data_type": "TYPE_STRING",
        "dims": [1],
        "optional": True,
    }
    assert {"stream", "sampling_parameters", "exclude_input_in_output", "return_logprobs"} <= set(inputs)
    assert [tensor["name"] for tensor in done["output"]][:6] == [
        "text_output",
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
    ]
    tensors.complete(config)  # Triton completes once for each instance
    assert len(done["input"]) == len(tensors.INPUTS)


def test_what_is_declared_may_stay():
    declared = {"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1], "optional": True}
    config = config_of(input=[declared], model_transaction_policy={"decoupled": True})
    tensors.complete(config)
    assert [t for t in config.as_dict()["input"] if t["name"] == "input_ids"] == [declared]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"max_batch_size": 8}, "max_batch_size must be 0"),
        ({"model_transaction_policy": {"decoupled": False}}, "must be decoupled"),
        ({"dynamic_batching": {}}, "dynamic_batching"),
        ({"input": [{"name": "prompt", "data_type": "TYPE_STRING", "dims": [1]}]}, "no input 'prompt'"),
        (
            {"input": [{"name": "stream", "data_type": "TYPE_INT32", "dims": [1]}]},
            "TYPE_BOOL, not TYPE_INT32",
        ),
        ({"input": [{"name": "stream", "data_type": "TYPE_BOOL", "dims": [1]}]}, "must be optional"),
        ({"output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [2]}]}, "dims"),
    ],
)
def test_what_clashes_is_named(said, words):
    with pytest.raises(ConfigError, match=words):
        tensors.complete(config_of(**said))


def test_settings_come_through_the_environment(monkeypatch):
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    assert settings_from_environment() == {}
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"max_num_seqs": 4}')
    assert settings_from_environment() == {"max_num_seqs": 4}
    for wrong in ("{", "[1]"):
        monkeypatch.setenv(SETTINGS_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=SETTINGS_VARIABLE):
            settings_from_environment()


def test_tritons_door_opens(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", types.ModuleType("fake"))
    door = Path(tensors.__file__).parents[2] / "model.py"
    spec = importlib.util.spec_from_file_location("door", door)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        assert {"auto_complete_config", "initialize", "execute", "finalize"} <= set(
            dir(module.TritonPythonModel)
        )
        with pytest.raises(ConfigError, match="decoupled"):
            module.TritonPythonModel().initialize({"model_config": "{}"})
    finally:
        sys.modules.pop("conch.host.model", None)
