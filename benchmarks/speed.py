"""Speed of the runtime, as ratios from one run on this machine. `make bench`, or `python -m benchmarks.speed --help`.

Absolute times depend on the machine and on who else uses it; compare ratios. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.nn import functional

from cloud.engine import Caption, Engine, Feed
from cloud.models.loading import load_transformer
from cloud.models.transformer import Transformer, TransformerConfig
from cloud.process import running_verifier
from device.client import DeviceClient, GenerateSettings, Picture
from shared.bundle import Bundle, default_bundle_folder
from training.export.variants import measure_variants
from training.quantise import Precision

PROMPTS = (
    "a 3d render of a red apple on a blue background",
    "a cartoon of a lion on a green background",
    "a 3d render of an umbrella on a yellow background",
    "a cartoon of a rocket on a black background",
    "a cartoon of a snail on a pink background",
    "a 3d render of two copies of a bell on a white background",
    "a cartoon of a cactus to the left of a guitar on an orange background",
    "a 3d render of a tiger face on a teal and white gradient background",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=default_bundle_folder(), metavar="DIR")
    parser.add_argument("--repeat", type=int, default=2, help="rounds over the prompts (default: %(default)s)")
    parser.add_argument("--only", choices=list(PARTS), help="one part alone")
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    print(f"bundle {bundle.manifest.name} {bundle.manifest.digest:.12}, {torch.get_num_threads()} threads of torch\n")
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(bundle, options.repeat)
            print(flush=True)


def decoding_step(bundle: Bundle, repeat: int) -> None:
    """One `ar` step of the engine beside the bare matrix products of the same shapes on the same threads."""
    print("decoding step, one session, two guidance rows       step ms   products ms   with attention's   ratio")
    for dtype in (torch.float32, torch.bfloat16):
        plain = load_transformer(bundle.path("target.safetensors")).to(dtype).eval()
        engine = Engine(load_transformer(bundle.path("target.safetensors")), 1, dtype=dtype)
        calls = step(engine), _products(plain), _attended(plain)
        whole, bare, attended = (best(call, 40 * repeat) for call in calls)
        print(
            f"  {str(dtype).removeprefix('torch.'):<48}{whole * 1e3:>9.2f}{bare * 1e3:>14.2f}{attended * 1e3:>19.2f}"
            f"{whole / bare:>8.2f}"
        )


def step(engine: Engine, rows: int = 1) -> Callable[[], object]:
    """Feeds tokens in the middle of a picture, again and again at the same place; all their rows are wanted."""
    sequence = engine.cache.allocate(guided=True)
    engine.forward([Feed(sequence, caption=Caption(torch.randn(12, engine.config.caption_dim)))])
    middle = engine.config.grid.size // 2
    engine.forward([Feed(sequence, [0] * middle)])

    def feed() -> None:
        engine.forward([Feed(sequence, [1] * rows, wanted=rows)])
        sequence.truncate(engine.config.prefix_rows + middle)

    return feed


def _products(model: Transformer) -> Callable[[], object]:
    """All weight matrices of a step, applied to two rows."""
    ends = tuple(f"{name}.weight" for name in ("qkv", "attention_out", "gate_up", "down", "head"))
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith(ends)]
    rows = {weight.shape[1]: torch.randn(2, weight.shape[1], dtype=model.head.weight.dtype) for weight in weights}

    @torch.inference_mode()
    def products() -> None:
        for weight in weights:
            functional.linear(rows[weight.shape[1]], weight)

    return products


def _attended(model: Transformer) -> Callable[[], object]:
    """The weight products and the two products of attention in each layer, at the middle of a picture."""
    config, products, dtype = model.config, _products(model), model.head.weight.dtype
    length = config.prefix_rows + config.grid.size // 2
    queries = torch.randn(2 * config.heads, 1, config.head_dim, dtype=dtype)
    keys = torch.randn(2 * config.heads, config.head_dim, length, dtype=dtype)
    values = torch.randn(2 * config.heads, length, config.head_dim, dtype=dtype)

    @torch.inference_mode()
    def attended() -> None:
        products()
        for _ in range(config.layers):
            torch.bmm(torch.bmm(queries, keys), values)

    return attended


def best(function: Callable[[], object], times: int) -> float:
    """Median seconds of a call, warmed up."""
    for _ in range(5):
        function()
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def methods(bundle: Bundle, repeat: int) -> None:
    """Wall clock of `sd` and `device` against `ar`, on loopback, one picture at a time."""
    print("method, one picture at a time      seconds   speed-up   passes   accepted   draft s   wait s")
    settings = {
        "ar": GenerateSettings("ar"),
        "sd gumbel": GenerateSettings("sd"),
        "sd gumbel, two drafts in flight": GenerateSettings("sd", in_flight=2),
        "sd mrs": GenerateSettings("sd", "mrs"),
        "sd block": GenerateSettings("sd", "block"),
        "device": GenerateSettings("device"),
    }
    with running_verifier(bundle.folder) as verifier, DeviceClient(verifier.address, bundle=bundle.folder) as client:
        for setting in settings.values():
            client.generate(PROMPTS[0], setting)
        # Interleaved, so that a slow minute of the machine hits all alike.
        drawn: dict[str, list[Picture]] = {name: [] for name in settings}
        for _ in range(repeat):
            for prompt in PROMPTS:
                for name, setting in settings.items():
                    drawn[name].append(client.generate(prompt, setting))
    base = _seconds(drawn["ar"])
    for name, pictures in drawn.items():
        reports = [picture.report for picture in pictures]
        proposed = sum(report.draft.proposed for report in reports)
        accepted = sum(report.draft.accepted for report in reports) / proposed if proposed else 0.0
        mean = [
            statistics.mean(v)
            for v in zip(*((r.cloud.forwards, r.seconds.draft, r.seconds.wait) for r in reports), strict=True)
        ]
        print(
            f"  {name:<32}{_seconds(pictures):>8.3f}{base / _seconds(pictures):>10.2f}x{mean[0]:>9.1f}"
            f"{accepted:>11.0%}{mean[1]:>10.3f}{mean[2]:>9.3f}"
        )


def _seconds(pictures: Sequence[Picture]) -> float:
    return statistics.median(picture.report.seconds.total for picture in pictures)


def concurrency(bundle: Bundle, repeat: int) -> None:
    """Eight devices at once, a process each, against the same eight in a row."""
    print("eight sessions                     in a row s   at once s   at once / in a row")
    with (
        running_verifier(bundle.folder) as verifier,
        _devices(len(PROMPTS), verifier.address, bundle.folder) as devices,
    ):
        for name in ("ar", "sd", "sjd"):
            setting = GenerateSettings(name, seed=1)

            def in_a_row(setting: GenerateSettings = setting) -> None:
                for device, prompt in zip(devices, PROMPTS, strict=True):
                    device.submit(_draw, prompt, setting).result()

            def at_once(setting: GenerateSettings = setting) -> None:
                drawing = [
                    device.submit(_draw, prompt, setting) for device, prompt in zip(devices, PROMPTS, strict=True)
                ]
                for picture in drawing:
                    picture.result()

            at_once()
            row, once = (statistics.median(_timed(f) for _ in range(repeat)) for f in (in_a_row, at_once))
            print(f"  {name:<32}{row:>13.2f}{once:>12.2f}{once / row:>21.2f}")


@contextmanager
def _devices(count: int, address: str, bundle: Path) -> Iterator[list[ProcessPoolExecutor]]:
    """So many processes with a client each, as devices do not share an interpreter."""
    with ExitStack() as stack:
        context = multiprocessing.get_context("spawn")  # gRPC and fork do not mix
        yield [stack.enter_context(ProcessPoolExecutor(1, context, _connect, (address, bundle))) for _ in range(count)]


_client: DeviceClient | None = None


def _connect(address: str, bundle: Path) -> None:
    global _client
    _client = DeviceClient(address, bundle=bundle)


def _draw(prompt: str, setting: GenerateSettings) -> None:
    assert _client is not None
    _client.generate(prompt, setting)


def drafter_step(bundle: Bundle, repeat: int) -> None:
    """A step of the drafter as the bundle stores it, beside other precisions and thread counts of the same shape."""
    shape = json.loads(bundle.path("drafter.json").read_text(encoding="utf-8"))["transformer"]
    kept = Precision(**bundle.manifest.models["drafter_precision"])
    others = [Precision("fp32"), Precision("dynamic"), Precision("weights", 32, 4)]
    variants = measure_variants(
        {"bundle": TransformerConfig(**shape)}, [kept, *(p for p in others if p != kept)], steps=150 * repeat
    )
    best = min(min(variant.one_thread_ms, variant.two_threads_ms) for variant in variants)
    print("drafter step (the first row is the bundle's)       1 thread ms   2 threads ms   1 thread / best of all")
    for variant in variants:
        print(
            f"  {variant.precision:<48}{variant.one_thread_ms:>12.2f}{variant.two_threads_ms:>15.2f}"
            f"{variant.one_thread_ms / best:>25.2f}"
        )


def _timed(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


PARTS: dict[str, Callable[[Bundle, int], None]] = {
    "step": decoding_step,
    "drafter": drafter_step,
    "methods": methods,
    "concurrency": concurrency,
}


if __name__ == "__main__":
    main()
