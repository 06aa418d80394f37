"""Fork programs from one process that has imported what they need, because the imports of a run take seconds.

    python -m tests.zygote MODULE...

Each line of standard input is a program: `[file of its output, [path, arguments...]]`. The answer is a line with its
exit code. `run_program` in tests/launcher.py starts this, once for each process of pytest. It ends with that process.
"""

import gc
import importlib
import json
import os
import runpy
import sys


def run(output: str, words: list[str]) -> int:
    """Run a program in a fork, and return its exit code."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.setsid()
    file, nothing = os.open(output, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, file), (2, file)):
        os.dup2(source, target)
    os.close(file)
    os.close(nothing)
    sys.argv = words
    gc.enable()
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print is no answer
    gc.disable()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        print(run(*json.loads(line)), file=answers)


if __name__ == "__main__":
    main()
