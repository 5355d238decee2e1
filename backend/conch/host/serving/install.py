"""Where tritonserver and its Python backend are: an installation of NVIDIA's, or the one in pytriton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conch.host.serving.errors import ServeError

CONTAINER_ROOT = Path("/opt/tritonserver")
STUB_NAME = "triton_python_backend_stub"
PYTHON_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")


@dataclass(frozen=True)
class TritonInstall:
    """One tritonserver with everything that a Python-based backend needs.

    Attributes
    ----------
    server
        The executable.
    python_backend
        Folder that holds `PYTHON_BACKEND_FILES`.
    stub
        Executable in which Triton runs a model; it embeds one minor version of Python.
    libraries
        Folders that the executables' shared libraries are found in.
    origin
        Name for people to read.
    flags
        Names of the flags that the server takes; None where we cannot tell.
    """

    server: Path
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...]
    origin: str
    flags: frozenset[str] | None = None

    def missing_files(self) -> list[Path]:
        """Return the files that this installation should hold and does not."""
        needed = [self.server, self.stub, *(self.python_backend / name for name in PYTHON_BACKEND_FILES)]
        return [path for path in needed if not path.is_file()]


def python_version() -> str:
    """Return major and minor version of the running interpreter, as stubs are named after it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def find_triton(requested: Path | None = None) -> TritonInstall:
    """Return the tritonserver to use: the one asked for, one on PATH, NVIDIA's container's, or pytriton's.

    Raises
    ------
    ServeError
        There is none, or the one found lacks a file.
    """
    install = _installed(requested) if requested else next(_candidates(), None)
    if install is None:
        raise ServeError(
            "found no tritonserver: pip install 'conch[serve]' brings one for x86-64 Linux with glibc 2.35 "
            "or later; or run in NVIDIA's container, or name one with --triton-server PATH"
        )
    if missing := install.missing_files():
        raise ServeError(
            f"{install.origin} lacks {', '.join(map(str, missing))}; conch needs Triton's Python backend "
            f"with a stub for Python {python_version()}"
        )
    return install


def _candidates() -> Iterator[TritonInstall]:
    on_path = shutil.which("tritonserver")
    if on_path:
        yield _installed(Path(on_path))
    in_container = CONTAINER_ROOT / "bin" / "tritonserver"
    if in_container.is_file():
        yield _installed(in_container)
    if importlib.util.find_spec("pytriton") is not None:
        yield _from_pytriton()


def _installed(server: Path) -> TritonInstall:
    if server.is_dir():
        server = server / "bin" / "tritonserver"
    root = server.resolve().parent.parent
    backend = root / "backends" / "python"
    return TritonInstall(
        server, backend, backend / STUB_NAME, (root / "lib", *_python_libraries()), str(server)
    )


def _from_pytriton() -> TritonInstall:
    from pytriton.server.triton_server_config import TritonServerConfig
    from pytriton.utils.distribution import get_libs_path, get_root_module_path, get_stub_path

    root = Path(get_root_module_path()) / "tritonserver"
    return TritonInstall(
        server=root / "bin" / "tritonserver",
        python_backend=root / "backends" / "python",
        stub=Path(get_stub_path(python_version())),
        libraries=(*_python_libraries(), Path(get_libs_path())),
        origin=f"nvidia-pytriton {importlib.metadata.version('nvidia-pytriton')}",
        flags=frozenset(TritonServerConfig.server_arg_keys),
    )


def _python_libraries() -> tuple[Path, ...]:
    """Return where the stub may find libpython: a relocated interpreter states a wrong LIBDIR."""
    folders = [Path(sys.base_prefix) / "lib"]
    stated = sysconfig.get_config_var("LIBDIR")
    if stated and os.path.isdir(stated):
        folders.insert(0, Path(stated))
    return tuple(dict.fromkeys(folders))
