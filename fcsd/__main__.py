"""`python -m fcsd`, so that `accelerate launch -m fcsd distill RECIPE` works."""

import sys

from fcsd.cli.main import main

sys.exit(main())
