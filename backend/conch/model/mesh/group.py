"""The ranks that compute together, as one of them sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conch.api.mesh import Meeting, Seat
from conch.model.mesh.handover import Handover
from conch.model.mesh.store import MeetingStore
from conch.model.mesh.traffic import Traffic

_COUNTS = 1
"""Tag of counts, which take the same way as states."""


class MeshGroup:
    """Collectives of plain tensors over gloo, without anything global: engines in one process do not meet.

    A rank that dies closes its sockets, which raises in all that wait for it; one that hangs raises in them
    after the seat's timeout.

    Parameters
    ----------
    seat
        Where this rank sits.
    meeting
        Where it finds the others.

    Attributes
    ----------
    handover
        Links to the stage before and the one after.
    bytes_reduced, bytes_gathered
        Payload that this rank has put into all-reduces and gathers.
    bytes_exchanged, bytes_counted, bytes_moved
        What it has sent to other parts of the experts: tokens, counts of them, and KV blocks.
    """

    def __init__(self, seat: Seat, meeting: Meeting) -> None:
        self.seat = seat
        self._meeting = meeting
        self._store = MeetingStore(meeting)  # gloo keeps no reference
        self._store.set_timeout(timedelta(seconds=seat.timeout_s))
        shape = seat.shape
        part, expert_part = seat.part, seat.expert_part
        self._tensor = self._connect(f"tensor-{seat.stage}-{expert_part}", part, shape.tensor)
        self._experts = self._connect(f"experts-{seat.stage}-{part}", expert_part, shape.expert)
        self._pipeline = self._connect(f"pipeline-{part}-{expert_part}", seat.stage, shape.pipeline)
        self._telling: deque[tuple[Any, torch.Tensor]] = deque()
        self.handover = Handover(self._pipeline, seat)
        self.bytes_reduced = self.bytes_gathered = 0
        self.bytes_exchanged = self.bytes_counted = self.bytes_moved = 0

    @property
    def bytes_sent(self) -> int:
        """States that this rank has handed to the next stage."""
        return self.handover.bytes_sent

    def least(self, name: str, number: int) -> int:
        """Return the least of what all ranks say under a name, which is used once."""
        self._meeting.post(f"{name} of rank {self.seat.rank}", str(number).encode())
        keys = [f"{name} of rank {rank}" for rank in range(self.seat.shape.size)]
        return min(int(self._meeting.read(key, self.seat.timeout_s)) for key in keys)

    def hear_first(self, name: str, say: Callable[[], list[int]]) -> list[int]:
        """Return the numbers that rank 0 says under a name, which is used once."""
        if self.seat.rank == 0:
            self._meeting.post(name, " ".join(map(str, say())).encode())
        return [int(number) for number in self._meeting.read(name, self.seat.timeout_s).split()]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the tensor ranks of this part of a stage, in place."""
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

    @property
    def traffic(self) -> Traffic:
        """What this rank has put into collectives so far."""
        sent = self.handover.bytes_sent
        return Traffic(
            self.bytes_reduced, self.bytes_gathered, sent, self.bytes_exchanged, self.bytes_counted
        )

    def tell(self, counts: torch.Tensor) -> None:
        """Start to send counts to the next stage, which hears them."""
        assert self._pipeline is not None
        while len(self._telling) >= self.seat.shape.pipeline:
            self._telling.popleft()[0].wait()
        sent = counts.clone()
        self._telling.append((self._pipeline.send([sent], self.seat.stage + 1, _COUNTS), sent))

    def hear(self, counts: torch.Tensor) -> None:
        """Fill a tensor with the counts that the stage before tells."""
        assert self._pipeline is not None
        self._pipeline.recv([counts], self.seat.stage - 1, _COUNTS).wait()

    def share_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return what every part of the experts counts, [E, n]."""
        if self._experts is None:
            return counts.unsqueeze(0)
        everyone = [torch.empty_like(counts) for _ in range(self.seat.shape.expert)]
        self.bytes_counted += counts.nbytes
        self._experts.allgather([everyone], [counts]).wait()
        return torch.stack(everyone)

    def exchange(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send tokens to the parts of the experts, and return what they sent.

        Parameters
        ----------
        tensor : [n, h]
            `sent` rows for each part, one part after the other.
        sent, received
            Rows for and from each part.
        """
        self.bytes_exchanged += _bytes_for_others(tensor, sent, self.seat)
        return self._all_to_all(tensor, sent, received)

    def move_blocks(self, packed: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send KV blocks to other parts, a row each, and return what they sent."""
        self.bytes_moved += _bytes_for_others(packed, sent, self.seat)
        return self._all_to_all(packed, sent, received)

    def collect(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Bring rows of all parts, so many of each, to the first one; returns them there, none elsewhere."""
        nothing = [0] * len(counts)
        sent = [len(rows), *nothing[1:]]
        self.bytes_gathered += _bytes_for_others(rows, sent, self.seat)
        return self._all_to_all(rows, sent, nothing if self.seat.expert_part else counts)

    def _all_to_all(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        assert self._experts is not None
        rows = tensor.contiguous().view(torch.uint8)
        came = rows.new_empty(sum(received), rows.shape[1])
        self._experts.alltoall_base(came, rows, list(received), list(sent)).wait()
        return came.view(tensor.dtype)

    def close(self) -> None:
        """Close the sockets: whoever waits for this rank sees that it is gone."""
        self.handover.close()
        self._telling.clear()
        self._tensor = self._pipeline = self._experts = None

    def _connect(self, name: str, rank: int, size: int) -> Any:  # noqa: ANN401 - not typed by torch
        if size == 1:
            return None
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._meeting.address)]
        options._timeout = timedelta(seconds=self.seat.timeout_s)
        options._threads = 1
        store = dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]
        return dist.ProcessGroupGloo(store, rank, size, options)


def _bytes_for_others(tensor: torch.Tensor, sent: Sequence[int], seat: Seat) -> int:
    return tensor.nbytes // max(1, len(tensor)) * (len(tensor) - sent[seat.expert_part])
