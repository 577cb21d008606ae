"""`TilePairs`: (token, candidate) pairs in the order of the tiles of a projection on the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

TILE_TOKENS = 512
TILE_VOCAB = 8192


@dataclass(frozen=True)
class TilePairs:
    """Pairs whose projections are read off the tiles, sorted by tile.

    Attributes:
        order: `[P]` int64, place of each sorted pair in the caller's order.
        rows, ids: `[P]` int64, token and local vocabulary row within the tile.
        starts: `[tiles + 1]`, the pairs of tile `i * num_vocab_tiles + j`, `i` counting tokens and `j` vocabulary.
    """

    order: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    starts: list[int]

    def of_tile(self, index: int) -> slice:
        return slice(self.starts[index], self.starts[index + 1])

    @classmethod
    def build(cls, rows: np.ndarray, ids: np.ndarray, num_tokens: int, num_vocab: int) -> TilePairs:
        """On the host.

        Args:
            rows, ids: `[P]` int64, token and local vocabulary row of each pair.
            num_tokens, num_vocab: size of the projection.
        """
        across = -(-num_vocab // TILE_VOCAB)
        down = -(-num_tokens // TILE_TOKENS)
        tile = rows // TILE_TOKENS * across + ids // TILE_VOCAB
        order = np.argsort(tile, kind="stable")
        starts = np.searchsorted(tile[order], np.arange(down * across + 1))
        return cls(
            order=torch.from_numpy(order),
            rows=torch.from_numpy(rows[order] % TILE_TOKENS),
            ids=torch.from_numpy(ids[order] % TILE_VOCAB),
            starts=starts.tolist(),
        )
