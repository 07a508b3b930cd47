"""Trains interval features: what the cloud should know of tokens it never judged: `ciar-train interval-adapter`.

Target and drafter are frozen. The teacher is the target on clean tokens; the student is the target on a context whose
kept positions hold drafts, with the interval's vector added to the embedding of each. Learnt are the encoder on the
device and the adapter in the cloud (CIAR 2603.25463; methods.md 5.6). One batch is split among the modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from cloud.models.drafter import Drafter
from cloud.models.interval_adapter import IntervalFeatures
from cloud.models.loading import load_transformer, save_weights
from cloud.models.transformer import Transformer
from shared.features import FEATURE_MODES
from shared.intervals import SCORES as ALL_SCORES
from training.batches import step_batches
from training.captioned_tokens import CaptionedTokens, collate, first_items
from training.checkpoint import load_trained
from training.checks import above_zero, not_negative
from training.data.tokens import TokenCache
from training.drafter import guided_log_probs, load_drafter
from training.interval_context import KeptDrafts, SplitModes, feature_vectors, keep_drafts
from training.loop import Hook, LoopSettings, TrainingLoop
from training.mixed_tokens import MixedTokens, check_shares
from training.reports import add_step, markdown_table, write_text
from training.tables import read_tables, settings_from

__all__ = ["AdapterSettings", "feature_quality", "quality_table", "run_interval_adapter"]

MODES = FEATURE_MODES[1:]
SCORES = ALL_SCORES[:3]


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """A training of interval features. Raises ValueError naming the field that cannot be.

    Args:
        loop: length and pace; the result goes to `loop.folder / "final"`.
        target, drafter: safetensors of the trained models, their JSON beside them.
        tokens: token caches to learn on, with the folders train and val; validation takes the first.
        shares: share of the pictures that each of them gives.
        modes: feature modes to learn; the bundle offers these.
        inner: width of the hidden layers.
        guidance: scale of the target's guidance.
        score: which score decides what is kept: interval, width or entropy.
        budget: share of a picture's tokens that are uncertain, the rest is kept.
        prefix_rate: share of the tokens that the cloud draws first.
        temperature: of the bundle's defaults, at which drafts are drawn and scored.
        divergence: coefficient of KL(teacher || student).
        entropy: coefficient of the cross-entropy to the teacher's tokens. Where these are the target's own draws it has
            the gradient of the divergence, with the noise of one sample: a little of it is enough.
        rate, weight_decay: of AdamW.
        validation_minutes, validation_pictures: how often, on how many pictures the divergence is measured.
    """

    loop: LoopSettings
    target: Path = Path("work/target/final/target.safetensors")
    drafter: Path = Path("work/inter_dro/final/drafter.safetensors")
    tokens: tuple[str, ...] = ("work/drawn", "work/tokens")
    shares: tuple[float, ...] = (0.5, 0.5)
    modes: tuple[str, ...] = MODES
    inner: int = 128
    guidance: float = 3.0
    score: str = "interval"
    budget: float = 0.3
    prefix_rate: float = 0.06
    temperature: float = 1.0
    divergence: float = 1.0
    entropy: float = 0.1
    rate: float = 1e-3
    weight_decay: float = 0.0
    validation_minutes: float = 5.0
    validation_pictures: int = 48

    def __post_init__(self) -> None:
        if not self.modes or any(mode not in MODES for mode in self.modes):
            raise ValueError(f"modes must be some of {', '.join(MODES)}, got {', '.join(self.modes) or 'none'}")
        if self.loop.batch_size < len(self.modes):
            raise ValueError(f"batch_size must be at least {len(self.modes)}, a picture a mode: {self.loop.batch_size}")
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {self.score!r}")
        check_shares(self.tokens, self.shares)
        self._check_numbers()
        for name in ("target", "drafter"):
            object.__setattr__(self, name, Path(getattr(self, name)))

    def _check_numbers(self) -> None:
        if not self.guidance >= 1.0:
            raise ValueError(f"guidance must be at least 1, got {self.guidance}")
        for name in ("budget", "prefix_rate"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        not_negative(self, "divergence", "entropy", "weight_decay")
        above_zero(self, "temperature", "inner", "rate", "validation_minutes", "validation_pictures")

    @property
    def keeping(self) -> tuple[str, float, float, float]:
        """What decides on the kept tokens: score, budget, prefix rate and temperature."""
        return self.score, self.budget, self.prefix_rate, self.temperature

    @classmethod
    def load(cls, path: Path) -> AdapterSettings:
        """Settings from a TOML file with the tables loop and training."""
        tables = read_tables(path, ("loop", "training"))
        loop = settings_from(LoopSettings, path, "loop", tables.get("loop", {}))
        return settings_from(cls, path, "training", tables.get("training", {}), loop=loop)


def run_interval_adapter(settings: AdapterSettings) -> bool:
    """Trains into `loop.folder / "final"`; False when a signal stopped it before the end."""
    torch.manual_seed(settings.loop.seed)
    target = load_transformer(settings.target).eval().requires_grad_(False)
    drafter = load_drafter(settings.drafter).requires_grad_(False)
    dims = target.config.dim, drafter.config.transformer.dim
    model = SplitModes(IntervalFeatures(list(settings.modes), *dims, inner=settings.inner))
    caches = [TokenCache(Path(folder) / "train") for folder in settings.tokens]
    validation = first_items(TokenCache(Path(settings.tokens[0]) / "val"), settings.validation_pictures)

    def step_loss(model: nn.Module, batch: CaptionedTokens, step: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        for frozen in (target, drafter):
            frozen.to(batch[0].device)
        with torch.no_grad():
            teacher = guided_log_probs(target, batch, settings.guidance)
        context = keep_drafts(drafter, batch, *settings.keeping)
        student = guided_log_probs(target, (*batch[:2], context.tokens), settings.guidance, model(context))
        divergence = _divergence(teacher, student).mean()
        entropy = functional.nll_loss(student.flatten(0, 1), batch[2].flatten())
        loss = settings.divergence * divergence + settings.entropy * entropy
        return loss, {"kl": divergence.detach(), "entropy": entropy.detach()}

    def validate(step: int) -> None:
        target.to(loop.accelerator.device)
        drafter.to(loop.accelerator.device)
        quality = feature_quality(_trained(loop, model), drafter, target, validation, settings, loop.bf16)
        add_step(settings.loop.folder / "validation.jsonl", step, dict(quality))
        table = quality_table(quality, target.config.dim)
        write_text(settings.loop.folder / "validation.md", f"## Step {step}\n\n{table}\n")
        print(f"step {step}\n{table}", flush=True)

    loop = TrainingLoop(
        settings.loop,
        model,
        [torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=settings.weight_decay)],
        step_batches(MixedTokens(caches, settings.shares), collate),
        step_loss,
        hooks=[Hook(settings.validation_minutes, validate)],
        compiled=[target],
    )
    if not loop.run().finished or not loop.accelerator.is_main_process:
        return False
    validate(settings.loop.steps)
    final = settings.loop.folder / "final"
    final.mkdir(exist_ok=True)
    trained = _trained(loop, model)
    save_weights(trained, final / "interval_features.safetensors", trained.to_dict())
    print(f"interval features written to {final}")
    return True


@torch.no_grad()
def feature_quality(
    features: IntervalFeatures,
    drafter: Drafter,
    target: Transformer,
    batch: CaptionedTokens,
    settings: AdapterSettings,
    bf16: bool = False,
) -> dict[str, dict[str, float]]:
    """KL(teacher || student) in nats a row, without features (`none`) and in each mode, on the same drafts.

    Returns:
        of each mode `all`, the mean over all rows, and `uncertain`, over the rows that the cloud judges.
    """
    torch.manual_seed(0)
    device, size = next(features.parameters()).device, settings.loop.batch_size
    sums = {mode: torch.zeros(2) for mode in ("none", *features.modes)}
    counts = torch.zeros(2)
    for part in zip(*(items.split(size) for items in batch), strict=True):
        moved = tuple(item.to(device) for item in part)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            context = keep_drafts(drafter, moved, *settings.keeping)
            teacher = guided_log_probs(target, moved, settings.guidance)
            for mode, total in sums.items():
                student = _student(features, mode, target, moved, context, settings.guidance)
                divergence = _divergence(teacher, student)
                total += torch.stack([divergence.sum(), divergence[~context.kept].sum()]).cpu()
        counts += torch.tensor([context.kept.numel(), int((~context.kept).sum())])
    means = {mode: (total / counts).tolist() for mode, total in sums.items()}
    return {mode: {"all": everywhere, "uncertain": judged} for mode, (everywhere, judged) in means.items()}


def quality_table(quality: dict[str, dict[str, float]], dim: int) -> str:
    """A line a mode; `dim` is the target's width."""
    cost = {"none": 0, "scalars": 6, "code64": 64, "full": 2 * dim}
    head = ["features", "B a kept token", "KL", "change", "KL of uncertain rows", "change"]
    rows = []
    for mode, values in quality.items():
        cells = [mode, str(cost[mode])]
        for name in ("all", "uncertain"):
            cells += [f"{values[name]:.4f}", f"{values[name] / quality['none'][name] - 1.0:+.1%}"]
        rows.append(cells)
    return markdown_table(head, rows)


def _student(
    features: IntervalFeatures,
    mode: str,
    target: Transformer,
    batch: CaptionedTokens,
    context: KeptDrafts,
    guidance: float,
) -> Tensor:
    """Log-probabilities (batch, T, V) of the target on a context with the vectors of one mode, or `none`."""
    added = None
    if mode != "none":
        added = feature_vectors(features, mode, context.hidden, context.scalars) * context.kept.unsqueeze(-1)
    return guided_log_probs(target, (*batch[:2], context.tokens), guidance, added)


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of each row."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def _trained(loop: TrainingLoop, model: SplitModes) -> IntervalFeatures:
    trained = SplitModes(IntervalFeatures(**model.features.to_dict())).to(loop.accelerator.device)
    load_trained(trained, loop.weights())
    return trained.features.eval()
