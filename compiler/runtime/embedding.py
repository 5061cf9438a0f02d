"""Table lookups with the rows of the table split over an axis."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh


def own_rows(index: torch.Tensor, num_rows: int, axis: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions within this rank's `num_rows` rows (0 where they are another rank's), and which ones are ours."""
    local = index - num_rows * axis.get_local_rank()
    is_ours = (local >= 0) & (local < num_rows)
    return local.where(is_ours, 0), is_ours


def embedding_rows(ids: torch.Tensor, table: torch.Tensor, axis: DeviceMesh, padding_idx: int = -1) -> torch.Tensor:
    """Look up rows that lie on any rank: each rank fills in its own, zero elsewhere; the sum over ranks is the result.

    `padding_idx` is the number of a row in the whole table that gets no gradient; -1 for none.
    """
    local, is_ours = own_rows(ids, table.size(0), axis)
    padding = padding_idx - table.size(0) * axis.get_local_rank()
    has_padding = padding_idx >= 0 and 0 <= padding < table.size(0)
    rows = F.embedding(local, table, padding if has_padding else None)
    return rows.masked_fill(~is_ours[..., None], 0)
