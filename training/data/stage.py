"""The data stage: fetch the packages, render the sprites, and draw a preview."""

import argparse
import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from training.data.concepts import load_concepts, select_concepts
from training.data.drawings import open_drawings
from training.data.errors import DataError
from training.data.nouns import NAMES, SYNONYMS
from training.data.preview import save_contact_sheet
from training.data.scenes import SceneComposer
from training.data.settings import DataSettings
from training.data.sources import fetch_package
from training.data.sprites import SPRITE_SIZE, SpriteSet, render_sprites
from training.data.styles import LABELS, STYLES

# Raise when rendering changes, so that stored sprites of older code are made again.
_RENDER_VERSION = 1
PREVIEW_SCENES = 64


def sprite_key(settings: DataSettings) -> str:
    """Names what sprites are made from; other settings of the data do not change it."""
    styles = [f"{name} {STYLES[name].package.slug}" for name in settings.styles]
    parts = [_RENDER_VERSION, SPRITE_SIZE, styles, LABELS.slug, asdict(settings.concepts), NAMES, SYNONYMS]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def prepare_sprites(settings: DataSettings) -> SpriteSet:
    """The sprites of `settings`, fetched and rendered if `settings.folder` does not hold exactly them already."""
    key = sprite_key(settings)
    folder = settings.folder / "sprites"
    try:
        return SpriteSet.load(folder, key)
    except DataError:
        pass
    packages = settings.folder / "packages"
    concepts = select_concepts(load_concepts(fetch_package(LABELS, packages)), settings.concepts)
    styles = [STYLES[name] for name in settings.styles]
    sources = [(style, open_drawings(style, fetch_package(style.package, packages))) for style in styles]
    render_sprites(concepts, sources).save(folder, key)
    return SpriteSet.load(folder, key)


def run_data(settings: DataSettings) -> SpriteSet:
    """Fetch, render and store the sprites, and write a preview of train scenes to `settings.folder`/preview.png."""
    sprites = prepare_sprites(settings)
    composer = SceneComposer(sprites, "train", settings.seed, settings.size, settings.scenes)
    scenes = [composer.compose(index) for index in range(PREVIEW_SCENES)]
    save_contact_sheet([(scene.image, scene.caption) for scene in scenes], settings.folder / "preview.png")
    return sprites


def main(arguments: list[str] | None = None) -> None:
    """`python -m training.data.stage --config FILE`."""
    parser = argparse.ArgumentParser(description="Fetch and render the default training data.")
    parser.add_argument("--config", type=Path, default=Path("configs/data.toml"))
    try:
        settings = DataSettings.load(parser.parse_args(arguments).config)
        sprites = run_data(settings)
    except (DataError, ValueError, OSError) as error:
        raise SystemExit(f"data: {error}") from error
    counts = Counter(sprite.style for sprite in sprites.table)
    print(f"{len(sprites)} sprites of {len(sprites.concepts)} concepts in {settings.folder / 'sprites'}")
    for style, count in counts.items():
        print(f"  {style}: {count} ({STYLES[style].licence})")
    print(f"preview: {settings.folder / 'preview.png'}")


if __name__ == "__main__":
    main()
