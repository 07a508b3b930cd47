"""How good a bundle's pictures are: `ciar-train evaluate` draws them with the real programs and measures them."""

from training.evaluation.settings import EvaluationSettings
from training.evaluation.stage import run_evaluation

__all__ = ["EvaluationSettings", "run_evaluation"]
