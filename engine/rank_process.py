"""The process of a rank other than 0: ``python -m kvferry.engine.rank_process``, started by rank 0, which says over its
standard input what it is to be."""

from __future__ import annotations

import logging
import sys

from kvferry.engine.follower import run_rank
from kvferry.engine.rank_pipe import ParentPipe


def main() -> int:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    pipe = ParentPipe()
    return run_rank(pipe, pipe.hear())


if __name__ == "__main__":
    sys.exit(main())
