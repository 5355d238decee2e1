"""Questions to a model, made from what Python packages carry and from patterns."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import random
from collections.abc import Iterable, Iterator

from conch.training.topics import FORMS, TOPICS

_MODULES = [
    "argparse",
    "ast",
    "asyncio",
    "base64",
    "bisect",
    "calendar",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "email",
    "enum",
    "fileinput",
    "fractions",
    "functools",
    "glob",
    "gzip",
    "hashlib",
    "heapq",
    "html",
    "http.client",
    "inspect",
    "io",
    "itertools",
    "json",
    "logging",
    "math",
    "mimetypes",
    "operator",
    "os",
    "pathlib",
    "pickle",
    "platform",
    "pprint",
    "queue",
    "random",
    "re",
    "sched",
    "shelve",
    "shlex",
    "shutil",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "tokenize",
    "traceback",
    "types",
    "typing",
    "unittest",
    "urllib.parse",
    "uuid",
    "warnings",
    "weakref",
    "xml.dom",
    "zipfile",
]
_ABOUT_CODE = (
    "What does this documentation mean?\n\n{}",
    "Rewrite this in your own words:\n\n{}",
    "Summarise the following text:\n\n{}",
)
_SHORTEST, _LONGEST = 80, 500


def make_prompts(count: int, seed: int) -> list[str]:
    """Return so many different questions, in random order; half of them are about text from packages."""
    rng = random.Random(seed)
    plain = [form.format(topic) for topic in TOPICS for form in FORMS]
    texts = sorted({text for text in (*docstrings(_MODULES), *_licences())})
    quoting = [rng.choice(_ABOUT_CODE).format(text) for text in texts]
    rng.shuffle(plain)
    rng.shuffle(quoting)
    half = max(count // 2, count - len(plain))
    prompts = [*quoting[:half], *plain[: count - min(half, len(quoting))]]
    rng.shuffle(prompts)
    return prompts


def docstrings(modules: Iterable[str]) -> Iterator[str]:
    """Yield what functions and classes of modules say of themselves."""
    for name in modules:
        module = importlib.import_module(name)
        for _, part in inspect.getmembers(module):
            if inspect.isroutine(part) or inspect.isclass(part):
                text = inspect.getdoc(part) or ""
                if len(text) > _SHORTEST:
                    yield text[:_LONGEST].strip()


def _licences() -> Iterator[str]:
    """Yield paragraphs of the licences of installed packages."""
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                try:
                    text = file.read_text(encoding="utf-8")
                except (OSError, ValueError):
                    continue
                for paragraph in text.split("\n\n")[:4]:
                    if len(paragraph) > 120:
                        yield " ".join(paragraph.split())[:_LONGEST]
