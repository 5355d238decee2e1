"""Prompts of a wanted length, reproducible, each unlike the others from its first token on."""

from __future__ import annotations

import random

# Each is one token, with or without a leading space, in the byte-level BPE vocabularies in use.
_TEXT = (
    "the of and to in that for it with as was on be by at this not are from but have an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now "
    "over such our man me even most made after also did many off before must well back through years where "
    "much your way down should because long each just those people how too little state good very make "
    "world still see own work men day get here old life both between being under three never know same last "
    "another while us might great go come since against right came take used himself few house use place"
)
_WORDS = _TEXT.split()


def prompt(num_tokens: int, seed: int) -> str:
    """Return a text of about `num_tokens` tokens; the same arguments give the same text.

    The server's own count (`num_input_tokens`) is what a result must state.
    """
    draw = random.Random(f"{seed}/{num_tokens}")
    return " ".join(draw.choice(_WORDS) for _ in range(num_tokens))


def shared_prefix_prompts(count: int, shared_tokens: int, own_tokens: int, seed: int) -> list[str]:
    """Return `count` prompts that begin with the same `shared_tokens` and differ after them."""
    shared = prompt(shared_tokens, seed)
    return [f"{shared} {prompt(own_tokens, seed * 1_000_003 + index)}" for index in range(count)]
