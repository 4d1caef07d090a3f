"""``python -m gdn_ops``: the command line of :mod:`gdn_ops.cli`."""

import sys

from gdn_ops.cli import main

sys.exit(main())
