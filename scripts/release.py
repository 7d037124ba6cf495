"""Builds the packages of a release, checks them, and tries the wheel in an empty environment.

    python scripts/release.py                the whole of it, into dist/
    python scripts/release.py --tag v1.0.0   the same; the tag must be that of the version
    python scripts/release.py --no-try       builds and checks only

The packages are built from the last commit, not from the working tree, so nothing that lies around
gets into them. The wheel is built from the sdist, so an sdist that lacks a file fails here. Ends
with the SHA-256 of both files, which are in dist/SHA256SUMS as well.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ONLY_IN_THE_REPOSITORY = re.compile(r"(\.ci/.+|\.gitignore|\.pre-commit-config\.yaml)")
"""Tracked files that the sdist leaves out."""
DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
MADE_BY_SETUPTOOLS = re.compile(r"(PKG-INFO|setup\.cfg|src/kvboost\.egg-info/[\w.-]+)")


def wheel_problems(held: Iterable[str], tracked: Iterable[str], version: str) -> list[str]:
    """The problems of the files of a wheel: it must hold the tracked files of ``src/kvboost``
    and its own description, and nothing else."""
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/kvboost/")}
    wanted = package | {f"kvboost-{version}.dist-info/{name}" for name in DIST_INFO}
    return _differences("the wheel", set(held), wanted)


def sdist_problems(held: Iterable[str], tracked: Iterable[str], version: str) -> list[str]:
    """The problems of the files of an sdist: it must hold every tracked file but a few."""
    wanted = {name for name in tracked if not ONLY_IN_THE_REPOSITORY.fullmatch(name)}
    inside = {name.removeprefix(f"kvboost-{version}/") for name in held}
    made = {name for name in inside if MADE_BY_SETUPTOOLS.fullmatch(name)}
    return _differences("the sdist", inside - made, wanted)


def _differences(what: str, held: set[str], wanted: set[str]) -> list[str]:
    return [
        *(f"{what} lacks {name}" for name in sorted(wanted - held)),
        *(f"{what} holds {name}" for name in sorted(held - wanted)),
    ]


def version_problems(root: Path, version: str, tag: str | None) -> list[str]:
    """Where another version is written than ``version``."""
    problems = []
    if tag is not None and tag != f"v{version}":
        problems.append(f"the tag {tag} is not v{version}")
    changes = re.findall(r"^## (\S+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if changes[:1] != [version]:
        problems.append(f"CHANGELOG.md begins with {changes[:1]}, not with {version}")
    cited = re.findall(r"^version: (\S+)", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited != [version]:
        problems.append(f"CITATION.cff has the version {cited}, not {version}")
    return problems


def absolute_links(text: str, pages: str, files: str) -> str:
    """A page with links that work outside of the repository, such as on a package index. Links to
    files of the repository begin with ``pages``, images with ``files``."""

    def absolute(link: re.Match[str]) -> str:
        image, target = link[1], link[2]
        if "://" in target or target.startswith("#"):
            return link[0]
        return f"{image}({files if image.startswith('!') else pages}/{target})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", absolute, text)


def checksums(paths: Iterable[Path]) -> str:
    """Lines as ``sha256sum`` writes and checks them."""
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths)
    return "".join(lines)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    """Runs a command, of which nothing may come from this clone: no ``PYTHON*`` variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env={**kept, **environment})
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(str(part) for part in command)}")


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def export(folder: Path) -> list[str]:
    """Writes the files of the last commit into ``folder``; gives their names."""
    if changed := git("status", "--porcelain"):
        print(f"not in the packages, because it is not committed:\n{changed}")
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    git("archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as tracked:
        tracked.extractall(folder, filter="data")
    return git("ls-tree", "-r", "--name-only", "HEAD").splitlines()


def link_the_readme(source: Path, version: str) -> None:
    """Makes the links of the README absolute, if pyproject.toml says where the repository is."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    address = project.get("urls", {}).get("Repository", "").rstrip("/")
    if not address:
        print("[project.urls] in pyproject.toml has no Repository: links and images of the README")
        print("will not work on its page at the package index (see CONTRIBUTING.md, Releases).")
        return
    readme = source / "README.md"
    pages, files = f"{address}/blob/v{version}", f"{address}/raw/v{version}"
    readme.write_text(absolute_links(readme.read_text(), pages, files))


def build(tag: str | None, scratch: Path) -> tuple[Path, Path]:
    """Builds and checks the sdist and the wheel; gives their paths in dist/."""
    say("build")
    source, out = scratch / "source", ROOT / "dist"
    tracked = export(source)
    text = (source / "src" / "kvboost" / "__init__.py").read_text()
    version = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]
    if problems := version_problems(source, version, tag):
        raise SystemExit("\n".join(problems))
    link_the_readme(source, version)
    shutil.rmtree(out, ignore_errors=True)
    # Files in the wheel get the time of the commit, not of the build.
    epoch = git("log", "-1", "--format=%ct")
    pack = (sys.executable, "-m", "build", "--no-isolation")  # with the pinned setuptools
    run(*pack, "--outdir", out, cwd=source, SOURCE_DATE_EPOCH=epoch)
    sdist, wheel = out / f"kvboost-{version}.tar.gz", out / f"kvboost-{version}-py3-none-any.whl"

    say("check metadata and contents")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=scratch)
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = opened.namelist()
    with tarfile.open(sdist) as opened:
        in_sdist = [member.name for member in opened.getmembers() if not member.isdir()]
    problems = [
        *wheel_problems(in_wheel, tracked, version),
        *sdist_problems(in_sdist, tracked, version),
    ]
    if problems:
        raise SystemExit("\n".join(problems))
    for path, names in ((wheel, in_wheel), (sdist, in_sdist)):
        print(f"{path.name}: {len(names)} files, {path.stat().st_size:,} bytes, as expected")
    return sdist, wheel


def try_it(wheel: Path, scratch: Path) -> None:
    """Installs the wheel where nothing else is, and uses it as its users will."""
    say("install the wheel in an empty environment")
    place = scratch / "elsewhere"
    place.mkdir()
    run(sys.executable, "-m", "venv", place / "venv", cwd=place)
    python = place / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    install = (*pip, "install", "--constraint", ROOT / "constraints.txt")
    index = os.environ.get("TORCH_INDEX")
    run(*install, *(("--index-url", index) if index else ()), "torch", cwd=place)
    run(*install, f"{wheel}[serve]", "openai", cwd=place)
    run(*pip, "check", cwd=place)

    say("use it there")
    program = shutil.copy(ROOT / "scripts" / "try_install.py", place)
    run(python, program, cwd=place, KVBOOST_HOME=str(place / "home"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", help="the tag of the release, such as v1.0.0")
    parser.add_argument("--no-try", action="store_true", help="do not install and run the wheel")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvboost-release-") as folder:
        sdist, wheel = build(options.tag, Path(folder))
        if not options.no_try:
            try_it(wheel, Path(folder))
    say(f"released to dist/ in {(time.monotonic() - started) / 60:.1f} minutes; SHA-256")
    sums = checksums([wheel, sdist])
    (ROOT / "dist" / "SHA256SUMS").write_text(sums)
    print(sums, end="")


if __name__ == "__main__":
    main()
