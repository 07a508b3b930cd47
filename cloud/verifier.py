"""A verifier: a bundle's models, the engine and its scheduler, without the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cloud.engine import Engine
from cloud.methods import CLOUD_ROLES
from cloud.models.image_codec import WEIGHTS_FILE
from cloud.models.interval_adapter import IntervalFeatures
from cloud.models.loading import load_interval_features, load_transformer
from cloud.relaxation import make_rule
from cloud.scheduler import Scheduler, Task
from cloud.session import Adapt, Request, Session
from cloud.shadow_drafter import ShadowDrafter
from protos import ciar_pb2 as pb
from shared.bundle import Bundle
from shared.errors import SettingsError
from shared.graphs import CaptionEncoder, DrafterCache

__all__ = ["Verifier", "VerifierSettings"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    """How a verifier computes.

    Args:
        device: `auto` (CUDA when present), `cpu` or `cuda`.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: bfloat16 on CUDA and on CPUs with matrix units for it, else
            float32.
        threads: threads of the CPU's matrix products; 0 leaves torch's choice.
        max_sessions: pictures at once; each takes a slot of the key-value cache.

    Raises:
        SettingsError: a value is not acceptable, or there is no such device.
    """

    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    max_sessions: int = 8

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise SettingsError(f"device: one of auto, cpu, cuda is needed, not {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SettingsError("device: cuda was asked for, but torch finds no CUDA device; use --device cpu or auto")
        if self.dtype not in ("auto", *_DTYPES):
            raise SettingsError(f"dtype: one of auto, {', '.join(_DTYPES)} is needed, not {self.dtype!r}")
        if self.threads < 0:
            raise SettingsError(f"threads: at least 0 is needed (0 leaves the choice to torch), not {self.threads}")
        if not 1 <= self.max_sessions <= 1024:
            raise SettingsError(f"max_sessions: 1 to 1024 is needed, not {self.max_sessions}")

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            fast = self.torch_device.type == "cuda" or torch.cpu._is_amx_tile_supported()
            return torch.bfloat16 if fast else torch.float32
        return _DTYPES[self.dtype]


@dataclass(slots=True)
class Verifier:
    """Loads a bundle's cloud part and runs generations.

    Args:
        bundle: an opened bundle.
        settings: how to compute.
    """

    bundle: Bundle
    settings: VerifierSettings = field(default_factory=VerifierSettings)
    scheduler: Scheduler = field(init=False)
    captions: CaptionEncoder = field(init=False)
    drafter: ort.InferenceSession = field(init=False)
    features: IntervalFeatures | None = field(init=False)
    _codebook: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        threads = self.settings.threads or torch.get_num_threads()
        # OpenMP keeps a team for every thread that ever computed in parallel. With more of them than cores, teams sleep
        # between products instead of waiting awake, and a decoding step takes twice as long: only the engine's thread
        # may have one.
        torch.set_num_threads(1)
        model = load_transformer(self.bundle.path("target.safetensors"))
        engine = Engine(model, self.settings.max_sessions, self.settings.torch_device, self.settings.torch_dtype)
        self.scheduler = Scheduler(engine, threads)
        self.captions = CaptionEncoder(
            _graph(self.bundle, "text_encoder.onnx"),
            Tokenizer.from_file(str(self.bundle.path("tokenizer.json"))),
            self.bundle.manifest.prefix_rows,
        )
        self.drafter = _graph(self.bundle, "drafter.onnx")
        self.features = None
        if self.bundle.has("interval_features.safetensors"):
            features = load_interval_features(self.bundle.path("interval_features.safetensors"))
            self.features = features.to(self.settings.torch_device)
        self.scheduler.start()

    @property
    def dim(self) -> int:
        """Width of the target."""
        return self.scheduler.engine.config.dim

    @property
    def feature_modes(self) -> list[str]:
        """Modes of interval features that the bundle was trained for."""
        return self.features.modes if self.features else []

    def close(self) -> None:
        """Ends the engine's thread."""
        self.scheduler.stop()

    def begin(
        self,
        request: Request,
        emit: Callable[[pb.CloudMessage], None],
        finished: Callable[[Session | None, BaseException | None], None],
    ) -> Task:
        """Begins a generation. `emit` and `finished` are called on the engine's thread; see `Task`."""
        task = Task(lambda: self._session(request, emit), CLOUD_ROLES[request.method.cloud_role], finished)
        self.scheduler.submit(task)
        return task

    def _session(self, request: Request, emit: Callable[[pb.CloudMessage], None]) -> Session:
        shadow, rule = None, request.rule
        drafted = request.window.init == "drafter" if request.window else rule is not None and rule.needs_draft_probs
        if drafted:
            manifest = self.bundle.manifest
            cache = DrafterCache(self.drafter, manifest.prefix_rows, manifest.grid.size)
            shadow = ShadowDrafter(cache, request.features, request.sampling)
        acceptance = None
        if rule is not None and rule.name not in ("gumbel", "block"):
            acceptance = make_rule(rule.name, request.rule_options, self._codes)
        return Session(self.scheduler.engine, request, emit, shadow, self._adapt(request), acceptance)

    def _codes(self) -> torch.Tensor:
        """The codebook (V, width), for rules that know which tokens look alike."""
        if self._codebook is None:
            tensors = load_file(self.bundle.path(WEIGHTS_FILE))
            self._codebook = tensors["codebook.codes"].to(self.settings.torch_device)
        return self._codebook

    def _adapt(self, request: Request) -> Adapt | None:
        if self.features is None or request.selective is None or request.selective.feature_mode == "none":
            return None
        adapter = self.features.adapters[request.selective.feature_mode]
        device = self.settings.torch_device

        @torch.inference_mode()
        def adapt(features: np.ndarray[Any, np.dtype[np.float32]]) -> torch.Tensor:
            result: torch.Tensor = adapter(torch.from_numpy(features).to(device))
            return result

        return adapt


def _graph(bundle: Bundle, name: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    # The engine owns the cores; these graphs are small, and spinning pools would fight it.
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(str(bundle.path(name)), options, providers=["CPUExecutionProvider"])
