"""The bundled demo models: a small DeepSeek-V3 with an MTP module, and a dense draft for it."""

from pathlib import Path

TARGET: Path = Path(__file__).parent / "target"
DRAFT: Path = Path(__file__).parent / "draft"
