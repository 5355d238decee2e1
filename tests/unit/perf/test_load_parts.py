from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc")

from loadgen import processes, prometheus, report
from loadgen import worker as worker_module
from loadgen.prompts import prompt, shared_prefix_prompts
from loadgen.served import ServedModel, ServerError, assignment
from loadgen.worker import Worker, WorkerError

METRICS = """\
# HELP conch:num_requests_running Requests that hold KV
# TYPE conch:num_requests_running gauge
conch:num_requests_running{model="smollm2",version="1"} 3
conch:num_requests_running{model="other",version="1"} 2
conch:prefix_cache_hits 1.5e+03
nv_inference_count{model="smollm2"} 7
"""

ECHO = """
import lines

def start(options):
    def answer(question):
        print("noise")
        if question.get("die"):
            raise SystemExit("it died")
        if question.get("sleep"):
            import time; time.sleep(30)
        return {"options": options, "question": question}
    return {"ready": True}, answer

lines.serve(start)
"""


def test_metrics_are_summed_over_labels():
    metrics = prometheus.parse(METRICS)
    assert prometheus.read(metrics, prometheus.RUNNING) == 5
    assert prometheus.read(metrics, "conch:prefix_cache_hits_total") == 1500


def test_a_metric_that_is_not_there_is_an_error_that_lists_those_that_are():
    with pytest.raises(KeyError, match=r"conch:nope.*conch:num_requests_running"):
        prometheus.read(prometheus.parse(METRICS), "conch:nope")


def test_prompts_are_reproducible_and_differ_from_the_start():
    assert prompt(50, 1) == prompt(50, 1)
    assert len(prompt(50, 1).split()) == 50
    assert len({prompt(50, seed)[:40] for seed in range(50)}) == 50


def test_shared_prefixes_are_shared_and_what_follows_is_not():
    texts = [text.split() for text in shared_prefix_prompts(8, 20, 5, seed=4)]
    assert len({tuple(words[:20]) for words in texts}) == 1
    assert len({tuple(words[20:]) for words in texts}) == 8


@pytest.mark.parametrize(
    ("value", "text"), [(True, "k=true"), (128, "k=128"), ("bfloat16", "k=bfloat16"), (None, "k=null")]
)
def test_settings_are_spelled_as_serve_reads_them(value, text):
    assert assignment("k", value) == text


def test_a_server_that_ends_at_once_is_reported_with_its_log():
    script = "import sys; print('no such model'); sys.exit(3)"
    with (
        pytest.raises(ServerError, match=r"ended with 3[\s\S]*no such model"),
        ServedModel((sys.executable, "-c", script)),
    ):
        pass


def test_a_worker_answers_and_its_prints_do_not_get_in_the_way(tmp_path, monkeypatch):
    with echo(tmp_path, monkeypatch) as worker:
        assert worker.ready == {"ready": True}
        assert worker.ask({"a": 1}) == {"options": {"x": 2}, "question": {"a": 1}}
        pid = worker._process.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("question", "word"), [({"die": True}, "it died"), ({"sleep": True}, "no answer")])
def test_a_worker_that_dies_or_dawdles_is_an_error(tmp_path, monkeypatch, question, word):
    with echo(tmp_path, monkeypatch) as worker, pytest.raises(WorkerError, match=word):
        worker.ask(question, timeout_s=2.0)


def echo(tmp_path, monkeypatch) -> Worker:
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(worker_module.PROGRAMS))
    monkeypatch.setattr(worker_module, "PROGRAMS", tmp_path)
    return Worker("echo.py", {"x": 2})


def test_a_process_family_is_ended_whole():
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    process = subprocess.Popen([sys.executable, "-c", script])
    while len(members := processes.family(process.pid)) < 2:
        pass
    processes.end_family(process.pid, grace_s=2)
    process.wait()
    assert not any(member.is_running() for member in members)


def test_shared_memory_counts_each_region_once_and_ignores_other_files():
    lines = [
        "7f00-8f00 rw-s 00000000 00:1a 11   /dev/shm/one",
        "9f00-9f80 rw-s 00001000 00:1a 11   /dev/shm/one",
        "af00-bf00 rw-s 00000000 00:1a 12   /dev/shm/two (deleted)",
        "cf00-df00 r--p 00000000 00:1a 13   /usr/lib/libc.so",
    ]
    assert sorted(processes._shm_regions(lines)) == [("11", 0x80), ("11", 0x1000), ("12", 0x1000)]


def test_this_process_has_a_place_in_memory_and_cpu():
    assert sum(processes.memory_mb(os.getpid()).values()) > 1
    assert processes.cpu_cores(os.getpid(), 0.05) >= 0


def test_results_are_never_overwritten(tmp_path):
    paths = [report.write("x", {"numbers": [1, 2], "names": ["a"]}, tmp_path) for _ in range(3)]
    assert len(set(paths)) == 3
    text = paths[0].read_text()
    assert '"numbers": [1, 2]' in text
