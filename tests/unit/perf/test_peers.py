from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from peers import figures, record, tables, venvs
from peers.engines import ENGINES, OURS, PEERS, WEIGHTS
from peers.limits import ModelSize, Rates, floor_figure, floor_fraction
from peers.process import Program, ProgramError, read_peak, run_to_end
from peers.rounds import Plan, Rounds, Seen, rotated
from peers.weights import Models
from peers.workloads import BY_KEY, WORKLOADS, Answer, Work, agreement

SIZE = ModelSize(
    linear_parameters=1_000,
    head_parameters=100,
    weight_bytes={"16bit": 2_200, "int8": 1_100, "4bit": 700},
    kv_bytes_per_token=10,
    attention_width=4,
)
SLOW_MEMORY = Rates(bytes_per_s=1_000.0, operations_per_s=1e9)
SLOW_ARITHMETIC = Rates(bytes_per_s=1e9, operations_per_s=1_000.0)


def answer_to(work: Work, seconds: float = 2.0, first_s: float | None = 1.0) -> Answer:
    return Answer(seconds, first_s, ((5,) * work.max_tokens,) * len(work.prompts))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_a_round_is_the_same_for_all_engines_and_differs_from_every_other(workload):
    first = workload.work(1)
    assert first == workload.work(1)
    prompts = [prompt[:16] for number in (1, 2, 3) for prompt in workload.work(number).prompts]
    assert len({tuple(prompt) for prompt in prompts}) == (3 if workload.key == "w4" else len(prompts))


def test_the_work_is_what_the_figures_are_named_after():
    assert [len(BY_KEY["w1"].work(1).prompts[0]), BY_KEY["w1"].work(1).max_tokens] == [128, 128]
    crowd = BY_KEY["w2"].work(1)
    lengths = sorted(map(len, crowd.prompts))
    assert (len(lengths), lengths[0], lengths[-1], crowd.max_tokens) == (32, 32, 512, 128)
    assert lengths == sorted(map(len, BY_KEY["w2"].work(2).prompts))
    assert [len(prompt) for prompt in BY_KEY["w3"].work(1).prompts] == [2048]
    shared = BY_KEY["w4"].work(1)
    assert len({tuple(prompt[:1024]) for prompt in (*shared.prompts, *shared.before)}) == 1
    assert len({tuple(prompt[1024:]) for prompt in (*shared.prompts, *shared.before)}) == 33
    assert BY_KEY["w1"].work(1).preparation() is None


def test_figures_count_what_each_workload_is_about():
    work = BY_KEY["w1"].work(1)
    assert BY_KEY["w1"].figure(work, answer_to(work)) == pytest.approx(127)
    assert BY_KEY["w1"].figure(work, answer_to(work, first_s=None)) == pytest.approx(64)
    work = BY_KEY["w2"].work(1)
    assert BY_KEY["w2"].figure(work, answer_to(work)) == pytest.approx(32 * 128 / 2)
    work = BY_KEY["w3"].work(1)
    assert BY_KEY["w3"].figure(work, answer_to(work)) == pytest.approx(1024)
    work = BY_KEY["w4"].work(1)
    assert BY_KEY["w4"].figure(work, answer_to(work)) == 2.0


def test_an_engine_that_stops_early_has_done_other_work():
    work = BY_KEY["w1"].work(1)
    with pytest.raises(ValueError, match="instead of 128"):
        BY_KEY["w1"].figure(work, Answer(1.0, None, ((1, 2),)))


def test_agreement_is_the_share_before_the_first_difference():
    assert agreement([(1, 2, 3, 4)], [(1, 2, 9, 4)]) == 0.5
    assert agreement([(1, 2), (1, 2), (1, 2)], [(1, 2), (1, 2), (3, 2)]) == 1.0


def test_a_decode_step_waits_for_memory_or_for_arithmetic():
    work = Work(((1,) * 9,), max_tokens=2)
    # One step: all weights and the KV of ten tokens, or 2 x (1000 + 100) + 4 x 4 x 10 operations.
    assert floor_figure("w1", "16bit", work, SIZE, SLOW_MEMORY) == pytest.approx(1_000 / 2_300)
    assert floor_figure("w1", "4bit", work, SIZE, SLOW_MEMORY) == pytest.approx(1_000 / 800)
    assert floor_figure("w1", "16bit", work, SIZE, SLOW_ARITHMETIC) == pytest.approx(1_000 / 2_360)


def test_a_prefill_attends_causally_and_skips_what_is_cached():
    assert SIZE.prefill_operations(0, 3) == 2 * 1_000 * 3 + 4 * 4 * (1 + 2 + 3) + 2 * 100
    assert SIZE.prefill_operations(10, 2) == 2 * 1_000 * 2 + 4 * 4 * (11 + 12) + 2 * 100
    work = Work(((1,) * 3,), max_tokens=1)
    assert floor_figure("w3", "16bit", work, SIZE, SLOW_ARITHMETIC) == pytest.approx(3_000 / 6_296)


def test_there_is_no_floor_where_none_is_defined():
    for key in ("w2", "w3", "w4"):
        assert floor_figure(key, "int8", BY_KEY[key].work(1), SIZE, SLOW_MEMORY) is None
        assert floor_figure(key, "16bit", BY_KEY[key].work(1), SIZE, SLOW_MEMORY) is not None
    assert floor_figure("w5", "16bit", BY_KEY["w5"].work(1), SIZE, SLOW_MEMORY) is None


def test_a_fraction_is_one_at_the_limit_for_rates_and_for_times():
    assert floor_fraction(80.0, 100.0, smaller_is_better=False) == 0.8
    assert floor_fraction(2.0, 1.0, smaller_is_better=True) == 0.5


def plan(*workloads: str) -> Plan:
    return Plan(ENGINES, tuple(BY_KEY[key] for key in workloads or BY_KEY), rounds=3)


def seen(**values: list[float]) -> dict[str, Seen]:
    found = {engine.name: Seen() for engine in ENGINES}
    for name, figures_of_w1 in values.items():
        found[name.replace("_", "-")].figures["w1"] = figures_of_w1
    return found


def test_a_ratio_pairs_rounds_and_takes_the_peer_with_the_best_median():
    compared = figures.comparisons(
        plan("w1"), seen(conch_16bit=[11, 12, 26], vllm=[9, 100, 8], openvino=[10, 10, 13])
    )
    assert compared["w1_16bit"] == {"ratio": 1.2, "lowest": 1.1, "highest": 2.0, "best_peer": "openvino"}
    assert compared["w1_4bit"]["ratio"] is None


def test_a_ratio_of_times_is_turned_round():
    assert figures.ratios([2.0], [3.0], smaller_is_better=True) == [1.5]
    assert figures.best_peer(["a", "b"], {"a": [1.0], "b": [2.0]}, smaller_is_better=True) == "a"
    assert figures.best_peer(["a"], {}, smaller_is_better=False) is None


def test_the_headline_has_every_key_measured_or_not():
    ours = Seen(startup_s=[3.0, 5.0, 4.0], peak_bytes=1_500_000_000)
    found = figures.headline({"w1_16bit": {"ratio": 1.1}}, {"w1_16bit": 0.8}, ours, None)
    assert list(found) == list(figures.MEANING)
    assert list(found["ratio"]) == list(found["floor_fraction"]) == list(figures.HEADLINE_KEYS)
    assert found["ratio"]["w1_16bit"] == 1.1 and found["ratio"]["w2_4bit"] is None
    assert (found["startup_s"], found["peak_gb"], found["perplexity"]) == (4.0, 1.5, None)


def test_engines_are_named_once_and_compared_with_peers_of_their_weights():
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)
    for weights in WEIGHTS:
        peers = [engine.peer for engine in ENGINES if engine.weights == weights]
        assert peers.count(OURS) == 1 and len(peers) > 1
    installed = {peer.name for peer in PEERS} | {OURS}
    assert {engine.peer for engine in ENGINES} <= installed
    assert all("==" in peer.requirements[0] for peer in PEERS)


def test_every_engine_goes_first_in_some_round():
    engines = list(ENGINES[:3])
    assert {rotated(engines, number)[0] for number in (1, 2, 3)} == set(engines)
    assert rotated([], 1) == []


def test_other_requirements_make_another_venv(tmp_path, monkeypatch):
    monkeypatch.setenv("CONCH_CACHE", str(tmp_path))
    folders = {venvs.folder_of(peer) for peer in PEERS}
    assert len(folders) == len(PEERS)
    assert all(folder.parent == tmp_path / "peers" for folder in folders)
    assert venvs.python_of(OURS) == Path(sys.executable)


STUB = """
import subprocess, sys, time
from lines import serve

def start(options):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    def answer(question):
        if question["max_tokens"] == 0:
            time.sleep(60)
        ids = [[7] * question["max_tokens"] for _ in question["prompts"]]
        return {"seconds": 2.0, "first_s": 1.0, "token_ids": ids}
    return {"child": child.pid, "model": options["model"]}, answer

serve(start)
"""

LIMITS = """
from lines import serve
serve(lambda options: ({}, lambda question: {"bytes_per_s": 4e10, "operations_per_s": 9e11}))
"""


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """Every engine's program is the same stub, and every interpreter is ours."""
    for name in {engine.program for engine in ENGINES}:
        (tmp_path / name).write_text(STUB)
    (tmp_path / "limits_worker.py").write_text(LIMITS)
    monkeypatch.setattr("peers.process.PROGRAMS", tmp_path)
    monkeypatch.setattr("peers.venvs.python_of", lambda name: Path(sys.executable))
    monkeypatch.setattr("peers.venvs.versions_of", lambda name: {})
    return tmp_path


def reaches(pid: int, *states: str | None) -> bool:
    """A signal arrives when the process next runs, so a state is waited for."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            state = None
        if state in states:
            return True
        time.sleep(0.01)
    return False


def test_a_program_and_its_children_stand_still_between_questions_and_end_with_it(stubs):
    with Program(Path(sys.executable), "conch_runner.py", {"model": "m"}) as program:
        child = program.ready["child"]
        assert reaches(child, "T")
        made = program.ask({"prompts": [[1], [2]], "max_tokens": 3}, timeout_s=30)
        assert made["token_ids"] == [[7, 7, 7]] * 2
        assert reaches(child, "T")
        assert program.peak_bytes > 1_000_000
    assert reaches(child, None, "Z")


def test_a_program_that_does_not_answer_in_time_is_ended_with_its_children(stubs):
    with Program(Path(sys.executable), "conch_runner.py", {"model": "m"}) as program:
        with pytest.raises(ProgramError, match="gave no answer"):
            program.ask({"prompts": [], "max_tokens": 0}, timeout_s=0.5)
        assert reaches(program.ready["child"], None, "Z")


def test_a_command_that_fails_says_what_it_printed():
    with pytest.raises(ProgramError, match="so it is"):
        run_to_end([sys.executable, "-c", "raise SystemExit('so it is')"], timeout_s=30)
    with pytest.raises(ProgramError, match="too slow"):
        run_to_end([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)


def test_peak_memory_is_read_from_the_status_file():
    assert read_peak("Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1 kB\n") == 2048 * 1024
    assert read_peak("Name:\tzombie\n") == 0


def test_a_run_of_stubs_gives_a_whole_record(stubs):
    broken = next(engine for engine in ENGINES if engine.peer == "transformers")
    (stubs / broken.program).write_text("raise SystemExit('no such luck')")
    engines = tuple(engine for engine in ENGINES if engine.name in ("conch-16bit", "vllm", broken.name))
    small = Plan(engines, (BY_KEY["w1"], BY_KEY["w4"]), rounds=2)
    rounds = Rounds(small, Models({"bf16": "folder"}, SIZE, {}), say=lambda line: None)
    rounds.run()
    found = record.of_run(rounds, SIZE, {"16bit": 20.0})
    assert "no such luck" in found["failures"][broken.name]
    assert found["headline"]["ratio"]["w1_16bit"] == found["headline"]["ratio"]["w4_16bit"] == 1.0
    assert found["comparisons"]["ttft_w1_16bit"]["best_peer"] == "vllm"
    assert found["engines"]["vllm"]["figures"]["w1"] == [127.0, 127.0]
    assert found["engines"]["vllm"]["same_tokens_as_ours"]["w4"] == [1.0, 1.0]
    assert len(found["limits"]["read_gb_per_s"]) == 3
    assert tables.engine_table(small, rounds.seen, found["limits"]["figures"]).row_count == 4
    assert tables.comparison_table(found["comparisons"], found["floor_fractions"]).row_count == 3
