"""``python -m ngramloss`` → the same program as ``ngramloss``."""

import sys

from ngramloss.cli import main

if __name__ == "__main__":
    sys.exit(main())
