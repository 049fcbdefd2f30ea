"""Parallel layout: this rank's part of the model and of the batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes, and this rank's place, in tensor (TP), pipeline (PP), data (DP), context (CP) and expert (EP) parallelism.

    The DP × CP ranks that hold the same part of a dense model divide the experts of a layer, EP after EP ranks.
    """

    rank: int
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    dp_size: int
    dp_rank: int
    cp_size: int = 1
    cp_rank: int = 0
    ep_size: int = 1

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits and losses."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports_losses(self) -> bool:
        """Whether this rank, of those that compute the same losses, counts in sums over all ranks."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank, of those that hold the same part of the weights, is the first: data and context parallelism repeat them."""
        return self.replica == 0

    @property
    def replica(self) -> int:
        """This rank's number among those that hold the same part of a dense model."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def is_first_with_experts(self) -> bool:
        """Whether this rank, of those that hold the same experts, is the first."""
        return self.replica < self.ep_size

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that a checkpoint's parts per rank depend on."""
        return {
            "tensor_parallel_size": self.tp_size,
            "pipeline_parallel_size": self.pp_size,
            "data_parallel_size": self.dp_size,
            "context_parallel_size": self.cp_size,
            "expert_parallel_size": self.ep_size,
        }
