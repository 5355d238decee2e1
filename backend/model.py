"""Triton's door: the Python backend's stub imports this file and looks for `TritonPythonModel`.

The stub has appended this folder to `sys.path`, so that `conch` is found here where it is not installed.
"""

from conch.host.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
