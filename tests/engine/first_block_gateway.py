"""The gateway with a seeded fault: of each prompt only the first block is hashed.

The test of cached shares must fail on it, else it could not see affinity lost.
"""

from gateway import cli
from gateway.core import blocks

_whole = blocks.extend


def _first_block(parent: blocks.BlockHash, data: bytes, step_bytes: int) -> list[blocks.BlockHash]:
    return _whole(parent, data, step_bytes)[:1]


if __name__ == "__main__":
    blocks.extend = _first_block
    cli.main()
