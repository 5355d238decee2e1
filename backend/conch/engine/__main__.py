"""``python -m conch.engine --fd N``: serve on an inherited socket."""

import argparse

from conch.engine.environment import settle_environment

settle_environment()  # before anything imports torch

from conch.engine.process import main  # noqa: E402

parser = argparse.ArgumentParser(prog="python -m conch.engine", description=__doc__)
parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
main(parser.parse_args().fd)
