"""`ciar-train STAGE --config FILE`: the stages of training, in their order."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import EXIT_INTERRUPTED, CiarError

__all__ = ["STAGES", "main"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: where its settings and its work are (imported only when it runs), and a line for the help."""

    module: str
    settings: str
    run: str
    summary: str

    def open(self) -> tuple[Any, Callable[[Any], Any]]:
        module = importlib.import_module(self.module)
        return getattr(module, self.settings), getattr(module, self.run)


STAGES = {
    "data": Stage("training.data.stage", "DataSettings", "run_data", "fetch and render the drawings, compose scenes"),
    "image-codec": Stage("training.image_codec", "CodecTrainingSettings", "run_image_codec", "pictures <-> tokens"),
    "text-encoder": Stage(
        "training.text_encoder", "TextEncoderSettings", "run_text_encoder", "fetch and quantise the caption encoder"
    ),
    "tokens": Stage("training.encoding", "EncodingSettings", "run_tokens", "encode pictures and captions once"),
    "target": Stage("training.target", "TargetSettings", "run_target", "the cloud's decoder"),
    "drafter": Stage("training.drafter", "DrafterSettings", "run_drafter", "the device's decoder and its Inter-Head"),
    "prompts": Stage("training.data.prompts", "PromptSettings", "run_prompts", "captions that no picture exists of"),
    "drawn": Stage("training.drawing", "DrawingSettings", "run_drawn", "pictures the target draws, to learn on"),
    "inter-dro": Stage("training.inter_dro", "InterDroSettings", "run_inter_dro", "the drafter's intervals"),
    "interval-adapter": Stage(
        "training.interval_adapter", "AdapterSettings", "run_interval_adapter", "what the cloud is told of kept tokens"
    ),
    "export": Stage("training.export", "ExportSettings", "run_export", "ONNX graphs, parity report, bundle"),
    "evaluate": Stage("training.evaluation", "EvaluationSettings", "run_evaluation", "quality of a bundle and method"),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="ciar-train",
        description="Trains the models of a bundle, stage by stage. A stage that was interrupted goes on from its last "
        "checkpoint when it is run again. `accelerate launch -m training.cli STAGE ...` uses several devices.",
    )
    stages = result.add_subparsers(dest="stage", required=True, metavar="STAGE")
    for name, stage in STAGES.items():
        sub = stages.add_parser(name, help=stage.summary, description=stage.summary)
        default = Path("configs") / f"{name.replace('-', '_')}.toml"
        sub.add_argument("--config", type=Path, default=default, metavar="FILE", help="TOML; default: %(default)s")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `ciar-train`."""
    options = parser().parse_args(arguments)
    settings, run = STAGES[options.stage].open()
    try:
        outcome = run(settings.load(options.config))
    except CiarError as error:
        print(f"ciar-train {options.stage}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (FileNotFoundError, FloatingPointError, RuntimeError, ValueError) as error:
        print(f"ciar-train {options.stage}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if outcome is False:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
