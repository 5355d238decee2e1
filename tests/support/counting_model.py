"""A model for Triton's own Python backend that counts slowly: what the supervisor is tested with.

`SOURCE` runs inside the stub.
"""

from __future__ import annotations

from pathlib import Path

CONFIG = """\
backend: "python"
model_transaction_policy { decoupled: True }
input [{ name: "text_input" data_type: TYPE_STRING dims: [1] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""

SOURCE = """\
import subprocess, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        if FAILS:
            raise RuntimeError("no counting today")
        self.child = subprocess.Popen(["sleep", "600"])

    def execute(self, requests):
        for request in requests:
            limit = int(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0])
            arguments = (request.get_response_sender(), limit)
            threading.Thread(target=self.count, args=arguments, daemon=True).start()

    def count(self, sender, limit):
        for number in range(limit):
            text = np.array([str(number).encode()], dtype=object)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
            time.sleep(0.05)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        self.child.kill()
        self.child.wait()
"""


def write_counting_model(repository: Path, fails: bool = False) -> Path:
    """Write it as `counter` and return the repository."""
    version = repository / "counter" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(f"FAILS = {fails}\n{SOURCE}")
    return repository
