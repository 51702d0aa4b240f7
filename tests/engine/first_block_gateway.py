"""The gateway with a seeded fault: of each prompt only the first block is hashed.

The test of cached shares must fail on it, else it could not see affinity lost.
"""

from gateway import cli
from gateway.core import blocks

_whole = blocks.hash_blocks


def _first_block(data: bytes, step_bytes: int, seed: bytes) -> list[blocks.BlockHash]:
    return _whole(data, step_bytes, seed)[:1]


if __name__ == "__main__":
    blocks.hash_blocks = _first_block
    cli.main()
