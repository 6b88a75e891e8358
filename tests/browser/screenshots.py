"""Takes pictures of the status page: ``python tests/browser/screenshots.py FOLDER [scene ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))

from chromium import find_chromium, launch, serve
from scenes import SCENES

WIDTHS = {"narrow": 360, "middle": 1_000, "wide": 1_600}


def main() -> int:
    """Write one file for each scene, scheme and width."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        path = find_chromium()
        assert path is not None, "no Chromium is installed"
        browser = launch(playwright, path)
        for name in sys.argv[2:] or SCENES:
            with serve(SCENES[name]()) as url:
                for scheme in ("light", "dark"):
                    for size, width in WIDTHS.items():
                        page = browser.new_page(
                            viewport={"width": width, "height": 900},
                            color_scheme=scheme,  # type: ignore[arg-type]  # both are schemes
                        )
                        page.goto(url + "/")
                        expect(page.locator("#connection")).to_have_text("Live")
                        page.screenshot(path=folder / f"{name}-{scheme}-{size}.png", full_page=True)
                        page.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
