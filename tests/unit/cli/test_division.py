"""Topologies on paper: repositories for them, what ranks hold, and what they are predicted to take."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from conch.api.config import parse_config
from conch.api.errors import ConfigError
from conch.api.mesh import MeshShape, Seat
from conch.cli.common import DEMO_MODEL
from conch.cli.hardware import ASSUMED, DEVICES, Assumptions, Machine
from conch.cli.main import main
from conch.cli.prediction import Load, Predictor
from conch.cli.repository import places
from conch.model.mesh.holding import Holding, Weights
from conch.model.mesh.split import Heads
from conch.model.mesh.traffic import Speech

NOTHING = {"all-reduce": 0, "gather": 0, "send": 0, "all-to-all": 0, "all-gather": 0}
REPOSITORIES = Path(__file__).parents[3] / "model_repository"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path / "cache"))


def create(folder, *arguments):
    return main(["repository", "create", "--demo", *arguments, str(folder / "repo")])


def test_a_topology_is_written_and_shown(tmp_path, capsys):
    sizes = ["--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--data-parallel-size=2"]
    assert create(tmp_path, *sizes, "--drafter=ngram", "--name=demo") == 0
    folder = tmp_path / "repo" / "demo"
    assert json.loads((folder / "1" / "model.json").read_text()) == {
        "model": "demo:llama",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 2,
        "speculative_config": {"method": "ngram"},
    }
    shown = capsys.readouterr().out
    rows = re.findall(r"^ +(\d) +(\d) +(\d) +auto *$", shown, re.MULTILINE)
    assert rows == [("0", str(replica), str(rank)) for replica in range(2) for rank in range(4)]
    assert re.search(r"^ +3 +0 +0-1 +4-7 +2-3 ", shown, re.MULTILINE), "rank 3 has the second half of stage 0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tensor-parallel-size=3"], "tensor_parallel_size 3 cannot divide 8 query heads and 4 KV heads"),
        (["--pipeline-parallel-size=5"], "pipeline_parallel_size 5 cannot divide 4 layers"),
        (["--tensor-parallel-size=0"], "tensor_parallel_size must be greater than 0"),
        (["--name=a/b"], "a/b"),
        (["--expert-parallel-size=9"], "expert_parallel_size 9 is more than the 8 experts of a layer"),
        (["--model=demo:llama", "--expert-parallel-size=2"], "has no experts to divide"),
        (["--gpus=0,1", "--instances=3"], "2 devices cannot be divided among 3 instances"),
        (["--gpus=0;1", "--instances=2"], "must be device numbers like 0,1,2,3"),
        (["--gpus=0,1"], "2 devices, but each rank takes one: 1 replica of 1 rank take 1"),
        (["--gpus=0,1", "--tensor-parallel-size=2"], "run on CPUs so far"),
    ],
)
def test_what_no_engine_would_take_is_not_written(tmp_path, capsys, arguments, words):
    assert create(tmp_path, *arguments) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "repo").exists()


def test_gpus_are_divided_among_instances_and_their_replicas(tmp_path, capsys):
    assert create(tmp_path, "--instances=2", "--data-parallel-size=2", "--gpus=4,5,6,7", "--name=d") == 0
    said = (tmp_path / "repo" / "d" / "config.pbtxt").read_text()
    assert 'parameters { key: "gpu_device_ids" value: { string_value: "4,5;6,7" } }' in said
    rows = re.findall(r"^ +(\d) +(\d) +0 +GPU (\d)", capsys.readouterr().out, re.MULTILINE)
    assert rows == [("0", "0", "4"), ("0", "1", "5"), ("1", "0", "6"), ("1", "1", "7")]


def test_the_last_ranks_come_from_other_hosts():
    sizes = {"tensor_parallel_size": 3, "remote_ranks": 2, "master_addr": "10.0.0.1"}
    assert [place[3] for place in places(parse_config({"model": "m", **sizes}), 1, [])] == [
        "auto",
        "another host",
        "another host",
    ]


def test_each_rank_has_its_place():
    config = parse_config({"model": "m", "tensor_parallel_size": 2})
    assert places(config, 2, [(0, 1), (2, 3)]) == [
        (0, 0, 0, "GPU 0"),
        (0, 0, 1, "GPU 1"),
        (1, 0, 0, "GPU 2"),
        (1, 0, 1, "GPU 3"),
    ]


@pytest.mark.parametrize("folder", sorted(path.parent for path in REPOSITORIES.glob("*/README.md")))
def test_ready_repositories_say_what_they_are_in_five_lines(folder):
    assert len((folder / "README.md").read_text().splitlines()) == 5
    models = [path.parents[1].name for path in folder.glob("*/1/model.json")]
    assert models
    text = (folder / "README.md").read_text()
    for model in models:
        assert f"`{model}`" in text
    for path in folder.glob("*/1/model.json"):
        raw = json.loads(path.read_text())
        assert raw["model"] == DEMO_MODEL or raw["model"].startswith("demo:"), "no path of one machine"
        parse_config(raw)


def test_topology_shows_who_holds_what_and_what_they_tell(capsys):
    assert (
        main(["topology", "--demo", "--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [(rank["stage"], rank["part"]) for rank in found["ranks"]] == [(1, 0), (1, 1), (0, 0), (0, 1)]
    layers = sorted({tuple(rank["layers"]) for rank in found["ranks"]})
    assert layers[0][0] == 0 and layers[0][1] == layers[1][0] and layers[1][1] == 4
    last, first = found["ranks"][0], found["ranks"][2]
    held = {rank["rank"]: rank["layers"][1] - rank["layers"][0] for rank in found["ranks"]}
    state = 128 * 4
    assert last["bytes_per_token"] == {**NOTHING, "all-reduce": 2 * held[0] * state, "gather": 130 * 4}
    assert first["bytes_per_token"] == {
        **NOTHING,
        "all-reduce": (2 * held[2] + 1) * state,
        "send": state,
    }
    assert last["kv_bytes_per_token"] == held[0] * 2 * 2 * 16 * 4
    assert found["predicted"] is None


def test_experts_are_divided_among_parts(capsys):
    sizes = ["--tensor-parallel-size=2", "--expert-parallel-size=2"]
    assert main(["topology", "--demo", *sizes, "--json", "--hardware=8xH200"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["experts"] for rank in found["ranks"]] == [[0, 4], [0, 4], [4, 8], [4, 8]]
    half = 1 / 2
    for rank in found["ranks"]:
        assert rank["bytes_per_token"]["all-to-all"] == 2 * half * 2 * half * 128 * 4 * 4
        assert rank["bytes_per_token"]["all-gather"] == 8 * 8 * 4
    whole = json.loads(run_json(capsys, "--model=demo:mixtral"))["ranks"][0]["weight_bytes"]
    assert max(rank["weight_bytes"] for rank in found["ranks"]) < whole / 3
    decode = found["predicted"]["decode"]
    assert decode["256"]["tokens_per_s"] > decode["1"]["tokens_per_s"] > 0


def run_json(capsys, *arguments):
    assert main(["topology", *arguments, "--json"]) == 0
    return capsys.readouterr().out


def test_layers_of_stages_can_be_said(capsys):
    said = run_json(capsys, "--demo", "--pipeline-parallel-size=2", "--set", "pipeline_layers=[1, 3]")
    assert [rank["layers"] for rank in json.loads(said)["ranks"]] == [[1, 4], [0, 1]]
    assert main(["topology", "--demo", "--pipeline-parallel-size=2"]) == 0
    assert "an engine measures them" in capsys.readouterr().out


def test_topology_needs_no_weights(tmp_path, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["topology", f"--model={tmp_path}", "--tensor-parallel-size=2", "--hardware=8xH200"]
    assert main([*arguments, "--requests=16"]) == 0
    shown = capsys.readouterr().out
    assert "Predicted, not measured" in shown and "4.8 TB/s" in shown
    assert re.search(r"^ +16 +\d", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware=H200"], "such as 8xH200"),
        (["--hardware=8xH900"], "known: A100, H100, H200"),
        (["--hardware=1xH200", "--tensor-parallel-size=2"], "has 1 devices, and there are 2 ranks"),
        (["--requests=0"], "must be 1 or more"),
        (["--tensor-parallel-size=3"], "tensor_parallel_size 3 cannot divide"),
    ],
)
def test_topology_refuses(capsys, arguments, words):
    assert main(["topology", "--demo", *arguments]) == 1
    assert words in capsys.readouterr().err


EXACT = Assumptions(of_bandwidth=1.0, of_operations=1.0, of_link=1.0, collective_s=0.0, of_memory=1.0)


def holding(rank=0, tensor=1, pipeline=1, layers=10_000_000, head=1_000_000):
    seat = Seat(rank, MeshShape(tensor, pipeline), 1.0)
    return Holding(
        seat=seat,
        layers=(0, 4),
        heads=Heads((0, 8), (0, 4)),
        experts=(0, 0),
        num_experts=0,
        weights=Weights(0, layers, 0, head if seat.is_last_stage else 0),
        dtype="bfloat16",
        weight_bytes=2 * (layers + head),
        kv_bytes=1000,
        head_sizes=128,
        speech=Speech(seat, width=1000, itemsize=2, sums=8 if tensor > 1 else 0, vocabulary=500),
    )


def test_a_small_decode_waits_for_memory():
    device = DEVICES["H200"]
    seconds = Predictor([holding()], device, EXACT).step_s(Load(rows=2, tokens=1, context=100))
    assert seconds == pytest.approx((2 * 11_000_000 + 2 * 100 * 1000) / device.bandwidth)


def test_a_prompt_waits_for_products():
    device = DEVICES["H200"]
    seconds = Predictor([holding()], device, EXACT).step_s(Load(rows=1, tokens=4096, context=4096))
    attention = 2 * 8 * 128 * 4 * 4096 * (4096 + 1) / 2
    assert seconds == pytest.approx((2 * (10_000_000 * 4096 + 1_000_000) + attention) / device.operations)


def test_a_collective_takes_its_bytes_and_a_moment():
    device = DEVICES["H200"]
    alone = Predictor([holding()], device, EXACT).step_s(Load(4, 1, 100))
    pair = [holding(rank, tensor=2) for rank in range(2)]
    reduced, gathered = 4 * 1000 * 2 * 8, 4 * 250 * 2
    extra = Predictor(pair, device, EXACT).step_s(Load(4, 1, 100)) - alone
    assert extra == pytest.approx((reduced + gathered) / device.link, rel=1e-3)
    slow = Assumptions(1.0, 1.0, 1.0, 1e-3, 1.0)
    assert Predictor(pair, device, slow).step_s(Load(4, 1, 100)) == pytest.approx(9e-3, rel=0.1)


def test_stages_work_at_once_where_there_are_requests_for_all():
    stages = [holding(rank, pipeline=2, head=0) for rank in range(2)]
    predictor = Predictor(stages, DEVICES["H200"], EXACT)
    one, two, four = (predictor.decode_s(count, 100) for count in (1, 2, 4))
    assert two == pytest.approx(one, rel=1e-3), "each stage has a request of its own"
    assert four == pytest.approx(two, rel=0.05), "weights are read once for two"


def test_one_request_keeps_one_part_busy_and_an_expert():
    device = DEVICES["H200"]
    speech = Speech(Seat(0, MeshShape(1, 1, 4), 1.0), 1000, 2, 0, 500, expert_layers=4, chosen=2, slots=8)
    part = dataclasses.replace(
        holding(layers=0, head=0),
        seat=speech.seat,
        experts=(0, 2),
        num_experts=8,
        weights=Weights(0, 10_000_000, 80_000_000, 0),
        kv_bytes=0,
        speech=speech,
    )
    one, four = (Predictor([part], device, EXACT).step_s(Load(rows, 1, 1)) for rows in (1, 4))
    told = 2 * 2 * (3 / 4) * 1000 * 2 * 4 + 3 * 8 * 8 * 4
    assert one == pytest.approx(2 * (10_000_000 + 40_000_000) / device.bandwidth + told / device.link)
    hit = 1 - (1 - 2 / 8) ** 4
    assert four == pytest.approx(2 * (10_000_000 + hit * 80_000_000) / device.bandwidth + told / device.link)


def test_kv_fits_beside_the_weights():
    device = DEVICES["H100"]
    assert Predictor([holding()], device, EXACT).kv_tokens == int((80e9 - 22e6) // 1000)
    assert Predictor([holding(layers=10**11)], device, ASSUMED).kv_tokens == 0


def test_a_machine_is_a_number_of_devices():
    assert Machine.parse("8xH200").count == 8
    with pytest.raises(ConfigError, match="0xH200"):
        Machine.parse("0xH200")
