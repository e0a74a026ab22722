"""`python -m tokensieve.cli`."""

import sys

from tokensieve.cli.main import main

sys.exit(main())
