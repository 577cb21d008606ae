"""Bridge to megatron-core 0.16 to 0.19: support scores over its output layer, recorded experts in its schedules."""

from .loss import collect_scores, mean_metrics, policy_loss
from .micro_batch import MicroBatch, Tokens
from .router_replay import MegatronRouterReplay
from .scorer import score_vocab_parallel_logits, split_scores, support_forward
from .sequence_shard import SequenceShard

__all__ = [
    "MegatronRouterReplay",
    "MicroBatch",
    "SequenceShard",
    "Tokens",
    "collect_scores",
    "mean_metrics",
    "policy_loss",
    "score_vocab_parallel_logits",
    "split_scores",
    "support_forward",
]
