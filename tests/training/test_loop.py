"""The training loop: resume after a kill, data order, schedules, checkpoints, signals, bad settings."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.batches import BatchPlan, StepSampler
from training.checkpoint import CheckpointFolder, EmaWeights, load_weights
from training.loop import Hook, LoopSettings, TrainingLoop
from training.machine import compile_parts
from training.metrics import MetricsLog

ROOT = Path(__file__).resolve().parents[2]
ADAM = {"lr": 1e-2}

TRAINING = """
import sys, time, torch
from pathlib import Path
from torch import nn
from training.batches import step_batches
from training.loop import LoopSettings, TrainingLoop

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return torch.randn(8, generator=torch.Generator().manual_seed(index))

def loss(model, batch, step):
    time.sleep(0.01)
    return (model(batch) - batch.roll(1, 1)).square().mean(), {"noise": float(torch.rand(1))}

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 8))
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
settings = LoopSettings(folder=Path(sys.argv[1]), steps=150, batch_size=6, seed=5, precision="fp32", log_every=1,
                        checkpoint_minutes=0.001, ema_decay=0.9, threads=1, warmup_steps=10)
loop = TrainingLoop(settings, model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)],
                    step_batches(Numbers()), loss)
result = loop.run()
print("finished" if result.finished else "interrupted", result.step)
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out


def _wait_for_step(folder: Path, step: int) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if len(_metrics(folder)) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step} in time")


def _metrics(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _last(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    newest = CheckpointFolder(folder / "checkpoints").newest()
    assert newest is not None
    return load_file(newest / "model.safetensors"), load_file(newest / "ema.safetensors")


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_runs_killed_or_stopped_midway_end_in_the_same_bits_as_an_unbroken_one(tmp_path: Path) -> None:
    unbroken = _start(tmp_path / "unbroken")
    killed = _start(tmp_path / "killed")
    _wait_for_step(tmp_path / "killed", 60)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    stopped = _start(tmp_path / "killed")  # goes on from the kill, then leaves politely
    _wait_for_step(tmp_path / "killed", 100)
    stopped.send_signal(signal.SIGTERM)
    message = _finish(stopped)
    assert "interrupted" in message
    assert "run the same command again" in message
    resumed = _finish(_start(tmp_path / "killed"))
    assert "finished 150" in resumed
    assert "finished 150" in _finish(unbroken)
    for ours, theirs in zip(_last(tmp_path / "killed"), _last(tmp_path / "unbroken"), strict=True):
        assert _same(ours, theirs)
    logs = [[json.loads(line) for line in _metrics(tmp_path / name)] for name in ("killed", "unbroken")]
    for log in logs:
        assert [line["step"] for line in log] == list(range(1, 151))
    assert [line["noise"] for line in logs[0]] == [line["noise"] for line in logs[1]]


def _settings(folder: Path, **changes: Any) -> LoopSettings:
    values: dict[str, Any] = {"steps": 6, "batch_size": 4, "precision": "fp32", "warmup_steps": 0, "log_every": 1}
    return LoopSettings(folder=folder, **{**values, **changes})


def _numbers(plan: BatchPlan) -> Iterator[Tensor]:
    for step in range(plan.first, plan.last):
        yield torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def _distance(model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, dict[str, float | Tensor]]:
    return (model(batch) - batch).square().mean(), {}


def _loop(settings: LoopSettings, extra: nn.Module | None = None, **options: Any) -> TrainingLoop:
    torch.manual_seed(0)
    linear = nn.Linear(3, 3)
    model = nn.Sequential(linear, extra) if extra else linear
    values = {"batches": _numbers, "loss": _distance, **options}
    return TrainingLoop(settings, model, [torch.optim.AdamW(model.parameters(), **ADAM)], **values)  # type: ignore[arg-type]


def test_a_finished_run_does_nothing_when_started_again(tmp_path: Path) -> None:
    first = _loop(_settings(tmp_path))
    first.run()
    again = _loop(_settings(tmp_path), loss=lambda *_: pytest.fail("trained beyond the end"))
    assert again.run().finished
    assert _same(again.weights(), first.weights())


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path: Path) -> None:
    _loop(_settings(tmp_path)).run()
    seen: list[int] = []

    def loss(model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        seen.append(step)
        return _distance(model, batch, step)

    _loop(_settings(tmp_path, steps=9), loss=loss).run()
    assert seen == [6, 7, 8]


def test_another_batch_size_or_seed_is_refused_on_resume(tmp_path: Path) -> None:
    _loop(_settings(tmp_path)).run()
    with pytest.raises(ValueError, match="was made with batch_size 4, the settings say 8"):
        _loop(_settings(tmp_path, batch_size=8)).run()
    with pytest.raises(ValueError, match="was made with seed 0, the settings say 1"):
        _loop(_settings(tmp_path, seed=1)).run()


def test_two_checkpoints_are_kept_and_leftovers_of_a_kill_are_ignored_and_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    model = nn.Linear(2, 2)
    (tmp_path / "writing_00000099").mkdir(parents=True)
    assert folder.newest() is None
    for step in (1, 2, 3):
        folder.save(step, {}, model, [], None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


def test_the_weights_of_a_run_are_the_averaged_ones_when_asked_for(tmp_path: Path) -> None:
    plain = _loop(_settings(tmp_path / "plain"))
    averaged = _loop(_settings(tmp_path / "averaged", ema_decay=0.9))
    plain.run()
    averaged.run()
    assert _same(dict(averaged.plain.state_dict()), plain.weights())
    assert not _same(averaged.weights(), plain.weights())


def test_averages_move_by_one_minus_the_decay() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema = EmaWeights(model, 0.9)
    nn.init.ones_(model.weight)
    ema.update(model, step=10_000)
    assert float(ema.values["weight"]) == pytest.approx(0.1)


def test_training_starts_from_given_weights_only_without_a_checkpoint(tmp_path: Path) -> None:
    start = {"weight": torch.full((3, 3), 7.0), "bias": torch.zeros(3)}
    save_file(start, tmp_path / "model.safetensors")
    settings = _settings(tmp_path / "run", steps=1, init_from=tmp_path)
    loop = _loop(settings)
    loop.run()
    assert float(loop.weights()["weight"].mean()) == pytest.approx(7.0, abs=0.1)
    save_file({name: value * 0 for name, value in start.items()}, tmp_path / "model.safetensors")
    again = _loop(settings)
    again.run()
    assert _same(again.weights(), loop.weights())


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist"):
        load_weights(nn.Linear(3, 3), tmp_path)
    save_file({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit the model"):
        load_weights(nn.Linear(3, 3), tmp_path)


def test_each_process_takes_its_share_of_the_same_batches() -> None:
    whole = list(StepSampler(10, BatchPlan(0, 7, 4, seed=1)))
    shares = [list(StepSampler(10, BatchPlan(0, 7, 4, seed=1, rank=rank, world=2))) for rank in (0, 1)]
    for batch, left, right in zip(whole, *shares, strict=True):
        assert sorted(batch) == sorted(left + right)
    with pytest.raises(ValueError, match="multiple of the 3 processes"):
        BatchPlan(0, 7, 4, world=3)


def test_the_batches_of_a_step_depend_on_the_step_alone() -> None:
    whole = list(StepSampler(10, BatchPlan(0, 20, 4, seed=1)))
    assert list(StepSampler(10, BatchPlan(13, 20, 4, seed=1))) == whole[13:]
    assert list(StepSampler(10, BatchPlan(0, 20, 4, seed=2))) != whole
    epoch = [index for batch in whole[:5] for index in batch]
    assert sorted(epoch) == sorted(list(range(10)) * 2), "every item once an epoch"


def test_the_rate_warms_up_stays_and_falls_to_zero() -> None:
    settings = LoopSettings(folder=Path("x"), steps=100, batch_size=1, warmup_steps=9, decay_fraction=0.5)
    assert settings.rate(0) == pytest.approx(0.1)
    assert settings.rate(9) == settings.rate(50) == 1.0
    assert settings.rate(75) == pytest.approx(0.5)
    assert settings.rate(99) == pytest.approx(0.02)
    cosine = LoopSettings(folder=Path("x"), steps=100, batch_size=1, warmup_steps=0, decay="cosine", decay_fraction=1.0)
    assert cosine.rate(50) == pytest.approx(0.5)
    assert cosine.rate(10) > 0.95


def test_the_optimizers_keep_their_own_rates_under_the_schedule(tmp_path: Path) -> None:
    loop = _loop(_settings(tmp_path, steps=4, decay_fraction=1.0))
    loop.run()
    group = loop.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(ADAM["lr"] * 0.25)
    assert group["initial_lr"] == ADAM["lr"]


def test_hooks_run_and_do_not_disturb_the_training(tmp_path: Path) -> None:
    calls: list[int] = []
    loop = _loop(_settings(tmp_path / "hooked"), nn.Dropout(0.5))

    def hook(step: int) -> None:
        calls.append(step)
        torch.rand(7)
        loop.plain.eval()

    loop.hooks = [Hook(1e-9, hook)]
    loop.run()
    quiet = _loop(_settings(tmp_path / "quiet"), nn.Dropout(0.5))
    quiet.run()
    assert calls == [1, 2, 3, 4, 5, 6]
    assert _same(loop.weights(), quiet.weights())


def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    norms: list[float] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            gradients = [p.grad for group in self.param_groups for p in group["params"]]
            norms.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))

    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, 9.0)
    TrainingLoop(
        _settings(tmp_path, grad_clip=0.5), model, [Spy(model.parameters(), lr=0.0)], _numbers, _distance
    ).run()
    assert norms == pytest.approx([0.5] * 6, abs=1e-3)


def test_a_loss_that_is_not_a_number_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        return model(batch).mean() * float("nan"), {}

    for name, changes in {"at a log line": {}, "at a save": {"log_every": 99, "checkpoint_minutes": 1e-9}}.items():
        loop = _loop(_settings(tmp_path / name, **changes), loss=broken)
        with pytest.raises(FloatingPointError, match="the loss is nan at step 1"):
            loop.run()
        assert loop.checkpoints.newest() is None


def test_a_log_line_cut_short_by_a_kill_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    MetricsLog(path, 2).write(3, {"loss": 0.5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_compile_on_says_why_it_cannot_and_auto_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(RuntimeError, match=r"compile is 'on' .* no C\+\+ compiler"):
        compile_parts([nn.Linear(1, 1)], "on")
    compile_parts([nn.Linear(1, 1)], "auto")
    assert "going on without it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("precision", "fp8"),
        ("checkpoint_minutes", 0.0),
        ("grad_clip", 0.0),
        ("decay_fraction", 1.5),
        ("ema_decay", 1.0),
        ("compile", "yes"),
        ("decay", "none"),
        ("threads", -1),
    ],
)
def test_a_bad_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        _settings(Path("x"), **{field: value})
