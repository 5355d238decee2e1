"""A secret that an engine and its ranks share: each proves that it knows it, and neither says it."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from pathlib import Path

from conch.api.errors import ConfigError
from conch.engine.mesh.line import receive_message, send_message

TOKEN_VARIABLE = "CONCH_RANK_TOKEN"
_LEAST_CHARACTERS = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class WrongSecretError(Exception):
    """The peer does not know the secret."""


def read_secret(token_file: str | None) -> bytes:
    """Return the secret from a file, or else from the environment.

    Raises
    ------
    ConfigError
        There is none, or it can be guessed.
    """
    if token_file is not None:
        try:
            token = Path(token_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"rank_token_file {token_file!r} cannot be read: {error.strerror}") from error
    else:
        token = os.environ.get(TOKEN_VARIABLE, "").encode().strip()
    if len(token) < _LEAST_CHARACTERS:
        raise ConfigError(
            "ranks of other hosts need a secret that strangers do not know: give its file (rank_token_file "
            f"of the engine, --token-file of conch rank) or the variable {TOKEN_VARIABLE}, "
            f"at least {_LEAST_CHARACTERS} characters; `openssl rand -hex 32` writes one"
        )
    return token


def prove_engine(sock: socket.socket, secret: bytes) -> None:
    """Let a rank prove that it knows the secret, then prove it to the rank.

    Raises
    ------
    WrongSecretError
        It does not; it is told nothing but that.
    OSError, EOFError
        The connection is broken.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    send_message(sock, own)
    answer = receive_message(sock, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", own + theirs)):
        send_message(sock, b"")
        raise WrongSecretError("it knows another secret")
    send_message(sock, _proof(secret, b"engine", own + theirs))


def prove_rank(sock: socket.socket, secret: bytes) -> None:
    """Prove to an engine that this rank knows the secret, then have it prove the same.

    Raises
    ------
    WrongSecretError
        One of the two knows another one.
    OSError, EOFError
        The connection is broken.
    """
    theirs = receive_message(sock, _NONCE_BYTES)
    own = secrets.token_bytes(_NONCE_BYTES)
    send_message(sock, own + _proof(secret, b"rank", theirs + own))
    answer = receive_message(sock, _PROOF_BYTES)
    if not hmac.compare_digest(answer, _proof(secret, b"engine", theirs + own)):
        raise WrongSecretError("it knows another secret")


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + nonces, "sha256")
