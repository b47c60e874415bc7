"""``python -m stocache``: as the command ``stocache``."""

import sys

from stocache.cli import main

sys.exit(main())
