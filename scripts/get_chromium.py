"""Get a headless Chromium from npm into build/chromium, for the tests of pages in a browser.

The package is @sparticuz/chromium (MIT; 68 MB, 200 MB unpacked), with the libraries and a font that a bare machine
lacks. npm downloads and verifies it; none of its scripts run.
"""

import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

import brotli

PACKAGE = "@sparticuz/chromium@147.0.0"
FOLDER = Path(__file__).parents[1] / "build" / "chromium"
FONTS = "<fontconfig><dir prefix='relative'>fonts</dir><cachedir prefix='xdg'>fontconfig</cachedir></fontconfig>"


def main() -> None:
    """Get it."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", PACKAGE, "--silent", "--pack-destination", scratch], check=True, timeout=300)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as package:
            parts = {
                name: brotli.decompress(package.extractfile(f"package/bin/{name}.br").read())
                for name in ("al2023.tar", "fonts.tar", "chromium")
            }
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ("al2023.tar", "fonts.tar"):
        # Not tarfile: its protection against hostile archives depends on the Python version; Debian 12's has no filter.
        unpack = ["tar", "--extract", "--file", "-", "--no-same-owner", "--directory", FOLDER]
        subprocess.run(unpack, input=parts[name], check=True, timeout=60)
    (FOLDER / "fonts.conf").write_text(FONTS)
    program = FOLDER / "chromium.new"
    program.write_bytes(parts["chromium"])
    program.chmod(0o755)
    libraries = {**os.environ, "LD_LIBRARY_PATH": str(FOLDER / "lib")}
    subprocess.run([program, "--version"], check=True, timeout=60, env=libraries)  # keep it only if it starts
    program.rename(FOLDER / "chromium")


if __name__ == "__main__":
    main()
