"""Get programs from Debian packages without installing them."""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def run(*command: str | Path, cwd: Path | None = None) -> str:
    try:
        return subprocess.run(command, cwd=cwd, check=True, text=True, capture_output=True, timeout=45).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took more than {error.timeout} s") from error


def download(packages: list[str], folder: Path) -> None:
    """Download Debian packages into `folder`. If the system has no package lists, or they name a version that the
    mirror has dropped, download lists of our own first."""
    lists = folder / "lists"
    options = [
        f"Dir::Cache={folder}/cache",
        "Acquire::Retries=0",
        "Acquire::http::Timeout=10",
        "APT::Update::Error-Mode=any",
    ]
    if os.getuid() == 0:
        options.append("APT::Sandbox::User=root")  # the usual user for downloads cannot write here
    apt = ["apt-get", "-q", *(f"-o{option}" for option in options)]
    own_lists = f"-oDir::State::lists={lists}"
    if not lists.exists():
        try:
            run(*apt, "download", *packages, cwd=folder)
            return
        except OSError:
            (lists / "partial").mkdir(parents=True)
            run(*apt, own_lists, "update")
    run(*apt, own_lists, "download", *packages, cwd=folder)


@functools.cache
def find_program(name: str) -> tuple[str, str]:
    """Return the path of a program, or why there is none. If it is not installed, unpack the package of that name under
    the temporary folder."""
    if installed := shutil.which(name):
        return installed, ""
    cache = Path(tempfile.gettempdir()) / f"oneworld-{name}-{os.getuid()}"
    program = cache / "usr/bin" / name
    if cache.exists() and cache.stat().st_uid != os.getuid():
        return "", f"{cache} belongs to another user, whose programs are not to be run: remove it"
    if not program.exists():
        try:
            with tempfile.TemporaryDirectory(prefix=f"{cache.name}.", dir=cache.parent) as temporary:
                download([name], Path(temporary))
                (file,) = Path(temporary).glob(f"{name}_*.deb")
                run("dpkg", "-x", file, Path(temporary) / "root")
                shutil.rmtree(cache, ignore_errors=True)
                (Path(temporary) / "root").rename(cache)
        except OSError as error:
            if not program.exists():  # otherwise another process was faster
                return "", f"no {name} and no download of it (install it): {error}"
    return str(program), ""
