"""``python -m conch.engine --fd N``: serve on an inherited socket."""

import argparse

from conch.engine.environment import die_with_parent, import_what_is_needed, settle_environment

die_with_parent()  # which may happen while torch is imported
settle_environment()
import_what_is_needed()

from conch.engine.process import main  # noqa: E402

parser = argparse.ArgumentParser(prog="python -m conch.engine", description=__doc__)
parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
main(parser.parse_args().fd)
