"""Each instance of a model has GPUs of its own: what config.pbtxt says reaches the engine's environment."""

from __future__ import annotations

import os

import psutil
import pytest

from conch.api.config import EngineConfig
from conch.api.errors import ConfigError
from conch.host.devices import divide_devices, environment_for, format_device_groups, parse_device_groups
from conch.host.instance import Instance, instance_of
from conch.host.shares import engine_shares


def group_of(count, said=None, kind="KIND_MODEL"):
    config = {"instance_group": [{"count": count, "kind": kind}]}
    return config if said is None else {**config, "parameters": {"gpu_device_ids": {"string_value": said}}}


@pytest.mark.parametrize(
    ("groups", "name", "instance"),
    [
        ([], "m_0_0", Instance(0, 1)),
        ([{"count": 2}], "m_0_1", Instance(1, 2)),
        ([{"count": 2}, {"count": 1}], "m_1_0", Instance(2, 3)),
        ([{"count": 2, "gpus": [0, 1]}], "my_9_m_0_3", Instance(3, 4)),
    ],
)
def test_instances_are_counted(groups, name, instance):
    assert instance_of({"instance_group": groups}, name) == instance


def test_the_instance_takes_the_group_of_its_index():
    said = "0,1; 2,3"
    assert instance_of(group_of(2, said), "m_0_0").devices == (0, 1)
    assert instance_of(group_of(2, said), "m_0_1").devices == (2, 3)
    two = {**group_of(1, "4;5,6"), "instance_group": [{"count": 1}, {"count": 1}]}
    assert instance_of(two, "m_1_0").devices == (5, 6)
    assert instance_of(group_of(2), "m_0_1").devices is None


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (group_of(3, "0;1"), "m_0_2", r"is for 2 instances, but .* make 3, of which this is number 2"),
        (group_of(1, "0;1"), "m_0_0", r"is for 2 instances, but .* make 1"),
        (group_of(1, "0,x"), "m_0_0", "must be device numbers by instance"),
        (group_of(1, "0,-1"), "m_0_0", "must be device numbers by instance"),
        (group_of(1, ""), "m_0_0", "must be device numbers by instance"),
        (group_of(2, "0;1,1"), "m_0_0", "names a device twice"),
        (group_of(1, "0", kind="KIND_GPU"), "m_0_0", "must be of KIND_MODEL"),
    ],
)
def test_what_fits_no_instance_is_refused(config, name, words):
    with pytest.raises(ConfigError, match=words):
        instance_of(config, name)


def test_groups_are_written_as_they_are_read():
    assert format_device_groups(parse_device_groups("0,1;2,3")) == "0,1;2,3"


def test_replicas_divide_the_devices_of_their_instance(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = EngineConfig(model="m", data_parallel_size=2)
    shares = engine_shares(config, Instance(1, 2, (2, 3)))
    assert [share.environment for share in shares] == [
        {"CUDA_VISIBLE_DEVICES": "2"},
        {"CUDA_VISIBLE_DEVICES": "3"},
    ]
    assert {share.config.device for share in shares} == {"cuda"}, "an engine that finds no GPU must say so"


def test_ranks_take_a_device_each():
    config = EngineConfig(model="m", tensor_parallel_size=2, data_parallel_size=2)
    assert divide_devices((4, 5, 6, 7), config) == [(4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("devices", "settings", "words"),
    [
        ((0, 1), {}, r"2 devices, but .* 1 replica of 1 rank take 1"),
        ((0, 1, 2), {"data_parallel_size": 2}, r"3 devices, but .* 2 replicas of 1 rank take 2"),
        (
            (0,),
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            r"1 replica of 4 ranks take 4",
        ),
        ((0,), {"device": "cpu"}, "of no use with device 'cpu'"),
        ((0,), {"device": "cuda:1"}, "of no use with device 'cuda:1'"),
        ((0, 1), {"tensor_parallel_size": 2}, "run on CPUs so far"),
    ],
)
def test_devices_that_ranks_cannot_use_are_refused(devices, settings, words):
    with pytest.raises(ConfigError, match=words):
        engine_shares(EngineConfig(model="m", **settings), Instance(0, 1, devices))


def test_devices_are_counted_among_those_that_the_server_sees():
    assert environment_for((1, 2), {"CUDA_VISIBLE_DEVICES": "4, 5,6"}) == {"CUDA_VISIBLE_DEVICES": "5,6"}
    assert environment_for((0,), {"CUDA_VISIBLE_DEVICES": "GPU-abc"}) == {"CUDA_VISIBLE_DEVICES": "GPU-abc"}
    with pytest.raises(ConfigError, match=r"names device 3, but CUDA_VISIBLE_DEVICES '4,5' shows 2 devices"):
        environment_for((3,), {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_engine_processes_are_started_with_their_devices(make_backend, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6")
    others = set(psutil.Process().children())
    backend = make_backend(data_parallel_size=2, instance=Instance(1, 2, (2, 3)))
    engines = set(psutil.Process().children()) - others
    told = [process.environ()["CUDA_VISIBLE_DEVICES"] for process in engines]
    assert sorted(told) == ["5", "6"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,4,5,6"
    backend.close()


def test_mesh_ranks_of_several_engines_share_the_cores():
    cores = len(os.sched_getaffinity(0))
    config = EngineConfig(model="m", tensor_parallel_size=2, data_parallel_size=2)
    assert [share.config.num_threads for share in engine_shares(config, Instance())] == [
        max(1, cores // 4)
    ] * 2
