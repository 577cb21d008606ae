"""Log-probs of sampled tokens over the sets they were drawn from, and what follows from them."""

from .candidate_scores import score_candidates
from .candidates import SupportCSR
from .head_from_model import ModelHead, lm_head_from_model
from .lm_head import LMHead, LoRAFactors, VocabShard
from .shifts import CandidateShifts
from .support_scores import SupportScores, score_support, score_support_from_logits

__all__ = [
    "CandidateShifts",
    "LMHead",
    "LoRAFactors",
    "ModelHead",
    "SupportCSR",
    "SupportScores",
    "VocabShard",
    "lm_head_from_model",
    "score_candidates",
    "score_support",
    "score_support_from_logits",
]
