"""``python -m conch.cli``: the `conch` command of this interpreter."""

import sys

from conch.cli.main import main

sys.exit(main())
