"""What the keys of ranks on other hosts allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conch.api.errors import ConfigError
from conch.api.mesh_config import shape_of

if TYPE_CHECKING:
    from conch.api.config import EngineConfig

_ANYWHERE = ("", "0.0.0.0", "::")
_LAST_PORT = 65535


def check_remote_ranks(config: EngineConfig) -> None:
    """Refuse ranks of other hosts that could not come, and an address that nobody comes to.

    Raises
    ------
    ConfigError
        Naming the key.
    """
    if config.remote_ranks == 0:
        for key in ("master_addr", "rank_token_file"):
            if getattr(config, key) is not None:
                raise ConfigError(f"{key} is of no use with remote_ranks 0")
        return
    ranks = shape_of(config).size
    if config.remote_ranks >= ranks:
        raise ConfigError(
            f"remote_ranks must be less than the ranks in all ({ranks}), of which the engine is one, "
            f"not {config.remote_ranks}"
        )
    if config.master_addr is None or config.master_addr in _ANYWHERE:
        raise ConfigError("remote_ranks needs master_addr: the address of this host that the others reach")
    if config.master_port > _LAST_PORT:
        raise ConfigError(f"master_port must be {_LAST_PORT} or less, not {config.master_port}")
    if config.data_parallel_size > 1:
        raise ConfigError(
            "remote_ranks and data_parallel_size: ranks of other hosts would not know whose they are"
        )
