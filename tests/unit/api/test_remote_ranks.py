"""Which keys of ranks on other hosts make sense together."""

from __future__ import annotations

import json

import pytest

from conch.api import ConfigError, EngineConfig
from conch.api.config import load_config

GIVEN = {"model": "m", "tensor_parallel_size": 4, "remote_ranks": 2, "master_addr": "10.0.0.1"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remote_ranks": 4}, r"remote_ranks must be less than the ranks in all \(4\)"),
        ({"remote_ranks": -1}, "remote_ranks must be 0 or more"),
        ({"master_addr": None}, "remote_ranks needs master_addr"),
        ({"master_addr": "0.0.0.0"}, "remote_ranks needs master_addr"),
        ({"master_port": 65536}, "master_port must be 65535 or less"),
        ({"master_port": 0}, "master_port must be greater than 0"),
        ({"data_parallel_size": 2}, "remote_ranks and data_parallel_size"),
        ({"remote_ranks": 0}, "master_addr is of no use with remote_ranks 0"),
        (
            {"remote_ranks": 0, "master_addr": None, "rank_token_file": "t"},
            "rank_token_file is of no use with remote_ranks 0",
        ),
        ({"tensor_parallel_size": 1}, r"remote_ranks must be less than the ranks in all \(1\)"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes, reason):
    EngineConfig(**GIVEN)
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**{**GIVEN, **changes})


def test_the_secrets_file_is_found_beside_the_configuration(tmp_path):
    path = tmp_path / "model.json"
    for name, meant in (("token", tmp_path / "token"), ("/etc/token", "/etc/token")):
        path.write_text(json.dumps({**GIVEN, "rank_token_file": name}))
        assert load_config(path).rank_token_file == str(meant)
