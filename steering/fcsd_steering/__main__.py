"""`python -m fcsd_steering`, as `accelerate launch -m` needs it."""

import sys

from fcsd_steering.cli import main

if __name__ == "__main__":
    sys.exit(main())
