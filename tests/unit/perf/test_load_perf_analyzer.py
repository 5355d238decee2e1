from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc")

from loadgen import perf_binary, perf_runs
from loadgen.grpc_client import greedy
from loadgen.latency import summarise

RECORDING = Path(__file__).with_name("perf_analyzer_2_51_export.json")
RECORDED = json.loads(RECORDING.read_text())

LDD = """\
\tlinux-vdso.so.1 (0x00007ffd)
\tlibb64.so.0d => not found
\tlibcudart.so.12 => not found
\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007fb4)
"""


def test_a_recorded_export_gives_every_timestamp_and_count():
    traces = perf_runs.parse_export(RECORDED)
    assert len(traces) == 3
    for seen, recorded in zip(traces, RECORDED["experiments"][0]["requests"], strict=True):
        assert seen.num_tokens == len(recorded["response_timestamps"]) == 4
        wanted_s = (recorded["response_timestamps"][0] - recorded["timestamp"]) / 1e9
        assert seen.ttft_s == pytest.approx(wanted_s, abs=1e-6)
        assert seen.finish_reason == "length"
        assert seen.text == " tok" * 4
    assert {seen.num_prompt for seen in traces} == {4, 5}
    assert summarise(traces)["output_tokens"] == 12


def test_responses_count_as_many_tokens_as_they_say_and_a_bare_final_counts_none():
    request = {
        "timestamp": 1_000_000_000,
        "response_timestamps": [1_100_000_000, 1_200_000_000, 1_300_000_000],
        "response_outputs": [{"text_output": "a b", "num_output_tokens": 2}, {"text_output": " c"}, {}],
    }
    (seen,) = perf_runs.parse_export({"experiments": [{"requests": [request]}]})
    assert [arrival.num_tokens for arrival in seen.arrivals] == [2, 1]


def test_an_export_of_several_experiments_is_refused():
    with pytest.raises(ValueError, match="found 2"):
        perf_runs.parse_export({"experiments": [{}, {}]})


def test_input_data_holds_each_request_with_its_sampling_parameters_as_json():
    (entry,) = perf_runs.input_data([greedy("hello", 7)])["data"]
    assert entry["text_input"] == ["hello"]
    assert entry["stream"] == [True]
    sampling = json.loads(entry["sampling_parameters"][0])
    assert sampling == {"temperature": 0, "max_tokens": 7, "ignore_eos": True}


FAKE = """\
#!{python}
import pathlib, shutil, sys
calls = pathlib.Path(__file__).with_name("calls")
number = int(calls.read_text()) if calls.exists() else 0
calls.write_text(str(number + 1))
export = sys.argv[sys.argv.index("--profile-export-file") + 1]
if number < {empty}:
    pathlib.Path(export).touch()
else:
    shutil.copy({recorded!r}, export)
"""


def fake_binary(folder: Path, empty: int) -> perf_binary.PerfAnalyzer:
    """A perf_analyzer that leaves so many empty exports, then the recorded one."""
    path = folder / "perf_analyzer"
    path.write_text(FAKE.format(python=sys.executable, empty=empty, recorded=str(RECORDING)))
    path.chmod(0o755)
    return perf_binary.PerfAnalyzer(path, {})


def test_an_empty_export_is_measured_again(tmp_path):
    traces = perf_runs.run(fake_binary(tmp_path, 1), "localhost:1", [greedy("a", 4)] * 3, 1)
    assert sum(trace.num_tokens for trace in traces) == 12
    assert (tmp_path / "calls").read_text() == "2"


def test_empty_exports_without_end_are_an_error(tmp_path):
    with pytest.raises(perf_runs.PerfAnalyzerFailed, match="3 times"):
        perf_runs.run(fake_binary(tmp_path, 99), "localhost:1", [greedy("a", 4)] * 3, 1)


def test_an_export_that_lacks_requests_is_an_error(tmp_path):
    with pytest.raises(perf_runs.PerfAnalyzerFailed, match="sent 4 requests but recorded 3"):
        perf_runs.run(fake_binary(tmp_path, 0), "localhost:1", [greedy("a", 4)] * 4, 1)


def test_missing_libraries_are_read_from_ldd():
    assert perf_binary.missing_in(LDD) == ["libb64.so.0d", "libcudart.so.12"]


def test_missing_libraries_are_linked_to_bundled_copies(tmp_path):
    bundle = tmp_path / "site" / "nvidia_pytriton.libs"
    bundle.mkdir(parents=True)
    (bundle / "libb64-98cb6333.so.0d").write_text("b64")
    (bundle / "libcudart-09529672.so.12.6.77").write_text("cudart")
    names = ["libb64.so.0d", "libcudart.so.12"]
    folder = perf_binary.link_libraries(names, tmp_path / "site", tmp_path / "links")
    assert {name: (folder / name).read_text() for name in names} == {
        "libb64.so.0d": "b64",
        "libcudart.so.12": "cudart",
    }
    perf_binary.link_libraries(names, tmp_path / "site", tmp_path / "links")  # a second time is no error


def test_a_library_that_nothing_bundles_is_named_with_how_to_install_it(tmp_path):
    with pytest.raises(perf_binary.PerfAnalyzerMissing, match=r"libb64\.so\.0d: apt-get install libb64-0d"):
        perf_binary.link_libraries(["libb64.so.0d"], tmp_path, tmp_path / "links")
