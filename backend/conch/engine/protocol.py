"""Messages between a host and its engine process: msgpack, one message a step, never pickle.

Both ends hold one side of a socket pair, wrapped in a `multiprocessing.connection.Connection` of which only
``send_bytes`` and ``recv_bytes`` are used: it frames messages, and end-of-file tells that the peer is gone.
The host sends `StartEngine` first and gets any number of `Progress`, then `EngineReady` or `EngineFailed`.
"""

from __future__ import annotations

import select
import threading
from multiprocessing.connection import Connection

import msgspec

from conch.api.config import EngineConfig
from conch.api.experts import NO_EXPERTS, ExpertLoad
from conch.api.sampling import SamplingParams
from conch.api.steps import RequestOutput


class StartEngine(msgspec.Struct, frozen=True, tag="start"):
    """Build the engine."""

    config: EngineConfig


class AddRequest(msgspec.Struct, frozen=True, tag="add", kw_only=True):
    """Serve a request. Answered by `RequestOutput` with the same id until every choice has ended.

    Attributes
    ----------
    request_id
        Chosen by the host, never reused.
    token_ids
        The prompt, at least one token.
    priority
        Lower is sooner; 0 is Triton's "not said".
    cache_salt
        Requests of different salts never share cached KV.
    timeout_s
        Bound on its whole life, waiting and running; None for none.
    tenant
        On whose account it is; None is that of `cache_salt`.
    ttft_target_s, tpot_target_s
        Wishes for the first token and for each further one; None is the engine's own.
    """

    request_id: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    tenant: str | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """End a request, or those of its choices that are named. Unknown ids are ignored.

    Attributes
    ----------
    choices
        Choices to end; empty means all. Ending choice 0 before its first token ends all too: the others are
        forked off it then.
    """

    request_id: int
    choices: tuple[int, ...] = ()


class StopEngine(msgspec.Struct, frozen=True, tag="stop"):
    """Stop now; requests still alive fail."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far a stage of starting up has come; `fraction` is in [0, 1]."""

    stage: str
    fraction: float


class EngineReady(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The engine serves.

    Attributes
    ----------
    model
        Name for people to read.
    model_folder
        The checkpoint in Hugging Face layout (a converted copy for a GGUF), holding ``tokenizer.json``.
    max_tokens_per_request
        Prompt and output together: the smaller of context length and KV pool.
    eos_token_ids
        Ids that end an answer; not part of its text.
    """

    model: str
    model_folder: str
    vocab_size: int
    max_model_len: int
    max_tokens_per_request: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start, or its loop broke; it ends after this message."""

    message: str


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot: gauges of now, and counters since the engine started.

    Attributes
    ----------
    kv_blocks_used
        Blocks that requests hold; evictable cached blocks are not in use.
    kv_blocks_parked, swap_blocks_total
        Blocks that preempted requests have left in the host's memory, and how many fit there.
    prefix_queries, prefix_hits
        Prompt tokens looked up, and found, in the prefix cache at first admission.
    prefix_host_blocks, prefix_disk_blocks
        Cached blocks that lie in the host's memory and on its disk.
    prefix_host_hits, prefix_disk_hits
        Tokens whose KV came back from there.
    drafts, drafts_proposed, drafts_accepted
        Rows that had drafts, the tokens in them, and those of them that were right.
    accepted_by_position
        Of the right ones, how many stood first in their draft, second, and so on.
    drafting_s
        Seconds that drafting has taken.
    experts
        What experts had to do, where ranks share them.
    steps_s
        Seconds in which there was a step to compute.
    stages_s
        Seconds that each stage of a pipeline has computed in them; empty where there is none.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_parked: int = 0
    swap_blocks_total: int = 0
    kv_tokens_used: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_host_blocks: int = 0
    prefix_disk_blocks: int = 0
    prefix_host_hits: int = 0
    prefix_disk_hits: int = 0
    drafts: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    drafting_s: float = 0.0
    experts: ExpertLoad = NO_EXPERTS
    steps_s: float = 0.0
    stages_s: tuple[float, ...] = ()


class StepNews(msgspec.Struct, frozen=True, tag="news"):
    """All that one step brought. `stats` rides along at most every 50 ms, and when the engine falls idle."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats | None = None


ToEngine = StartEngine | AddRequest | CancelRequest | StopEngine
FromEngine = Progress | EngineReady | EngineFailed | StepNews

_encoder = msgspec.msgpack.Encoder()


class EngineEnd:
    """The engine's end of the connection. Any thread may send, one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._sending = threading.Lock()
        self._readable = select.poll()  # `Connection.poll` makes a selector each time, which takes 20 us
        self._readable.register(connection, select.POLLIN)

    def send(self, message: FromEngine) -> None:
        """Send one message; blocks while the host does not read."""
        with self._sending:
            self._connection.send_bytes(_encoder.encode(message))

    def has_message(self, timeout_s: float | None = 0.0) -> bool:
        """Whether `receive` would return at once, after waiting up to `timeout_s` (None: for ever)."""
        return bool(self._readable.poll(None if timeout_s is None else 1000 * timeout_s))

    def receive(self) -> ToEngine:
        """Return the next message, waiting for it. Raises EOFError when the host is gone."""
        message: ToEngine = self._decoder.decode(self._connection.recv_bytes())
        return message


class HostEnd:
    """The host's end. One thread may send while another receives; two senders need a lock."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def send(self, message: ToEngine) -> None:
        """Send one message. Raises OSError when the engine is gone."""
        self._connection.send_bytes(_encoder.encode(message))

    def receive(self) -> FromEngine:
        """Return the next message, waiting for it. Raises EOFError or OSError when the engine is gone."""
        message: FromEngine = self._decoder.decode(self._connection.recv_bytes())
        return message

    def close(self) -> None:
        """Close this end; the engine sees end-of-file and stops."""
        self._connection.close()
