"""Draw the pictures of docs/figures again, with the commands of the pages.

    python scripts/draw_figures.py               # list them
    python scripts/draw_figures.py validation    # draw one, or several, or "all": an hour on two cores
    python scripts/draw_figures.py page tiny_ess # after `make demo`, `make train`

Pictures of pages need playwright and a Chromium, from scripts/get_chromium.py or on the path.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
AGENTS = "compare examples/agents.toml --set optimizer_steps=24"
LEARNING = "compare examples/learning.toml"
PLAN = "plan examples/plan_qwen7b_128_h100.toml"
DRAWN = {
    "agents_generation_phase": (AGENTS, "generation_phase"),
    "agents_turns": (AGENTS, "turns_pipeline"),
    "divergence": (f"{LEARNING} --set policy.learning_rate=1e-3 --set 'compare.seeds=[0, 1, 2, 3]'", "learning"),
    "lag_and_ess": (LEARNING, "lag_and_ess"),
    "learning": (LEARNING, "learning"),
    "plan_throughput_against_lag": (PLAN, "plan_throughput_against_lag"),
    "plan_throughput_against_split": (PLAN, "plan_throughput_against_split"),
    "rollouts_against_environments": ("environments examples/agents.toml", "rollouts_against_environments"),
    "throughput_against_max_lag": (
        "compare examples/appendix_a.toml --set optimizer_steps=804",
        "throughput_against_max_lag",
    ),
    "tiny_ess": ("plot runs/tiny", "ess"),
    "tiny_timeline": ("plot runs/tiny", "timeline_tiny"),
    "validation": ("validate", "validation"),
}
"""Command and file of each picture that a command draws."""
PAGES = {"page": "runs/demo", "page_of_a_real_run": "runs/tiny"}
"""The run of each picture of a page."""
CHROMIUM = ROOT / "build" / "chromium"
"""Folder of scripts/get_chromium.py: a browser with libraries and a font."""


def main(names: Sequence[str]) -> int:
    """Draw pictures; run each command once.

    Args:
        names: Pictures to draw, or ``all``. None: list them.

    Returns:
        Exit status: 0 done, 2 wrong arguments.
    """
    known = [*DRAWN, *PAGES]
    if not names:
        sys.stdout.write("\n".join(known) + "\n")
        return 0
    wanted = known if list(names) == ["all"] else list(names)
    if unknown := [name for name in wanted if name not in known]:
        sys.stderr.write(f"NAME must be one of {', '.join(known)}, got {unknown[0]}\n")
        return 2
    for command in dict.fromkeys(DRAWN[name][0] for name in wanted if name in DRAWN):
        with TemporaryDirectory() as folder:
            _run(*shlex.split(command), "--out", folder)
            for name in wanted:
                if name in DRAWN and DRAWN[name][0] == command:
                    (path,) = Path(folder).rglob(f"{DRAWN[name][1]}.png")
                    shutil.copy(path, FIGURES / f"{name}.png")
    for name in wanted:
        if name in PAGES:
            _take_picture(PAGES[name], FIGURES / f"{name}.png")
    return 0


def _run(*words: str) -> None:
    """Run one of our commands in the folder of the project."""
    program = "from pipelinerl.cli import main; main()"
    subprocess.run([sys.executable, "-c", program, *words], check=True, cwd=ROOT)


def _take_picture(run: str, path: Path) -> None:
    """Save a picture of the upper part of a page."""
    from PIL import Image  # noqa: PLC0415  # matplotlib brings it
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # brought by the extra dev alone

    with TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Path(folder) / "page.html"
        _run("report", run, "--out", str(page))
        ours = shutil.which("chromium", path=CHROMIUM)
        own = {"LD_LIBRARY_PATH": str(CHROMIUM / "lib"), "FONTCONFIG_FILE": str(CHROMIUM / "fonts.conf")}
        browser = driver.chromium.launch(
            executable_path=ours or shutil.which("chromium"),
            args=["--no-sandbox"],
            env={**os.environ, **(own if ours else {})},
        )
        tab = browser.new_page(viewport={"width": 760, "height": 1480})
        tab.goto(page.as_uri())
        tab.wait_for_function("window.Bokeh !== undefined && Bokeh.documents.every(one => one.is_idle)")
        tab.screenshot(path=path)
        browser.close()
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128, kmeans=2)  # few marks have a colour
    small.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
