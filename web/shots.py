"""Pictures of a report for the documentation: `python web/shots.py RUN/report.html`, from the repository's root.

Writes docs/images/report-light.png, -dark.png (1440 wide) and -phone.png (390 wide), each of 256 colours: small files.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SHOTS = (("light", "light", 1440, 900, 1.5), ("dark", "dark", 1440, 900, 1.5), ("phone", "light", 390, 1500, 1.5))


def main(report: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--hide-scrollbars"]
        )
        for name, scheme, width, height, scale in SHOTS:
            view = {"width": width, "height": height}
            page = browser.new_page(viewport=view, color_scheme=scheme, device_scale_factor=scale)
            page.goto(report.resolve().as_uri())
            page.wait_for_selector(".minis canvas, .empty")
            page.wait_for_timeout(500)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            path = IMAGES / f"report-{name}.png"
            picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"{path.name}: {path.stat().st_size // 1000} kB")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
