"""What is served: text that is to be copied, and chats that no drafter has been trained on."""

from __future__ import annotations

import random
from typing import Any

from peers.workloads import BY_KEY

from conch.training.prompts import docstrings

WORKLOADS = ("copying", "chat")

# None of these is in `conch.training.prompts`: a test says so.
TOPICS = (
    "the trumpet",
    "olive oil",
    "the Panama Canal",
    "hummingbirds",
    "knitting",
    "asteroids",
    "the Aztecs",
    "dentists",
    "carbon dioxide",
    "ice hockey",
    "Isaac Newton",
    "the bus",
    "mushrooms",
    "origami",
    "the stomach",
    "the Great Barrier Reef",
    "typewriters",
    "insurance",
    "the Himalayas",
    "salt",
)
FORMS = (
    "Explain {} in simple terms.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Give me three tips about {}.",
    "Tell me about the history of {}.",
    "Write an email to a friend about {}.",
    "Summarise what is known about {}.",
)
MODULES = (
    "bdb",
    "bz2",
    "cmd",
    "codecs",
    "ctypes",
    "dis",
    "ftplib",
    "gettext",
    "imaplib",
    "importlib.resources",
    "ipaddress",
    "linecache",
    "locale",
    "lzma",
    "multiprocessing",
    "optparse",
    "pdb",
    "pkgutil",
    "plistlib",
    "selectors",
    "smtplib",
    "socketserver",
    "symtable",
    "timeit",
    "wave",
    "zlib",
)
_QUOTED_OF = 4


def chats() -> list[str]:
    """Return all questions, always in the same order; one in `_QUOTED_OF` is about documentation."""
    draw = random.Random("chats")
    plain = [form.format(topic) for topic in TOPICS for form in FORMS]
    quoting = [f"What does this documentation mean?\n\n{text}" for text in sorted(set(docstrings(MODULES)))]
    draw.shuffle(plain)
    draw.shuffle(quoting)
    found = []
    while plain and quoting:
        found.append(quoting.pop() if len(found) % _QUOTED_OF == _QUOTED_OF - 1 else plain.pop())
    return found


class Lots:
    """Work for round after round, nothing twice: a drafter may remember what it has seen."""

    def __init__(self) -> None:
        self._chats = iter(chats())
        self._copies = 0

    def draw(self, workload: str, count: int) -> dict[str, Any]:
        """Return `count` prompts as the engine's program takes them."""
        if workload == "chat":
            return {"chats": [next(self._chats) for _ in range(count)]}
        first, self._copies = self._copies, self._copies + count
        return {
            "prompts": [
                BY_KEY["w5"].work(1_000 + number).prompts[0] for number in range(first, first + count)
            ]
        }
