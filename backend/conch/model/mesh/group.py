"""The ranks that compute together, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conch.api.mesh import Seat
from conch.model.mesh.handover import Handover

_LOCALHOST = "127.0.0.1"


class MeshGroup:
    """Collectives of plain tensors over gloo, without anything global: engines in one process do not meet.

    A rank that dies closes its sockets, which raises in all that wait for it; one that hangs raises in them
    after the seat's timeout.

    Parameters
    ----------
    seat
        Where this rank sits.

    Attributes
    ----------
    handover
        Links to the stage before and the one after.
    bytes_reduced, bytes_gathered
        Payload that this rank has put into all-reduces and gathers.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        shape = seat.shape
        self._store = dist.FileStore(seat.store, shape.size)  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=seat.timeout_s))
        self._tensor = self._connect(f"tensor-{seat.stage}", seat.part, shape.tensor)
        self.handover = Handover(self._connect(f"pipeline-{seat.part}", seat.stage, shape.pipeline), seat)
        self.bytes_reduced = self.bytes_gathered = 0

    def least(self, name: str, number: int) -> int:
        """Return the least of what all ranks say under a name, which is used once."""
        self._store.set(f"{name}-{self.seat.rank}", str(number))
        return min(int(self._store.get(f"{name}-{rank}")) for rank in range(self.seat.shape.size))

    def hear_first(self, name: str, say: Callable[[], list[int]]) -> list[int]:
        """Return the numbers that rank 0 says under a name, which is used once."""
        if self.seat.rank == 0:
            self._store.set(name, " ".join(map(str, say())))
        return [int(number) for number in self._store.get(name).split()]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks of this stage, in place."""
        if self._tensor is not None:
            tensor = tensor.contiguous()
            self.bytes_reduced += tensor.nbytes
            self._tensor.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Put the columns of all ranks of this stage beside each other, at its part 0; None elsewhere.

        Parameters
        ----------
        tensor : [L, widths[part]]
        widths
            Columns of each part.
        """
        if self._tensor is None:
            return tensor
        widest = max(widths)
        padded = tensor.new_zeros(len(tensor), widest)
        padded[:, : tensor.shape[1]] = tensor
        self.bytes_gathered += padded.nbytes
        options = dist.distributed_c10d.GatherOptions()
        options.rootRank = 0
        if self.seat.part:
            self._tensor.gather([], [padded], options).wait()
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        self._tensor.gather([parts], [padded], options).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def close(self) -> None:
        """Close the sockets: whoever waits for this rank sees that it is gone."""
        self.handover.close()
        self._tensor = None

    def _connect(self, name: str, rank: int, size: int) -> Any:  # noqa: ANN401 - not typed by torch
        if size == 1:
            return None
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOCALHOST)]
        options._timeout = timedelta(seconds=self.seat.timeout_s)
        options._threads = 1
        store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]
        return dist.ProcessGroupGloo(store, rank, size, options)
